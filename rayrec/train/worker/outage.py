"""Storage of checkpoints that fails or does not answer: tried again where a run cannot go on without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from rayrec._runtime.threads import call_every, run_in_thread
from rayrec.storage.retries import FIRST_WAIT_S, LONGEST_WAIT_S, Patience
from rayrec.train.errors import is_lost_peer
from rayrec.train.worker.lockstep import Control

T = TypeVar("T")

REPORT_EVERY_S = 60.0
_LASTING = (IsADirectoryError, NotADirectoryError, FileExistsError)


def is_of_storage(error: BaseException) -> bool:
    """Whether `error` is a fault of storage that may pass: permissions and mounts come back too."""
    return isinstance(error, OSError) and not isinstance(error, _LASTING) and not is_lost_peer(error)


class Outages:
    """Waits for storage that is away.

    Args:
        patience: its `outage_s` is how long to wait.
        report: called on rank 0, once a minute, with what is waited for.
    """

    def __init__(self, control: Control, patience: Patience, report: Callable[[str], object]) -> None:
        self._control, self._patience, self._report = control, patience, report

    def outlast(self, what: str, act: Callable[[], T]) -> T:
        """The result of `act`, tried again, after waits that double, while the storage is away. A collective.

        Args:
            what: is done, for the report.
            act: raises on every rank what it raises on one.

        Raises:
            OSError: what the last try raised, after `patience.outage_s`.
            Exception: any other error of `act`, at once.
        """
        began, wait_s = time.monotonic(), FIRST_WAIT_S
        with self._reporting(what) as note:
            while True:
                try:
                    return act()
                except OSError as error:
                    waited_s = self._control.gather(time.monotonic() - began)[0] if is_of_storage(error) else None
                    if waited_s is None or waited_s >= self._patience.outage_s:
                        raise
                    note(f"{type(error).__name__}: {error}")
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    @contextmanager
    def _reporting(self, what: str) -> Iterator[Callable[[str], object]]:
        """Reports once a minute, on rank 0, that the body still runs, with the last reason that was noted."""
        reasons: list[str] = []
        began = time.monotonic()

        def report() -> None:
            minutes = (time.monotonic() - began) / 60
            why = f" ({reasons[-1]}); trying again for {self._patience.outage_s / 60:g} min" if reasons else ""
            self._report(f"{what}: waiting for the storage, {minutes:.0f} min so far{why}")

        first = self._control.rank == 0
        with call_every(report, REPORT_EVERY_S, "rayrec-outage") if first else nullcontext():
            yield reasons.append


def within(seconds: float, act: Callable[[], T]) -> T:
    """The result of `act`, which runs in a thread; where it takes longer it goes on alone.

    Raises:
        TimeoutError: it takes longer.
        Exception: what `act` raised.
    """
    done = run_in_thread(act, "rayrec-storage")
    if not wait([done], seconds).done:
        raise TimeoutError(f"the storage has not answered for {seconds:g} s")
    return done.result()
