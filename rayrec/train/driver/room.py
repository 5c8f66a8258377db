"""A run without workers waits for room: a line every minute says what is missing, and `wait_for_room_s` limits it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rayrec._runtime.threads import call_every
from rayrec.train.driver.cluster import Cluster
from rayrec.train.driver.console import Display
from rayrec.train.driver.elastic import room_for
from rayrec.train.driver.resources import Demand, Supply
from rayrec.train.run.log import ask

LOOK_EVERY_S = 1.0
SAY_EVERY_S = 60.0
PENDING_S = 5.0


class Wait:
    """How long a run has waited for room, and what is to be said of it.

    Args:
        limit_s: seconds after which the run gives up; None: never.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._said = 0.0
        self.given_up: str | None = None

    def look(self, idle_s: float, missing: Callable[[], str | None], now: float) -> str | None:
        """What to say now, if anything.

        Args:
            idle_s: seconds without workers; 0 where there are some.
            missing: what is missing for the workers; None where they have room and are only being started.
            now: a clock, in seconds.
        """
        what = missing() if idle_s > 0 else None
        if what is None:
            self._since = None
            return None
        if self._since is None:
            self._since = self._said = now
        waited = now - self._since
        if self._limit_s is not None and waited >= self._limit_s:
            self.given_up = f"no room for the workers within trainer.wait_for_room_s={self._limit_s:g} s: {what}"
        elif now - self._said >= SAY_EVERY_S:
            self._said = now
            return f"waiting for room, {waited / 60:.0f} min so far: {what}"
        return None


def missing_of(need: Demand, nodes: list[dict[str, float]], free: Supply) -> str | None:
    """What is missing for the workers; None: nothing.

    Args:
        nodes: resources of each node that is there.
        free: what no one has reserved.
    """
    each = "1 GPU" if need.use_gpu else f"{need.cpus_per_worker:g} CPU"
    places = room_for(need.each, nodes, need.num_workers)
    wanted = f"{need.num_workers} workers of {each} each are wanted"
    if places < need.num_workers:
        there = f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
        return f"{wanted}, and the {there} of the cluster have room for {places}"
    workers = Supply(cpus=need.num_workers * need.cpus_per_worker, gpus=float(need.gpus))
    if free.cpus + 1e-6 < workers.cpus or free.gpus + 1e-6 < workers.gpus:
        return f"{wanted}, and {free.cpus:g} CPUs and {free.gpus:g} GPUs of the cluster are free"
    return None


def pending(need: Demand) -> bool:
    """Whether Ray holds a request for such workers that it cannot meet."""
    from ray.util import placement_group_table

    table: dict[str, Any] = placement_group_table()
    wanted = [need.each] * need.num_workers
    return any(
        group["state"] in ("PENDING", "RESCHEDULING") and list(group["bundles"].values()) == wanted
        for group in table.values()
    )


@contextmanager
def waiting_for_room(
    limit_s: float | None, need: Demand, actor: Any, cluster: Cluster, display: Display
) -> Iterator[None]:
    """Watch the cluster from a thread while the body runs. After `limit_s` the run has failed, as the mailbox then has
    it: Ray Train hears of that when its own present wait ends, after two minutes at most."""
    if cluster.local:
        yield
        return
    import ray

    wait, pending_at = Wait(limit_s), 0.0

    def missing() -> str | None:
        nonlocal pending_at
        now = time.monotonic()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        what = missing_of(need, nodes, cluster.free())
        if room_for(need.each, nodes, need.num_workers) < need.num_workers:
            return what
        if pending(need):
            pending_at = now
        # Ray Train withdraws its request and makes it again; what is not free may be these workers' own.
        return what if now - pending_at < PENDING_S else None

    def look() -> None:
        if wait.given_up is not None:
            return
        line = wait.look(ask(actor.idle_s), missing, time.monotonic())
        if line is not None:
            display.say(line, style="yellow")
        if wait.given_up is not None:
            ask(actor.put, {"kind": "fatal", "rank": 0, "error": wait.given_up, "final": True})

    with call_every(look, LOOK_EVERY_S, "rayrec-room"):
        yield
