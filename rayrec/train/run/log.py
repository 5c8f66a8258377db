"""How workers report to the driver: records (plain dicts) in a mailbox.

Workers never wait for the driver, and the driver polls. What is done with a record lives in `driver/recorder.py`.
Kinds of records: begin, plan, progress, train, eval, event, failure and growth (from Ray's controller), stopped, fatal,
excused (fatal records so far come from a lost worker), done.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from rayrec.train.tolerance import Tolerance

Record = dict[str, Any]
Waiting = tuple[int, str]  # exchanges that a rank has begun, and the line of code in which it waits for the others


class Sink(Protocol):
    """Where a worker sends records."""

    def begin(self, leader: bool) -> bool:
        """Called by every rank at the start of an attempt; the leader counts it. True: the run has failed already."""

    def put(self, record: Record) -> None:
        """Send without waiting; records of one rank arrive in order."""

    def flush(self, record: Record) -> None:
        """Send, and return when it has arrived with all before it."""

    def failed_ranks(self) -> int:
        """How many ranks have sent a fatal record."""

    def stop_requested(self) -> bool:
        """Whether the driver wants the workers to stop, with a last checkpoint."""

    def growing(self) -> bool:
        """Whether they are to be started again after that, as more of them."""

    def waiting(self, rank: int, place: Waiting | None) -> dict[int, Waiting]:
        """Reports where this rank waits for the others (None: it does not), and returns the places of all that wait."""


class Mailbox:
    """Keeps records until they are taken; runs as an actor, or in the driver's own process."""

    def __init__(self, attempts_before: int = 0) -> None:
        self._records: list[Record] = []
        self._attempt = attempts_before
        self._failed: set[int] = set()
        self._waiting: dict[int, Waiting] = {}
        self._last_words: str | None = None
        self._stop = self._grow = self._excused = False
        self._saved_step = self._failures = 0
        self._idle_since: float | None = time.monotonic()

    def begin(self, leader: bool) -> bool:
        self._excused, self._idle_since = False, None
        self._attempt += leader and not self._failed
        self._grow = self._grow and not leader
        self._waiting.clear()
        self._last_words = None
        return bool(self._failed)

    def put(self, record: Record) -> None:
        if record["kind"] in ("failure", "growth"):
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

    def last_words(self) -> str | None:
        """Why a worker of this attempt has ended itself, if one has."""
        return self._last_words

    def failed_ranks(self) -> int:
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

    def ask_growth(self) -> None:
        """Stop with a checkpoint and start again: there is room for more workers."""
        self._grow = True

    def stop_requested(self) -> bool:
        return self._stop or self._grow

    def growing(self) -> bool:
        return self._grow and not self._stop

    def waiting(self, rank: int, place: Waiting | None) -> dict[int, Waiting]:
        self._waiting.pop(rank, None)
        if place is not None:
            self._waiting[rank] = place
        return dict(self._waiting)

    def take(self) -> list[Record]:
        """All records since the last call."""
        taken, self._records = self._records, []
        return taken


def ask(method: Any, *given: Any) -> Any:
    """The answer of a mailbox that is an actor."""
    import ray

    return ray.get(method.remote(*given), timeout=30)


@dataclass(frozen=True, slots=True)
class ActorSink:
    """Sends to a mailbox that is a Ray actor."""

    actor: Any
    timeout_s: float = 30.0

    def begin(self, leader: bool) -> bool:
        return bool(self._get(self.actor.begin.remote(leader)))

    def put(self, record: Record) -> None:
        self.actor.put.remote(record)

    def flush(self, record: Record) -> None:
        self._get(self.actor.put.remote(record))

    def failed_ranks(self) -> int:
        return int(self._get(self.actor.failed_ranks.remote()))

    def stop_requested(self) -> bool:
        return bool(self._get(self.actor.stop_requested.remote()))

    def growing(self) -> bool:
        return bool(self._get(self.actor.growing.remote()))

    def waiting(self, rank: int, place: Waiting | None) -> dict[int, Waiting]:
        everyone: dict[int, Waiting] = self._get(self.actor.waiting.remote(rank, place))
        return everyone

    def _get(self, answer: Any) -> Any:
        import ray

        return ray.get(answer, timeout=self.timeout_s)


@dataclass(frozen=True, slots=True)
class DirectSink:
    """Hands records to the driver in the same process."""

    mailbox: Mailbox
    handle: Callable[[Record], None]

    def begin(self, leader: bool) -> bool:
        return self.mailbox.begin(leader)

    def put(self, record: Record) -> None:
        self.mailbox.put(record)
        for taken in self.mailbox.take():
            self.handle(taken)

    def flush(self, record: Record) -> None:
        self.put(record)

    def failed_ranks(self) -> int:
        return self.mailbox.failed_ranks()

    def stop_requested(self) -> bool:
        return self.mailbox.stop_requested()

    def growing(self) -> bool:
        return self.mailbox.growing()

    def waiting(self, rank: int, place: Waiting | None) -> dict[int, Waiting]:
        return self.mailbox.waiting(rank, place)


@contextlib.contextmanager
def drained(
    take: Callable[[], list[Record]],
    handle: Callable[[Record], None],
    tolerance: Tolerance | None = None,
    every_s: float = 0.2,
) -> Iterator[None]:
    """Hand records over from a thread while the body runs; what is left is handed over at its end.

    A `take` that fails is tried again at the next tick: a busy machine must not end a run. An error of `handle`, even
    SystemExit, costs its record and no other.

    Raises:
        Exception: the one of the last `take`; after the body.
    """
    stop = threading.Event()
    tolerance = tolerance or Tolerance()

    def drain(last: bool) -> None:
        try:
            records = take()
        except Exception:
            if last:
                raise
            return
        for record in records:
            try:
                handle(record)
            except BaseException as error:
                if last and isinstance(error, KeyboardInterrupt):
                    raise
                tolerance.report(error)

    def loop() -> None:
        while not stop.wait(every_s):
            drain(last=False)

    thread = threading.Thread(target=loop, name="rayrec-run-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=30)
        drain(last=True)
