"""Starts a Ray on this machine alone."""

from __future__ import annotations

import logging
from typing import Any

from rayrec._runtime.debug import debugging
from rayrec._runtime.ray_internals import LOCAL_SYSTEM


def init_local(num_cpus: int) -> None:
    """Start Ray on this machine and connect to it.

    Args:
        num_cpus: CPUs that tasks and actors may reserve.
    """
    import ray

    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        _system_config=LOCAL_SYSTEM,
        **quiet_unless_debug(),
    )


def quiet_unless_debug() -> dict[str, Any]:
    """Arguments of `ray.init` that hide Ray's own messages, unless RAYREC_DEBUG is set."""
    return {} if debugging() else {"log_to_driver": False, "logging_level": logging.ERROR}
