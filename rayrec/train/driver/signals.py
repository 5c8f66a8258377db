"""Stop signals: the first asks the run to stop with a last checkpoint, a second one or the end of the grace ends it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rayrec._runtime.stop_signals import STOP_SIGNALS
from rayrec._runtime.threads import run_in_thread
from rayrec.train.errors import Interrupted

TICK_S = 0.1


class StopSignals:
    """What has been heard since `listening` began.

    Args:
        ask: called once, in a thread of its own, when the first signal comes.
        grace_s: seconds that the run then has to end by itself.
    """

    def __init__(self, ask: Callable[[], object], grace_s: float) -> None:
        self._ask, self._grace_s = ask, grace_s
        self.received: int | None = None
        self._count = 0
        self._until = float("inf")

    def __call__(self, number: int, _: FrameType | None = None) -> None:
        if self._count and number == signal.SIGHUP:
            return  # the kernel and the shell each send one when a terminal is closed
        self._count += 1
        if self._count == 1:
            self.received, self._until = number, time.monotonic() + self._grace_s
            threading.Thread(target=self._ask, name="rayrec-stop", daemon=True).start()

    @property
    def overdue(self) -> str | None:
        """Why waiting is over, if it is."""
        if self._count > 1:
            return "interrupted twice, so without a last checkpoint"
        if time.monotonic() > self._until:
            return f"interrupted; no last checkpoint within trainer.grace_s={self._grace_s:g} s"
        return None

    def interrupted(self, message: str) -> Interrupted:
        return Interrupted(message, self.received or signal.SIGINT)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """What the body does to the handlers of stop signals is undone: Ray sets one of its own when it starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def listening(heard: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Stop signals go to `heard` while the body runs; outside of the main thread none arrive, and nothing is done."""
    with handlers_kept():
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                signal.signal(number, heard)
        yield


def run_beside(act: Callable[[], object], signals: StopSignals) -> None:
    """Run `act` in a thread and wait for its end here, where signals arrive at once.

    Raises:
        Interrupted: the stop took too long; the thread is left behind.
        BaseException: what `act` raised.
    """
    done = run_in_thread(act, "rayrec-run")
    while not wait([done], TICK_S).done:
        if (late := signals.overdue) is not None:
            raise signals.interrupted(late)
    done.result()
