"""Stop signals: the first one requests a stop with a final checkpoint; the second one, or the end of the grace period,
ends the run at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from types import FrameType

from rayrec._runtime.stop_signals import STOP_SIGNALS, handlers_kept
from rayrec._runtime.threads import run_in_thread
from rayrec.train.errors import Interrupted

TICK_S = 0.1
ABANDON_S = 10.0


class StopSignals:
    """A signal handler that counts the stop signals of a run.

    Args:
        request_stop: called once, in a thread, at the first signal.
        grace_s: seconds that the run has to stop after that.
    """

    def __init__(self, request_stop: Callable[[], object], grace_s: float) -> None:
        self._request_stop, self._grace_s = request_stop, grace_s
        self.received: int | None = None
        self._count = 0
        self._deadline = float("inf")

    def __call__(self, number: int, _: FrameType | None = None) -> None:
        if self._count and number == signal.SIGHUP:
            return  # the kernel and the shell each send one when a terminal is closed
        self._count += 1
        if self._count == 1:
            self.received, self._deadline = number, time.monotonic() + self._grace_s
            threading.Thread(target=self._request_stop, name="rayrec-stop", daemon=True).start()

    def request(self) -> None:
        """Stop as at a first SIGTERM. Does nothing after a stop signal."""
        if not self._count:
            self(signal.SIGTERM)

    @property
    def reason_to_exit(self) -> str | None:
        """The reason to exit without waiting for the run; None: keep waiting."""
        if self._count > 1:
            return "Exited on the second interrupt; no final checkpoint was saved."
        if time.monotonic() > self._deadline:
            return f"Interrupted; no final checkpoint was saved within trainer.grace_s={self._grace_s:g} s."
        return None

    def interrupted(self, message: str) -> Interrupted:
        return Interrupted(message, self.received or signal.SIGINT)


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call `handler` for stop signals while the body runs. Does nothing outside of the main thread, because only the
    main thread receives signals."""
    with handlers_kept():
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                signal.signal(number, handler)
        yield


def run_in_background(
    function: Callable[[], object], signals: StopSignals, abandon: Callable[[], object] | None = None
) -> None:
    """Call `function` in a thread and wait for its end. Signals are handled during the wait.

    Args:
        abandon: makes the function end soon; called repeatedly until it has ended, for at most `ABANDON_S` seconds.

    Raises:
        Interrupted: the stop took too long; the thread is abandoned.
        BaseException: what `function` raised.
    """
    future = run_in_thread(function, "rayrec-run")
    try:
        while not wait([future], TICK_S).done:
            if (reason := signals.reason_to_exit) is not None:
                raise signals.interrupted(reason)
    finally:
        deadline = time.monotonic() + ABANDON_S
        while abandon is not None and not future.done() and time.monotonic() < deadline:
            with suppress(Exception):
                abandon()
            wait([future], TICK_S)
    future.result()
