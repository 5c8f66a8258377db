"""Nodes come and go. One that Ray is about to take away, as a reclaimed spot instance, is left in time, after a save.

An elastic run takes what room there is: after a loss Ray starts fewer workers; here it is seen that more would fit.
Growing costs a restart, so it happens at a checkpoint made for it, and less often where a try found no room after all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rayrec._runtime.threads import call_every
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.config.trainer import TrainerConfig
from rayrec.train.driver.resources import Demand
from rayrec.train.run.log import Course

NEVER_S = 1e9
REQUEST = "request"
LOOK_EVERY_S = 1.0
SETTLED_S = 22.0  # after which Ray's own account of a new node is up to date unasked: it is made every 20 s
FIRST_WAIT_S, LONGEST_WAIT_S = 60.0, 600.0


def room_for(each: Mapping[str, float], nodes: Sequence[Mapping[str, float]], most: int) -> int:
    """Workers that fit on a cluster.

    Args:
        each: what a worker reserves.
        nodes: resources of each node.
        most: no more than these are wanted.
    """
    fit = (min(int(node.get(name, 0.0) / amount + 1e-6) for name, amount in each.items() if amount) for node in nodes)
    return min(most, sum(fit))


class Growth:
    """Decides when a run is to be started again with more workers.

    A node that came while an attempt runs is room for certain. What seemed room when it began was none for Ray: a node
    that is about to be declared dead, or what is free in parts on several nodes. That is tried again later, ever more
    rarely.
    """

    def __init__(self) -> None:
        self.wait_s = FIRST_WAIT_S
        self._attempt = self._workers = 0
        self._since = self._came = 0.0
        self._nodes: frozenset[str] = frozenset()
        self._requested = False

    def due(self, running: Course, room: int, nodes: Collection[str], now: float, *, counted: bool = False) -> bool:
        """Whether to ask for growth now; once an attempt.

        Args:
            running: the attempt that runs.
            room: workers that would fit.
            nodes: ids of the nodes that are there.
            now: a clock, in seconds.
            counted: whether Ray Train's account is of these nodes.
        """
        if running.attempt != self._attempt:
            if self._requested:
                brought_none = running.world_size <= self._workers
                self.wait_s = min(LONGEST_WAIT_S, 2 * self.wait_s) if brought_none else FIRST_WAIT_S
            self._attempt, self._workers = running.attempt, running.world_size
            self._since, self._nodes, self._requested = now, frozenset(nodes), False
        has_come = not self._nodes.issuperset(nodes)
        if not has_come:
            self._came = now
        ripe = now - self._since >= self.wait_s or (has_come and (counted or now - self._came >= SETTLED_S))
        if self._requested or not ripe or not 0 < running.world_size < room:
            return False
        self._requested = True
        return True


@contextmanager
def resizing(
    trainer: TrainerConfig, need: Demand, running: Course, ask: Callable[[str], object], local: bool
) -> Iterator[None]:
    """Watch the cluster from a thread while the body runs, and ask for a restart where a node of the run is about to be
    taken away, or where there is room for more workers of an elastic run."""
    if local:  # it neither grows nor shrinks
        yield
        return
    import ray

    growth, notices = Growth(), Notices()
    known: set[str] = set()  # nodes that Ray Train's account is of

    def look() -> None:
        nonlocal known
        draining = draining_nodes()
        if (reason := notices.leave(running.attempt, running.nodes, draining)) is not None:
            ask(reason)
        if not trainer.elastic:
            return
        there = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        nodes: dict[str, Any] = {node: resources for node, resources in there.items() if node not in draining}
        if known != set(nodes) and recount():
            known = set(nodes)
        free = room_for(need.each, [ray.available_resources()], trainer.most_workers)  # not others' share
        room = min(room_for(need.each, list(nodes.values()), trainer.most_workers), running.world_size + free)
        if growth.due(running, room, nodes, time.monotonic(), counted=known == set(nodes)):
            ask("there is room for more workers")

    with call_every(look, LOOK_EVERY_S, "rayrec-resizing"):
        yield


def recount() -> bool:
    """Let Ray Train's account of the cluster be made anew, now: after a loss it starts as many workers as that has
    room for, and waits in vain for those on a lost node.

    Returns:
        Whether that was done: not before Ray Train has started, nor by a Ray that has no such account.
    """
    import ray

    try:
        ray.get(_account().get_reserved_resources.remote("rayrec", recompute=True), timeout=5)
    except Exception:
        return False
    return True


def note_request(folder: Path, trainer: Any) -> None:
    """Record the name under which a trainer's workers are requested."""
    run_id = getattr(getattr(trainer, "train_run_context", None), "run_id", None)  # of Ray 2.60; not promised
    if run_id is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / REQUEST).write_text(f"train-{run_id}", encoding="utf-8")


def release_request(folder: Path) -> None:
    """Free what a killed driver of this run had requested: Ray keeps it for nobody for three minutes."""
    import ray

    with suppress(Exception):  # there was none, or Ray has begun anew since
        name = (folder / REQUEST).read_text(encoding="utf-8")
        ray.get(_account().cancel_request.remote(name), timeout=5)


def _account() -> Any:
    """Ray Train's account of resources and requests."""
    import ray

    name = "AutoscalingCoordinator"
    return ray.get_actor(name, namespace=name)


def reading_unreserved(config: TrainConfig) -> TrainConfig:
    """The config with reads that reserve no CPUs: workers may take all that there are."""
    read = config.data.read.model_copy(update={"cpus_per_read": 0.0})
    return config.model_copy(update={"data": config.data.model_copy(update={"read": read})})


class Notices:
    """Decides when a run is to leave nodes: once in an attempt for each, as Ray places no later one there."""

    def __init__(self) -> None:
        self._left: set[tuple[int, str]] = set()

    def leave(self, attempt: int, nodes: Collection[str], draining: Collection[str]) -> str | None:
        """Why the workers are to start again elsewhere now, if they are.

        Args:
            attempt: the one that runs; `nodes`: that its workers are on.
            draining: that Ray is about to take away.
        """
        leaving = sorted(node for node in set(nodes) & set(draining) if (attempt, node) not in self._left)
        if not leaving:
            return None
        self._left |= {(attempt, node) for node in leaving}
        names = ", ".join(name[:8] for name in leaving)
        return f"Ray takes away {'node' if len(leaving) == 1 else 'nodes'} {names}"


def draining_nodes() -> frozenset[str]:
    """Ids of the nodes that Ray is about to take away; it places no worker there any more."""
    import ray._private.state

    return frozenset(ray._private.state.state.get_draining_nodes())


def avoiding(policy: Any) -> None:
    """Let Ray's elastic policy start as many workers as there is room for outside of draining nodes, which its account
    of the cluster still has: it would wait for room there until they are gone."""
    count = policy._count_possible_workers

    def counted(reserved: dict[str, Any]) -> Any:
        draining = draining_nodes()
        return count({node: resources for node, resources in reserved.items() if node not in draining})

    policy._count_possible_workers = counted
