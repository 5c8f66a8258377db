"""Starts a Ray on this machine alone."""

from __future__ import annotations

import logging
from typing import Any

from rayrec._runtime.debug import debugging
from rayrec._runtime.ray_internals import LOCAL_SYSTEM


class LocalRayError(ValueError):
    """Ray did not start on this machine."""


def init_local(num_cpus: int) -> None:
    """Start Ray on this machine and connect to it.

    Args:
        num_cpus: CPUs that tasks and actors may reserve.

    Raises:
        LocalRayError: Ray's processes did not start in time.
    """
    import ray

    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            _system_config=LOCAL_SYSTEM,
            **quiet_unless_debug(),
        )
    except Exception as error:
        # Ray waits 30 s for its raylet, which no setting changes, and then raises a plain Exception.
        if type(error) is not Exception or "timed out during startup" not in str(error):
            raise
        raise LocalRayError(
            "Ray did not start on this machine within 30 s: the machine is too busy, or its disk or memory is full. "
            "Run the command again, or start Ray first with `ray start --head` and set RAY_ADDRESS=auto."
        ) from error


def quiet_unless_debug() -> dict[str, Any]:
    """Arguments of `ray.init` that hide Ray's own messages, unless RAYREC_DEBUG is set."""
    return {} if debugging() else {"log_to_driver": False, "logging_level": logging.ERROR}
