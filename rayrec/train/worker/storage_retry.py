"""Retries operations on checkpoints while their storage fails or does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from rayrec._runtime.threads import call_every, run_in_thread
from rayrec.storage.retries import Patience, waits_s
from rayrec.train.errors import is_lost_peer
from rayrec.train.worker.lockstep import Control

T = TypeVar("T")

REPORT_EVERY_S = 60.0
_PERMANENT = (IsADirectoryError, NotADirectoryError, FileExistsError)


def is_storage_fault(error: BaseException) -> bool:
    """Whether an error is a transient storage fault. This includes permissions and missing mounts."""
    return isinstance(error, OSError) and not isinstance(error, _PERMANENT) and not is_lost_peer(error)


class StorageRetry:
    """Calls a function again while the storage is unavailable.

    Args:
        patience: `outage_s` is the time limit of retries.
        report: called on rank 0, once a minute, during a long operation.
    """

    def __init__(self, control: Control, patience: Patience, report: Callable[[str], object]) -> None:
        self._control, self._patience, self._report = control, patience, report

    def __call__(self, task: str, function: Callable[[], T]) -> T:
        """Call `function`, and retry with doubling waits while the storage is unavailable. A collective.

        Args:
            task: description of the operation, for the report.
            function: must raise on every rank if it fails on any.

        Raises:
            OSError: error of the last attempt, after `patience.outage_s`.
            Exception: any other error of `function`, at once.
        """
        start, waits = time.monotonic(), waits_s()
        with self._reporting(task) as note:
            while True:
                try:
                    return function()
                except OSError as error:
                    # All ranks decide by rank 0's clock.
                    waited_s = self._control.gather(time.monotonic() - start)[0] if is_storage_fault(error) else None
                    if waited_s is None or waited_s >= self._patience.outage_s:
                        raise
                    note(f"{type(error).__name__}: {error}")
                time.sleep(next(waits))

    @contextmanager
    def _reporting(self, task: str) -> Iterator[Callable[[str], object]]:
        """Report once a minute, on rank 0, that the body still runs. Yields a function that notes an error."""
        errors: list[str] = []
        start = time.monotonic()

        def report() -> None:
            minutes = (time.monotonic() - start) / 60
            retry = f" ({errors[-1]}); retrying for up to {self._patience.outage_s / 60:g} min" if errors else ""
            self._report(f"Still {task} after {minutes:.0f} min: waiting for the storage{retry}.")

        is_first = self._control.rank == 0
        with call_every(report, REPORT_EVERY_S, "rayrec-outage") if is_first else nullcontext():
            yield errors.append


def call_within(seconds: float, function: Callable[[], T]) -> T:
    """Run `function` in a thread and return its result. After a timeout it continues in the background.

    Raises:
        TimeoutError: `function` has not returned after `seconds`.
        Exception: error of `function`.
    """
    future = run_in_thread(function, "rayrec-storage")
    if not wait([future], seconds).done:
        raise TimeoutError(f"the storage has not answered for {seconds:g} s")
    return future.result()
