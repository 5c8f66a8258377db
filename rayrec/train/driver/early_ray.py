"""Starts a local Ray while a command imports the trainer and reads its config; and the environment of Ray.

Ray's start is mostly waiting, the imports are not. This module imports neither Ray nor torch, so that the start can
begin first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rayrec._runtime.cgroup_limits import cpus
from rayrec._runtime.local_ray import begun, is_connected

# Ray Train's defaults poll workers only every 2 s, and change their working directory, which breaks relative imports of
# a user's model.
TRAIN_ENV = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
}
# A worker group that waits for resources on a lost node is retried with a new size after this time.
ELASTIC_ENV = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10"}
# Ray Data holds the CPUs for reading of a killed worker for three minutes; its restarted reads share what is left. Live
# reads renew their request every 10 s.
WORKER_ENV = {"RAY_DATA_AUTOSCALING_REQUEST_EXPIRE_TIME_S": "30"}
# A single machine has no preemption notices and no metrics collector: saves the start of two actors.
LOCAL_ENV = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    **WORKER_ENV,  # which workers inherit, as Ray starts with it
}


@contextmanager
def begun_for(read: Callable[[], Any], overrides: Sequence[str]) -> Iterator[None]:
    """Start a local Ray while the body runs, if a config needs one; `connected` in the body waits for it.

    Args:
        read: returns the config as it is in its file.
        overrides: `field.path=value`, as of `load_config`.
    """
    if not _needs_local_ray(read, overrides):
        yield
        return
    with default_env(TRAIN_ENV | LOCAL_ENV), begun(max(1, int(cpus()))):
        yield


def _needs_local_ray(read: Callable[[], Any], overrides: Sequence[str]) -> bool:
    """Whether a run trains a fixed number of workers on a local Ray. False if that is unknown: `load_config`, which
    imports much more, reports what is wrong with a config."""
    if os.environ.get("RAY_ADDRESS") or is_connected():
        return False
    import yaml

    try:
        workers = read().get("trainer", {}).get("num_workers", 2)
        for override in overrides:
            field, _, value = override.partition("=")
            if field == "trainer":
                return False
            workers = yaml.safe_load(value) if field == "trainer.num_workers" else workers
    except Exception:
        return False
    return type(workers) is int and workers > 0


@contextmanager
def default_env(values: Mapping[str, str]) -> Iterator[None]:
    """Set the environment variables that the user has not set, while the body runs."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
