"""Restarts a run when nodes join or leave.

Before Ray removes a node (a reclaimed spot instance, for example), the run saves a checkpoint and restarts without it.
An elastic run grows when more workers fit. After a loss, Ray Train starts fewer workers. Growth costs a restart, so the
run saves a checkpoint first, and waits longer after an attempt that added no workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rayrec._runtime.ray_internals import cancel_request, draining_nodes
from rayrec._runtime.threads import call_every
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.config.trainer import TrainerConfig
from rayrec.train.driver.cluster import Cluster
from rayrec.train.driver.placement import fits_labels, room_for
from rayrec.train.driver.resources import Demand, capacity
from rayrec.train.run.log import RunState

NEVER_S = 1e9
REQUEST = "request"
CHECK_EVERY_S = 1.0
SETTLED_S = 3.0  # nodes that join together cost one restart
FIRST_WAIT_S, LONGEST_WAIT_S = 60.0, 600.0


class Growth:
    """Decides when a run restarts with more workers.

    A node that joins during an attempt certainly fits workers. Resources that were free at the start of the attempt may
    be unusable, because Ray did not use them: they may be on a node that Ray will soon declare dead, or in fragments on
    several nodes. Growth into these resources is tried after a wait, which doubles after each failure.
    """

    def __init__(self) -> None:
        self.wait_s = FIRST_WAIT_S
        self._attempt = self._workers = 0
        self._since = self._joined_at = 0.0
        self._nodes: frozenset[str] = frozenset()
        self._requested = False

    def due(self, running: RunState, room: int, nodes: Collection[str], now: float) -> bool:
        """Whether to request growth now; true at most once per attempt.

        Args:
            running: the current attempt.
            room: workers that would fit.
            nodes: ids of the cluster's nodes.
            now: a clock, in seconds.
        """
        if running.attempt != self._attempt:
            if self._requested:
                grew = running.world_size > self._workers
                self.wait_s = FIRST_WAIT_S if grew else min(LONGEST_WAIT_S, 2 * self.wait_s)
            self._attempt, self._workers = running.attempt, running.world_size
            self._since, self._nodes, self._requested = now, frozenset(nodes), False
        has_new_node = not self._nodes.issuperset(nodes)
        if not has_new_node:
            self._joined_at = now
        ripe = now - self._joined_at >= SETTLED_S if has_new_node else now - self._since >= self.wait_s
        if self._requested or not ripe or not 0 < running.world_size < room:
            return False
        self._requested = True
        return True


class DrainNotices:
    """Decides when a run leaves draining nodes: once per attempt and node, as Ray places no later attempt there."""

    def __init__(self) -> None:
        self._reported: set[tuple[int, str]] = set()

    def reason_to_leave(self, attempt: int, nodes: Collection[str], draining: Collection[str]) -> str | None:
        """The reason to restart the workers on other nodes; None: do not restart.

        Args:
            attempt: number of the current attempt.
            nodes: ids of the nodes on which its workers run.
            draining: ids of the nodes that Ray is about to remove.
        """
        leaving = sorted(node for node in set(nodes) & set(draining) if (attempt, node) not in self._reported)
        if not leaving:
            return None
        self._reported |= {(attempt, node) for node in leaving}
        names = ", ".join(name[:8] for name in leaving)
        return f"Ray removes {'node' if len(leaving) == 1 else 'nodes'} {names}"


@contextmanager
def resizing(
    trainer: TrainerConfig,
    need: Demand,
    running: RunState,
    request_restart: Callable[[str], object],
    cluster: Cluster,
) -> Iterator[None]:
    """While the body runs, watch the cluster from a thread and request a restart when Ray is about to remove a node of
    the run, or when an elastic run can grow."""
    if cluster.local:
        yield
        return
    growth, notices = Growth(), DrainNotices()

    def check() -> None:
        draining = draining_nodes()
        if (reason := notices.reason_to_leave(running.attempt, running.nodes, draining)) is not None:
            request_restart(reason)
        if not trainer.elastic:
            return
        nodes = [node for node in cluster.nodes() if node.id not in draining | running.failed_nodes]
        # Other jobs may use some resources of the nodes.
        suitable = [node.free for node in nodes if fits_labels(need.selection.label_selector, node.labels)]
        free = room_for(need.per_worker, suitable, trainer.most_workers, need.selection.placement_strategy)
        room = min(capacity(need, nodes, trainer.most_workers), running.world_size + free)
        if growth.due(running, room, {node.id for node in nodes}, time.monotonic()):
            request_restart("there is room for more workers")

    with call_every(check, CHECK_EVERY_S, "rayrec-resizing"):
        yield


def note_request(folder: Path, name: str) -> None:
    """Record the name of this run's request for workers, for `release_request` of a later launch."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REQUEST).write_text(name, encoding="utf-8")


def release_request(folder: Path) -> None:
    """Cancel the resource request of a killed driver of this run. Ray would hold these resources for three minutes, in
    which an elastic run would wait for them."""
    # The request may not exist, or Ray may have restarted since.
    with suppress(Exception):
        cancel_request((folder / REQUEST).read_text(encoding="utf-8"))


def without_read_reservations(config: TrainConfig) -> TrainConfig:
    """The config with reads that reserve no CPUs, so that workers may use all of them."""
    read = config.data.read.model_copy(update={"cpus_per_read": 0.0})
    return config.model_copy(update={"data": config.data.model_copy(update={"read": read})})
