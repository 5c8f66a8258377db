"""Waits until a run's workers fit on the cluster: before they first start, and after the loss of a node."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray

from rayrec._runtime.threads import call_every
from rayrec.train.driver.cluster import Cluster
from rayrec.train.driver.console import Display
from rayrec.train.driver.elastic import room_for
from rayrec.train.driver.resources import Demand, Supply, refuse_if_short
from rayrec.train.run.log import call_actor

CHECK_EVERY_S = 1.0
REPORT_EVERY_S = 60.0
PENDING_S = 5.0


def await_resources(cluster: Cluster, need: Demand, wait_s: float, display: Display) -> None:
    """Wait until the free resources cover a run that has no workers yet.

    During the wait, requests the resources from the cluster's autoscaler. Afterwards Ray Train requests them itself.

    Raises:
        ResourceError: this machine has too few resources, or the cluster has too few free ones after `wait_s` seconds.
    """
    if cluster.local:
        refuse_if_short(need, cluster.total(), cluster.subject)
        return
    with contextlib.ExitStack() as stack:
        if not cluster.total().covers(need):
            stack.enter_context(_requested(need))
        end = time.monotonic() + wait_s
        reported = False
        while not (cluster.total().covers(need) and cluster.free().covers(need)):
            if time.monotonic() >= end:
                refuse_if_short(need, cluster.total(), cluster.subject)
                option = f"after {wait_s:g} s of waiting (trainer.wait_for_resources_s) Ray has free"
                refuse_if_short(need, cluster.free(), option)
                return
            if not reported:
                display.say(f"Waiting up to {wait_s:g} s for {need.cpus:g} CPUs and {need.gpus} GPUs of the cluster …")
                reported = True
            time.sleep(min(1.0, wait_s / 20))


@contextlib.contextmanager
def _requested(need: Demand) -> Iterator[None]:
    """Request a run's resources from the cluster's autoscaler while the body runs."""
    from ray.autoscaler.sdk import request_resources

    readers = [{"CPU": need.reader_cpus}] if need.reader_cpus else []
    request_resources(bundles=[need.per_worker] * need.num_workers + readers)
    try:
        yield
    finally:
        request_resources(bundles=[])


class RoomWait:
    """Measures how long a run without workers has waited for resources, and decides when to report.

    Args:
        limit_s: seconds after which the run gives up; None: never.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._reported = 0.0
        self.given_up: str | None = None

    def update(self, idle_s: float, missing: Callable[[], str | None], now: float) -> str | None:
        """The line to report now, if any; sets `given_up` at the limit.

        Args:
            idle_s: seconds without workers; 0 while workers run.
            missing: returns the missing resources; None if the workers fit and are starting.
            now: a clock, in seconds.
        """
        lack = missing() if idle_s > 0 else None
        if lack is None:
            self._since = None
            return None
        if self._since is None:
            self._since = self._reported = now
        waited_s = now - self._since
        if self._limit_s is not None and waited_s >= self._limit_s:
            self.given_up = f"No room for the workers within trainer.wait_for_room_s={self._limit_s:g} s: {lack}."
        elif now - self._reported >= REPORT_EVERY_S:
            self._reported = now
            return f"Waiting for room, {waited_s / 60:.0f} min so far: {lack}."
        return None


def missing_resources(need: Demand, nodes: list[dict[str, float]], free: Supply) -> str | None:
    """The resources that a cluster lacks for the workers, as text; None if they fit.

    Args:
        nodes: resources of each node.
        free: resources without a reservation.
    """
    unit = "1 GPU" if need.use_gpu else f"{need.cpus_per_worker:g} CPU"
    capacity = room_for(need.per_worker, nodes, need.num_workers)
    request = f"{need.num_workers} workers need {unit} each"
    if capacity < need.num_workers:
        return f"{request}; the cluster has {len(nodes)} node{'' if len(nodes) == 1 else 's'} with room for {capacity}"
    workers = Supply(cpus=need.num_workers * need.cpus_per_worker, gpus=float(need.gpus))
    if free.cpus + 1e-6 < workers.cpus or free.gpus + 1e-6 < workers.gpus:
        return f"{request}; {free.cpus:g} CPUs and {free.gpus:g} GPUs of the cluster are free"
    return None


def has_pending_request(need: Demand) -> bool:
    """Whether a placement group for these workers is pending."""
    from ray.util import placement_group_table

    table: dict[str, Any] = placement_group_table()
    bundles = [need.per_worker] * need.num_workers
    return any(
        group["state"] in ("PENDING", "RESCHEDULING") and list(group["bundles"].values()) == bundles
        for group in table.values()
    )


@contextlib.contextmanager
def waiting_for_room(
    limit_s: float | None, need: Demand, mailbox: Any, cluster: Cluster, display: Display
) -> Iterator[None]:
    """While the body runs, report from a thread when workers wait for resources, and fail the run after `limit_s`.

    Records the failure in the mailbox. Ray Train reads it when its own wait for the workers times out, after two
    minutes at most.
    """
    if cluster.local:
        yield
        return
    wait, pending_at = RoomWait(limit_s), 0.0

    def missing() -> str | None:
        nonlocal pending_at
        now = time.monotonic()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        lack = missing_resources(need, nodes, cluster.free())
        if room_for(need.per_worker, nodes, need.num_workers) < need.num_workers:
            return lack
        if has_pending_request(need):
            pending_at = now
        # Ray Train cancels and repeats its request. Without a recent one, the run's own workers may use the resources
        # that are not free.
        return lack if now - pending_at < PENDING_S else None

    def check() -> None:
        if wait.given_up is not None:
            return
        line = wait.update(call_actor(mailbox.idle_s), missing, time.monotonic())
        if line is not None:
            display.say(line, style="yellow")
        if wait.given_up is not None:
            call_actor(mailbox.put, {"kind": "fatal", "rank": 0, "error": wait.given_up, "final": True})

    with call_every(check, CHECK_EVERY_S, "rayrec-room"):
        yield
