"""The event log of a run: workers send records (plain dicts), the driver keeps and shows them.

    send   a worker calls `put` of its sink: the `Mailbox` itself, or `sink_to` it where that is a Ray actor
    hold   the `Mailbox` numbers attempts, knows who has failed and what the driver has asked for
    hear   `drained` takes what has come, from a thread of the driver, and hands each record to its `Recorder`
    know   a `Course` knows how the job goes and how it ended
    keep   `driver/recorder.py` appends lines to metrics.jsonl and TensorBoard
    show   `driver/console.py` writes for people; `driver/trackers.py` for Prometheus

Workers never wait for the driver. Kinds of records: begin, plan, progress, train, eval, event, failure and restart
(from Ray's controller), stopped, fatal, excused (fatal records so far come from a lost worker), done.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from rayrec._runtime.threads import call_every
from rayrec.train.config.difference import flat
from rayrec.train.tolerance import Tolerance

Record = dict[str, Any]
# Of a record, no figure of the model; what a batch looks up in each of many tables is in metrics.jsonl.
OF_NO_FIGURE = frozenset({"kind", "step", "time", "attempt", "partial", "tables"})
Waiting = tuple[int, str]  # exchanges that a rank has begun, and the line of code in which it waits for the others


class Mailbox:
    """Where workers send records, which are kept until they are taken; an actor, or in the driver's own process."""

    def __init__(self, attempts_before: int = 0) -> None:
        self._records: deque[Record] = deque()  # also used by two threads of one process
        self._attempt = attempts_before
        self._failed: set[int] = set()
        self._waiting: dict[int, Waiting] = {}
        self._last_words: str | None = None
        self._stop = self._excused = False
        self._restart: str | None = None
        self._saved_step = self._failures = 0
        self._idle_since: float | None = time.monotonic()

    def begin(self, leader: bool) -> bool:
        """Called by every rank at the start of an attempt; the leader counts it. True: the run has failed already."""
        self._excused, self._idle_since = False, None
        self._attempt += leader and not self._failed
        self._restart = None if leader else self._restart
        self._waiting.clear()
        self._last_words = None
        return bool(self._failed)

    def put(self, record: Record) -> None:
        """Send without waiting; records of one rank arrive in order."""
        if record["kind"] in ("failure", "restart"):
            self._idle_since = time.monotonic()
        elif record["kind"] in ("progress", "train"):  # also where this mailbox is a second one, and has heard no begin
            self._idle_since = None
        if record["kind"] == "fatal":
            if self._excused and not record.get("final"):
                return  # of the attempt that lost a worker
            self._failed.add(record["rank"])
        if record.get("event") == "checkpoint" and record["step"] > self._saved_step:
            self._saved_step, self._failures = record["step"], 0
        if record.get("event") in ("hang", "unlike"):
            self._last_words = record["message"]
        self._records.append({"time": time.time(), "attempt": self._attempt, **record})

    def flush(self, record: Record) -> None:
        """Send, and return when it has arrived with all before it."""
        self.put(record)

    def last_words(self) -> str | None:
        """Why a worker of this attempt has ended itself, if one has."""
        return self._last_words

    def failed_ranks(self) -> int:
        """How many ranks have sent a fatal record."""
        return len(self._failed)

    def idle_s(self) -> float:
        """Seconds without a worker group; 0 where one runs."""
        return 0.0 if self._idle_since is None else time.monotonic() - self._idle_since

    def excuse(self, dead: Collection[int]) -> bool:
        """Whether one of these lost ranks had reported no error: those of the others may come from its loss, and no
        longer count."""
        if self._failed.issuperset(dead):
            return False
        self._failed.clear()
        self._excused = True
        self._records.append({"time": time.time(), "attempt": self._attempt, "kind": "excused"})
        return True

    def failed_again(self) -> int:
        """Counts a failure of the worker group: how many there were since the run last got further."""
        self._failures += 1
        return self._failures

    def ask_stop(self) -> None:
        self._stop = True

    def ask_restart(self, reason: str) -> None:
        """Stop with a checkpoint and start again."""
        self._restart = reason

    def stop_requested(self) -> bool:
        """Whether the driver wants the workers to stop, with a last checkpoint."""
        return self._stop or self._restart is not None

    def restart_reason(self) -> str | None:
        """Why the workers are to be started again after that; None: they are not."""
        return None if self._stop else self._restart

    def waiting(self, rank: int, place: Waiting | None) -> dict[int, Waiting]:
        """Reports where this rank waits for the others (None: it does not), and returns the places of all that wait."""
        self._waiting.pop(rank, None)
        if place is not None:
            self._waiting[rank] = place
        return dict(self._waiting)

    def take(self) -> list[Record]:
        """All records since the last call."""
        return [self._records.popleft() for _ in range(len(self._records))]


def ask(method: Any, *given: Any, **named: Any) -> Any:
    """The answer of a mailbox that is an actor."""
    import ray

    return ray.get(method.remote(*given, **named), timeout=30)


class _ActorSink:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def put(self, record: Record) -> None:
        self._actor.put.remote(record)

    def flush(self, record: Record) -> None:
        ask(self._actor.put, record)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(ask, getattr(self._actor, name))


def sink_to(actor: Any) -> Mailbox:
    """A mailbox that is a Ray actor, called as if it were here: each call but `put` waits for the answer."""
    return cast(Mailbox, _ActorSink(actor))


@dataclass
class Course:
    """How a job goes, as far as its records say.

    Args:
        attempt, step: the last ones heard of.
        world_size, nodes: workers of the attempt that runs, and Ray's ids of the nodes that it is on; 0 before it.
        fatal: why it failed; `done`: the record of its end; `stopped`: what was said when it stopped on request.
    """

    attempt: int = 0
    step: int = 0
    world_size: int = 0
    nodes: frozenset[str] = frozenset()
    fatal: str | None = None
    done: Record | None = None
    stopped: str | None = None

    def hear(self, record: Record) -> None:
        self.attempt = max(self.attempt, record["attempt"])
        match record["kind"]:
            case "begin":
                self.step, self.world_size = record["resumed_step"] or 0, int(record["world_size"])
                self.nodes = frozenset(record.get("nodes", ()))
                return
            case "fatal":
                self.fatal = self.fatal or record["error"]
            case "excused":
                self.fatal = None
            case "stopped":
                self.stopped = record["message"] or "interrupted"
            case "done":
                self.done = record
        self.step = max(self.step, int(record.get("step") or 0))


def figures_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a train or eval record by path, such as `train/loss` and `eval/tasks/click/auc`."""
    figures = flat({record["kind"]: {name: of for name, of in record.items() if name not in OF_NO_FIGURE}}, "/")
    return {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}


@contextlib.contextmanager
def drained(
    take: Callable[[], list[Record]],
    handle: Callable[[Record], object],
    tolerance: Tolerance | None = None,
    every_s: float = 0.2,
) -> Iterator[None]:
    """Hand records over from a thread while the body runs; what is left is handed over at its end.

    A `take` that fails is tried again at the next tick: a busy machine must not end a run. An error of `handle`, even
    SystemExit, costs its record and no other.

    Raises:
        Exception: the one of the last `take`; after the body.
    """
    tolerance = tolerance or Tolerance()

    def drain(last: bool = False) -> None:
        for record in take():
            try:
                handle(record)
            except BaseException as error:
                if last and isinstance(error, KeyboardInterrupt):
                    raise
                tolerance.report(error)

    try:
        with call_every(drain, every_s, "rayrec-run-log", end_s=30):
            yield
    finally:
        drain(last=True)
