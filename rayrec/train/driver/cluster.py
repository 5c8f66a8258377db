"""Ray, connected: the one that is there, or a local one that is ended with the run."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import ray

from rayrec._runtime.local_ray import quiet_unless_debug
from rayrec.storage.errors import first_line
from rayrec.train.driver.console import Display
from rayrec.train.driver.ray_start import (
    ELASTIC_ENV,
    LOCAL_ENV,
    TRAIN_ENV,
    awaited,
    defaults,
    start_local,
)
from rayrec.train.driver.resources import Demand, Supply, refuse_if_short
from rayrec.train.driver.signals import handlers_kept
from rayrec.train.errors import TrainError


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
        stack.enter_context(defaults(TRAIN_ENV | (ELASTIC_ENV if elastic else {})))
        begun = awaited()
        if begun or ray.is_initialized():
            yield Cluster(local=begun)
            return
        address = os.environ.get("RAY_ADDRESS")
        if not address:
            stack.enter_context(defaults(LOCAL_ENV))
        with handlers_kept():
            _init(address)
        try:
            yield Cluster(local=not address)
        finally:
            ray.shutdown()


def _init(address: str | None) -> None:
    if not address:
        start_local()
        return
    try:
        ray.init(address=address, **quiet_unless_debug())
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise TrainError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({first_line(error)}); start one with "
            f"`ray start --head`, or unset RAY_ADDRESS to train on a local Ray"
        ) from error


def await_resources(cluster: Cluster, need: Demand, wait_s: float, display: Display) -> None:
    """Return when the run fits on what is free, and refuse it rather than wait for ever. A cluster that can grow is
    asked to; the request is withdrawn when the wait ends, as the workers' own then holds.

    Raises:
        ResourceError: Ray has not enough, or not within `wait_s` seconds.
    """
    if cluster.local:
        refuse_if_short(need, cluster.total(), cluster.what)
        return
    with contextlib.ExitStack() as stack:
        if not cluster.total().covers(need):
            stack.enter_context(asking_for(need))
        _wait(cluster, need, wait_s, display)


def refuse_unseen(folder: str, use_gpu: bool) -> None:
    """
    Args:
        folder: that workers will read, a path of this machine.
        use_gpu: whether workers come only to nodes that have one.

    Raises:
        TrainError: a node that workers may come to does not see it; names the node.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0)(lambda: os.path.isdir(folder))
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU" if use_gpu else "CPU")]
    there = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    seen = ray.get([look.options(scheduling_strategy=one).remote() for one in there])
    if blind := [node["NodeManagerAddress"] for node, sees in zip(nodes, seen, strict=True) if not sees]:
        raise TrainError(
            f"storage.path: {', '.join(blind)} of the Ray cluster cannot read {folder}, where files of data.train or "
            f"data.eval became Parquet; set it to a folder that every node sees or to a URI, or convert the files "
            f"first: rayrec data convert"
        )


@contextlib.contextmanager
def asking_for(need: Demand) -> Iterator[None]:
    """The cluster's autoscaler, where it has one, makes room for a run while the body runs."""
    from ray.autoscaler.sdk import request_resources

    readers = [{"CPU": need.reader_cpus}] if need.reader_cpus else []
    request_resources(bundles=[need.each] * need.num_workers + readers)
    try:
        yield
    finally:
        request_resources(bundles=[])


def _wait(cluster: Cluster, need: Demand, wait_s: float, display: Display) -> None:
    until = time.monotonic() + wait_s
    shown = False
    while not (cluster.total().covers(need) and cluster.free().covers(need)):
        if time.monotonic() >= until:
            refuse_if_short(need, cluster.total(), cluster.what)
            refuse_if_short(
                need, cluster.free(), f"after {wait_s:g} s of waiting (trainer.wait_for_resources_s) Ray has free"
            )
            return
        if not shown:
            display.say(f"waiting up to {wait_s:g} s for {need.cpus:g} CPUs and {need.gpus} GPUs of the Ray cluster …")
            shown = True
        time.sleep(min(1.0, wait_s / 20))


def _supply(resources: Mapping[str, float]) -> Supply:
    return Supply(cpus=float(resources.get("CPU", 0.0)), gpus=float(resources.get("GPU", 0.0)))
