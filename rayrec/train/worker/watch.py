"""A thread beside a rank's loop: polls for a stop, detects a rank that hangs and ranks that wait for each other.

It never touches the step: it looks at the main thread's stack and at the number of exchanges begun.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType

from rayrec.distributed.comm import count_collectives
from rayrec.train.run.log import Mailbox, Waiting

POLL_S = 0.5
EXIT_HUNG, EXIT_UNLIKE = 75, 76
_EXCHANGES = ("torch.distributed", "rayrec.distributed.comm")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread is: `at` is a line of text for people, `stack` says whether it has moved at all."""

    at: str
    stack: tuple[tuple[int, int], ...]
    in_exchange: bool


def place_of(thread: int) -> Place:
    """Where a thread of this process is now."""
    frame: FrameType | None = sys._current_frames().get(thread)
    stack, at, in_exchange, innermost = [], "", False, True
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        stack.append((id(frame.f_code), frame.f_lasti))
        if module.startswith(_EXCHANGES):
            in_exchange |= innermost
        else:
            innermost = False
            if not at:
                at = f"{module}.{frame.f_code.co_name}, line {frame.f_lineno}"
        frame = frame.f_back
    return Place(at, tuple(stack), in_exchange)


def stacks() -> str:
    """The stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


class Watch:
    """Watches the thread that made it until it is closed.

    Args:
        sink: the way to the driver.
        hang_s: seconds without any movement of the main thread after which the stacks are reported and the process
            ends, which restarts the worker group.
        suspicious_s: seconds in one exchange after which ranks compare where they wait; if they are at unlike places of
            one exchange, the process ends, which restarts the worker group.
        end: how the process ends; None: hangs are only reported.
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
    ) -> None:
        self._sink, self._rank, self._world_size, self._end = sink, rank, world_size, end
        self._hang_s, self._suspicious_s = hang_s, suspicious_s
        self._main = threading.get_ident()
        self._stop, self._closed = threading.Event(), threading.Event()
        self._steps = 0
        self._waiting = False
        self._unlike: dict[int, Waiting] | None = None  # at the last look
        self._counting = count_collectives()
        self._exchanges: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="rayrec-watch", daemon=True)

    def stop_requested(self) -> bool:
        """Whether the driver has requested a stop; called at every step, so it also counts as movement."""
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
        place, steps, since = place_of(self._main), self._steps, time.monotonic()
        while not self._closed.wait(POLL_S):
            now = place_of(self._main)
            if (now.stack, self._steps) != (place.stack, steps):
                place, steps, since = now, self._steps, time.monotonic()
            still_s = time.monotonic() - since
            try:
                self._look(place, still_s)
            except Exception:
                continue  # the driver is busy or away; it ends the workers if it is gone for good
            if still_s > self._hang_s:
                self._report_hang(place, still_s)
                since = time.monotonic()

    def _look(self, place: Place, still_s: float) -> None:
        if self._rank == 0 and not self._stop.is_set() and self._sink.stop_requested():
            self._stop.set()
        waits = place.in_exchange and still_s > self._suspicious_s
        if not waits and not self._waiting:
            return
        self._waiting = waits
        everyone = self._sink.waiting(self._rank, (self._exchanges.total(), place.at) if waits else None)
        # A rank that has gone on to the next exchange, while another still receives, has begun one more than that.
        numbers, places = {number for number, _ in everyone.values()}, set(everyone.values())
        unlike = len(everyone) == self._world_size and len(numbers) < len(places)
        if unlike and everyone == self._unlike:
            self._report_unlike(everyone)
        self._unlike = everyone if unlike else None

    def _report_unlike(self, everyone: dict[int, Waiting]) -> None:
        places = "; ".join(f"rank {rank} in {at}" for rank, (_, at) in sorted(everyone.items()))
        message = (
            f"ranks wait for each other at different places: {places}; a model must make the same exchanges on every "
            f"rank, also for empty batches"
        )
        self._sink.flush(
            {"kind": "event", "event": "unlike", "message": message, "rank": self._rank, "stacks": stacks()}
        )
        if self._end is not None:
            self._end(EXIT_UNLIKE)

    def _report_hang(self, place: Place, still_s: float) -> None:
        message = f"rank {self._rank} has not moved for {still_s:.0f} s (trainer.hang_s), in {place.at}"
        record = {"kind": "event", "event": "hang", "message": message, "rank": self._rank, "stacks": stacks()}
        try:
            self._sink.flush(record)
        except Exception as error:
            sys.stderr.write(f"{message}; the driver does not answer ({error})\n{record['stacks']}\n")
        if self._end is not None:
            self._end(EXIT_HUNG)
