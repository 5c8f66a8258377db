"""A watchdog thread in each worker: polls for stop requests and results of evaluations, and detects hangs and deadlocks
between ranks.

It only reads the main thread's stack and a counter of collectives, so it does not slow down a step.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType

from rayrec.distributed.comm import count_collectives
from rayrec.train.run.log import Mailbox, Record, Waiting

POLL_S = 0.5
TURN_S = 30.0  # for which a rank compares the reports of all, before the next rank does
EXIT_HUNG, EXIT_UNLIKE = 75, 76
_EXCHANGES = ("torch.distributed", "rayrec.distributed.comm")


@dataclass(frozen=True, slots=True)
class CodeLocation:
    """The current code location of a thread.

    Args:
        line: module, function and line, for display; the innermost frame outside of the collective.
        stack: code and instruction of each frame; unchanged only if the thread has not moved.
        in_exchange: whether the thread is inside a collective.
    """

    line: str
    stack: tuple[tuple[int, int], ...]
    in_exchange: bool


def location_of(thread: int) -> CodeLocation:
    """The current location of a thread of this process."""
    frame = _frames().get(thread)
    stack, line, in_exchange, innermost = [], "", False, True
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        stack.append((id(frame.f_code), frame.f_lasti))
        if module.startswith(_EXCHANGES):
            in_exchange |= innermost
        else:
            innermost = False
            if not line:
                line = f"{module}.{frame.f_code.co_name}, line {frame.f_lineno}"
        frame = frame.f_back
    return CodeLocation(line, tuple(stack), in_exchange)


def stacks() -> str:
    """The stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in _frames().items()
        if ident != threading.get_ident()
    )


def _frames() -> dict[int, FrameType]:
    """The current frame of each thread, by its identifier.

    A garbage collection during the call may deadlock all threads in Python 3.11 (python/cpython#106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


class Watch:
    """Watches the thread that creates it, until it is closed.

    Args:
        sink: sends to the driver.
        hang_s: seconds without progress of the main thread after which the watchdog reports all stacks and ends the
            process, so that the worker group restarts.
        suspicious_s: seconds in one collective after which ranks compare their code locations. If the locations
            differ for the same collective, the process ends, so that the worker group restarts.
        end: ends the process; None: only report hangs.
        evaluates: rank 0 also asks for outcomes of background evaluations.

    Attributes:
        evaluated: outcomes that arrived; the main thread takes them out.
    """

    def __init__(
        self,
        sink: Mailbox,
        rank: int,
        world_size: int,
        *,
        hang_s: float,
        suspicious_s: float = 5.0,
        end: Callable[[int], object] | None = os._exit,
        evaluates: bool = False,
    ) -> None:
        self._sink, self._rank, self._world_size, self._end = sink, rank, world_size, end
        self._hang_s, self._suspicious_s = hang_s, suspicious_s
        self._main = threading.get_ident()
        self._stop, self._closed = threading.Event(), threading.Event()
        self._asks, self._received = evaluates and rank == 0, 0
        self.evaluated: deque[Record] = deque()
        self._steps = 0
        self._reported: tuple[Waiting | None, int] = (None, 0)  # the last report and its turn
        self._mismatch: dict[int, Waiting] | None = None  # of the last check
        self._counting = count_collectives()
        self._exchanges: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="rayrec-watch", daemon=True)

    def stop_requested(self) -> bool:
        """Whether the driver has requested a stop. Called at every step, so a call also counts as progress."""
        self._steps += 1
        return self._stop.is_set()

    def __enter__(self) -> Watch:
        self._exchanges = self._counting.__enter__()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._closed.set()
        self._counting.__exit__(kind, error, None)

    def _run(self) -> None:
        location, steps, since = location_of(self._main), self._steps, time.monotonic()
        while not self._closed.wait(POLL_S):
            current = location_of(self._main)
            if (current.stack, self._steps) != (location.stack, steps):
                location, steps, since = current, self._steps, time.monotonic()
            still_s = time.monotonic() - since
            try:
                self._check(location, still_s)
            except Exception:
                continue  # the driver is busy or unreachable; if it has died, Ray ends the workers
            if still_s > self._hang_s:
                self._report_hang(location, still_s)
                since = time.monotonic()

    def _check(self, location: CodeLocation, still_s: float) -> None:
        if self._rank == 0 and not self._stop.is_set() and self._sink.stop_requested():
            self._stop.set()
        if self._asks:
            outcomes = self._sink.outcomes(self._received)
            self._received += len(outcomes)
            self.evaluated.extend(outcomes)
        waits = location.in_exchange and still_s > self._suspicious_s
        waiting = (self._exchanges.total(), location.line) if waits else None
        # Each rank reports once, and again at each turn, because a mailbox that replaces a lost one knows no reports.
        turn = int((still_s - self._suspicious_s) // TURN_S) if waits else 0
        if (waiting, turn) != self._reported:
            self._sink.report_waiting(self._rank, waiting)
            self._reported = (waiting, turn)
        # One rank at a time asks for all reports. Rank 0 begins; if it cannot, the next rank takes its turn.
        if waits and turn % self._world_size == self._rank:
            self._compare(self._sink.waiting_ranks())
        else:
            self._mismatch = None

    def _compare(self, by_rank: dict[int, Waiting]) -> None:
        # While one rank still receives, another may be in the next collective. So compare only ranks with equal
        # counts of collectives.
        numbers, locations = {number for number, _ in by_rank.values()}, set(by_rank.values())
        mismatch = len(by_rank) == self._world_size and len(numbers) < len(locations)
        if mismatch and by_rank == self._mismatch:
            self._report_deadlock(by_rank)
        self._mismatch = by_rank if mismatch else None

    def _report_deadlock(self, by_rank: dict[int, Waiting]) -> None:
        lines = "; ".join(f"rank {rank} in {line}" for rank, (_, line) in sorted(by_rank.items()))
        message = (
            f"Deadlock: ranks wait in different collectives: {lines}. A model must call the same collectives on every "
            f"rank, also for empty batches."
        )
        self._sink.flush(
            {"kind": "event", "event": "unlike", "message": message, "rank": self._rank, "stacks": stacks()}
        )
        if self._end is not None:
            self._end(EXIT_UNLIKE)

    def _report_hang(self, location: CodeLocation, still_s: float) -> None:
        message = f"rank {self._rank} has not moved for {still_s:.0f} s (trainer.hang_s); it is in {location.line}"
        record = {"kind": "event", "event": "hang", "message": message, "rank": self._rank, "stacks": stacks()}
        try:
            self._sink.flush(record)
        except Exception as error:
            sys.stderr.write(f"{message}; the driver does not answer ({error})\n{record['stacks']}\n")
        if self._end is not None:
            self._end(EXIT_HUNG)
