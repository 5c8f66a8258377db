"""Connects the driver to Ray: to an existing cluster, or to a local Ray that ends with the run."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import ray

from rayrec._runtime.local_ray import RayStartError, connect, is_begun
from rayrec._runtime.ray_internals import free_resources, has_autoscaler
from rayrec.train.driver.early_ray import ELASTIC_ENV, LOCAL_ENV, TRAIN_ENV, default_env
from rayrec.train.driver.resources import Demand, Node, Supply, capacity
from rayrec.train.errors import TrainError

_local_runs = 0  # nested `connected` blocks that use a local Ray of this process


@dataclass(frozen=True, slots=True)
class Cluster:
    """A connected Ray cluster.

    Args:
        local: this process started Ray for this run, so the cluster never grows.
    """

    local: bool

    @property
    def subject(self) -> str:
        """Subject and verb of a sentence about the resources."""
        return "this machine has" if self.local else "the Ray cluster has"

    def total(self) -> Supply:
        return _supply(ray.cluster_resources())

    def nodes(self) -> list[Node]:
        """The nodes that are alive."""
        free = free_resources()
        return [
            Node(
                id=node["NodeID"],
                resources=node["Resources"],
                free=free.get(node["NodeID"], {}),
                labels=node.get("Labels") or {},
                address=node.get("NodeManagerAddress", ""),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def may_grow(self) -> bool:
        """Whether an autoscaler may add nodes."""
        return not self.local and has_autoscaler()


@contextlib.contextmanager
def connected(elastic: bool = False) -> Iterator[Cluster]:
    """Connect to Ray while the body runs. Uses an existing connection, else RAY_ADDRESS (set in a Ray job), else starts
    a local Ray.

    Args:
        elastic: the run continues with as many workers as fit.

    Raises:
        TrainError: no Ray answers at RAY_ADDRESS, or none started here.
    """
    global _local_runs
    with contextlib.ExitStack() as stack:
        stack.enter_context(default_env(TRAIN_ENV | (ELASTIC_ENV if elastic else {})))
        if ray.is_initialized() and not is_begun():
            yield Cluster(local=_local_runs > 0)
            return
        local = not os.environ.get("RAY_ADDRESS")
        if local:
            stack.enter_context(default_env(LOCAL_ENV))
        try:
            end = connect()
        except RayStartError as error:
            raise TrainError(str(error)) from error
        _local_runs += local
        try:
            yield Cluster(local=local)
        finally:
            _local_runs -= local
            end()


def nodes_without(folder: str, nodes: Sequence[Node], wait_s: float = 30.0) -> list[Node]:
    """The nodes on which a folder does not exist.

    Args:
        folder: local path.
        wait_s: seconds in which it may appear: network file systems show new folders late.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def exists() -> bool:
        deadline = time.monotonic() + wait_s
        while not os.path.isdir(folder):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.5)
        return True

    task = ray.remote(num_cpus=0)(exists)
    strategies = [NodeAffinitySchedulingStrategy(node.id, soft=False) for node in nodes]
    visible = ray.get([task.options(scheduling_strategy=strategy).remote() for strategy in strategies])
    return [node for node, sees in zip(nodes, visible, strict=True) if not sees]


def refuse_unseen(folder: str, need: Demand, nodes: Sequence[Node]) -> None:
    """Check that every node that may run workers can read a folder of converted data.

    Args:
        folder: local path that the workers will read.

    Raises:
        TrainError: a node cannot read the folder; names the node.
    """
    blind = nodes_without(folder, [node for node in nodes if capacity(need, [node], 1)])
    if blind:
        raise TrainError(
            f"storage.path: {_names(blind)} cannot read {folder}, which holds data.train or data.eval converted to "
            f"Parquet. Set storage.path to a folder that every node sees or to a URI, or convert the files first: "
            f"rayrec data convert"
        )


def unshared_folder(folder: str, need: Demand, nodes: Sequence[Node], blind: Sequence[Node]) -> str | None:
    """A warning about nodes that may run workers and do not see the run folder; None if there are none.

    Args:
        folder: local path of the run.
        nodes: of the cluster.
        blind: the nodes among them that do not see the folder.

    Raises:
        TrainError: the other nodes have no room for all workers.
    """
    if not blind:
        return None
    fix = "Set storage.path to a folder that every node sees, or to a URI such as s3://bucket/runs"
    if capacity(need, [node for node in nodes if node not in blind]) < need.num_workers:
        raise TrainError(
            f"storage.path: {_names(blind)} cannot see {folder}, so workers there could not save checkpoints, and the "
            f"other nodes have no room for {need.num_workers} workers. {fix}"
        )
    return (
        f"storage.path: {_names(blind)} cannot see {folder}. The run ends if a worker starts there. {fix}, or keep "
        f"workers away from these nodes with trainer.resources.label_selector"
    )


def _names(nodes: Sequence[Node]) -> str:
    addresses = ", ".join(node.address for node in nodes[:8]) + (", …" if len(nodes) > 8 else "")
    return f"{'node' if len(nodes) == 1 else f'{len(nodes)} nodes'} {addresses} of the Ray cluster"


def _supply(resources: Mapping[str, float]) -> Supply:
    return Supply(cpus=float(resources.get("CPU", 0.0)), gpus=float(resources.get("GPU", 0.0)))
