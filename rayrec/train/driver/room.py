"""Waits until a run's workers fit on the cluster: before they first start, and after the loss of a node."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from rayrec._runtime.ray_internals import cancel_request, request_room
from rayrec._runtime.threads import call_every
from rayrec.train.driver.cluster import Cluster
from rayrec.train.driver.console import Display
from rayrec.train.driver.resources import Demand, capacity, missing_resources, refuse_if_short
from rayrec.train.errors import ResourceError
from rayrec.train.run.log import call_actor

CHECK_EVERY_S = 1.0
REPORT_EVERY_S = 60.0
PENDING_S = 5.0
JOINING_S = 30.0  # nodes of a cluster that just started may still join it
RELEASE_S = 30.0  # Ray needs some seconds to free the resources of lost workers
REQUEST_EVERY_S, REQUEST_EXPIRES_S = 20.0, 60.0
NO_WAIT = "and the run does not wait (trainer.wait_for_room_s=0)"


def await_resources(cluster: Cluster, need: Demand, limit_s: float | None, display: Display, name: str = "run") -> None:
    """Wait until the free resources cover a run that has no workers yet.

    During the wait, requests the resources from the cluster's autoscaler. Afterwards Ray Train requests them itself.

    Args:
        limit_s: seconds after which the run is refused; None: never.
        name: of the run, for its request.

    Raises:
        ResourceError: the cluster has too few free resources after `limit_s` seconds; or it has too few in total, and
            no autoscaler adds any.
    """
    if cluster.local:
        _refuse_if_impossible(cluster, need)
        return
    lack = missing_resources(need, cluster.nodes(), readers=True)
    if lack is None:
        return
    wait, start = RoomWait(limit_s), time.monotonic()

    def latest() -> str | None:
        return lack

    wait.update(CHECK_EVERY_S, latest, start)
    if wait.given_up is None:
        display.say(f"Waiting for room: {lack}. Ctrl-C ends the wait.", style="yellow")
    with _requested(need, f"rayrec-{name}-{uuid.uuid4().hex[:8]}") as renew:
        while lack is not None:
            if wait.given_up is not None:
                refuse_if_short(need, cluster.total(), cluster.subject)
                raise ResourceError(f"{wait.given_up} Free some, lower trainer.num_workers, or wait longer.")
            if time.monotonic() - start >= JOINING_S and not cluster.may_grow():
                _refuse_if_impossible(cluster, need)
            renew()
            time.sleep(CHECK_EVERY_S)
            lack = missing_resources(need, cluster.nodes(), readers=True)
            line = wait.update(CHECK_EVERY_S, latest, time.monotonic())
            if line is not None:
                display.say(line, style="yellow")


def _refuse_if_impossible(cluster: Cluster, need: Demand) -> None:
    """Check that a run fits on the cluster if nothing else runs there.

    Raises:
        ResourceError: it does not; Ray itself would wait without a limit.
    """
    refuse_if_short(need, cluster.total(), cluster.subject)
    nodes = cluster.nodes()
    if capacity(need, nodes) < need.num_workers:
        raise ResourceError(
            f"{missing_resources(need, nodes)}; change trainer.resources, trainer.cpus_per_worker or "
            "trainer.num_workers, or use larger nodes"
        )


@contextlib.contextmanager
def _requested(need: Demand, name: str) -> Iterator[Callable[[], None]]:
    """Request a run's resources from the cluster's autoscaler; the body calls the yielded function to renew the
    request. Other runs' requests stay as they are, and Ray drops this one if the driver is killed."""
    readers = [{"CPU": need.reader_cpus}] if need.reader_cpus else []
    bundles = [need.per_worker] * need.num_workers + readers
    labels = [need.selection.label_selector] * need.num_workers + [{} for _ in readers]
    sent_at = -REQUEST_EVERY_S

    def renew() -> None:
        nonlocal sent_at
        if time.monotonic() - sent_at < REQUEST_EVERY_S:
            return
        with contextlib.suppress(Exception):  # a busy head node; the next call tries again
            request_room(name, bundles, labels, need.selection.placement_strategy, REQUEST_EXPIRES_S)
            sent_at = time.monotonic()

    renew()
    try:
        yield renew
    finally:
        with contextlib.suppress(Exception):  # it expires
            cancel_request(name)


class RoomWait:
    """Measures how long a run without workers has waited for resources, and decides when to report.

    Args:
        limit_s: seconds after which the run gives up; None: never.
        least_s: seconds that it waits in any case.
    """

    def __init__(self, limit_s: float | None, least_s: float = 0.0) -> None:
        self._limit_s, self._least_s = limit_s, least_s
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
        if self._limit_s is not None and waited_s >= max(self._limit_s, self._least_s):
            limit = f"within trainer.wait_for_room_s={self._limit_s:g} s" if self._limit_s else NO_WAIT
            self.given_up = f"No room for the workers {limit}: {lack}."
        elif now - self._reported >= REPORT_EVERY_S:
            self._reported = now
            return f"Waiting for room, {waited_s / 60:.0f} min so far: {lack}."
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
    wait, pending_at = RoomWait(limit_s, RELEASE_S), -PENDING_S

    def missing() -> str | None:
        nonlocal pending_at
        now = time.monotonic()
        nodes = cluster.nodes()
        lack = missing_resources(need, nodes)
        if capacity(need, nodes) < need.num_workers:
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
