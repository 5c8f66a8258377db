"""Ray, connected: the one that is there, or a local one that is ended with the run."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from rayrec._debug import debugging
from rayrec.train.driver.console import Display
from rayrec.train.driver.resources import Demand, Supply, refuse_if_short
from rayrec.train.driver.signals import handlers_kept
from rayrec.train.errors import TrainError
from rayrec.train.worker.session import available_cpus

# Ray Train notices lost workers by polling, every 2 s by default; and would move workers to a folder of its own, where
# relative imports of a user's model end.
TRAIN_ENV = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
}
# Until Ray has noticed that a node is lost, it waits, so long, for room on it, and then looks again.
ELASTIC_ENV = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "4"}
# On one machine there are no nodes to be taken away and no metrics to be scraped: fewer processes to start.
LOCAL_ENV = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}

# Ray would delete what was freed once a second: of a fast stream that is a quarter of a gigabyte which nobody needs.
LOCAL_SYSTEM = {"free_objects_period_milliseconds": 200}


@dataclass(frozen=True, slots=True)
class Cluster:
    """A connected Ray.

    Args:
        local: started by this process, for this run: it never grows.
    """

    local: bool

    @property
    def what(self) -> str:
        return "this machine has" if self.local else "the Ray cluster has"

    def total(self) -> Supply:
        return _supply(ray.cluster_resources())

    def free(self) -> Supply:
        return _supply(ray.available_resources())


@contextlib.contextmanager
def connected(elastic: bool = False) -> Iterator[Cluster]:
    """The Ray that is connected already, else the one that RAY_ADDRESS (set in a Ray job) names, else a local one.

    Args:
        elastic: for a run that goes on with as many workers as there are.

    Raises:
        TrainError: RAY_ADDRESS names a Ray that does not answer.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_defaults(TRAIN_ENV | (ELASTIC_ENV if elastic else {})))
        if ray.is_initialized():
            yield Cluster(local=False)
            return
        address = os.environ.get("RAY_ADDRESS")
        if not address:
            stack.enter_context(_defaults(LOCAL_ENV))
        with handlers_kept():
            _init(address)
        try:
            yield Cluster(local=not address)
        finally:
            ray.shutdown()


def _init(address: str | None) -> None:
    quiet: dict[str, Any] = {} if debugging() else {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        cpus = available_cpus()
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, _system_config=LOCAL_SYSTEM, **quiet)
        return
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TrainError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({reason}); start one with `ray start --head`, or "
            f"unset RAY_ADDRESS to train on a local Ray"
        ) from error


def await_resources(cluster: Cluster, need: Demand, wait_s: float, display: Display) -> None:
    """Return when the run fits on what is free, and refuse it rather than wait for ever.

    Raises:
        ResourceError: Ray has not enough, or not within `wait_s` seconds.
    """
    if cluster.local:
        refuse_if_short(need, cluster.total(), cluster.what)
        return
    until = time.monotonic() + wait_s
    told = False
    while not (cluster.total().covers(need) and cluster.free().covers(need)):
        if time.monotonic() >= until:
            refuse_if_short(need, cluster.total(), cluster.what)
            refuse_if_short(
                need, cluster.free(), f"after {wait_s:g} s of waiting (trainer.wait_for_resources_s) Ray has free"
            )
            return
        if not told:
            display.say(f"waiting up to {wait_s:g} s for {need.cpus:g} CPUs and {need.gpus} GPUs of the Ray cluster …")
            told = True
        time.sleep(min(1.0, max(0.05, wait_s / 20)))


def _supply(resources: Mapping[str, float]) -> Supply:
    return Supply(cpus=float(resources.get("CPU", 0.0)), gpus=float(resources.get("GPU", 0.0)))


@contextlib.contextmanager
def _defaults(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that the user has not set, for the time of the run."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
