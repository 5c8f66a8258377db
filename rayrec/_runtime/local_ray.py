"""A Ray on this machine alone, without the processes that look after a cluster: it starts in half the time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from rayrec._runtime.debug import debugging

# What `ray.init` starts beside those that run a cluster.
HELPERS = ("start_api_server", "start_monitor", "start_log_monitor")

LOCAL_SYSTEM = {
    # Ray would delete what was freed once a second: of a fast stream that is a quarter of a gigabyte that nobody needs.
    "free_objects_period_milliseconds": 200,
    # Its object store may not listen yet at the first try: retried after a second, ten times at most.
    "raylet_client_connect_timeout_milliseconds": 20,
    "raylet_client_num_connect_attempts": 500,
}


def init_local(num_cpus: int) -> None:
    """Starts Ray, and connects to it.

    Args:
        num_cpus: CPUs that it may give to tasks and actors.
    """
    import ray

    with nullcontext() if debugging() else without_helpers():
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            _system_config=LOCAL_SYSTEM,
            **quiet_unless_debug(),
        )


@contextmanager
def without_helpers() -> Iterator[None]:
    """Ray starts no dashboard without pages (which it waits for), no autoscaler and no reader of logs. If a later Ray
    names them otherwise, they are started."""
    from ray._private.node import Node

    kept = {name: getattr(Node, name) for name in HELPERS if hasattr(Node, name)}
    for name in kept:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, start in kept.items():
            setattr(Node, name, start)


def quiet_unless_debug() -> dict[str, Any]:
    """Arguments of `ray.init` that keep Ray's own messages away."""
    return {} if debugging() else {"log_to_driver": False, "logging_level": logging.ERROR}
