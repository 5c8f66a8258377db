"""Runs slow work on every rank with short collectives only.

Otherwise, if the disk of one rank is slower than the timeout of the process group, the ranks that wait for it fail.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from rayrec.checkpoint.errors import DamagedCheckpointError
from rayrec.distributed import comm
from rayrec.storage.retries import waits_s

T = TypeVar("T")

FIRST_POLL_S, LONGEST_POLL_S = 0.002, 0.5


def on_every_rank(function: Callable[[], T], group: comm.Group) -> T:
    """Call `function` on every rank, wait for all ranks, and return this rank's result. It must not use collectives.

    Raises:
        Exception: on every rank, if it failed on any: the first error that is not damage, else all damage together.
    """
    if group is None or group.size() == 1:
        return function()
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="rayrec-checkpoint", daemon=True)
    thread.start()
    for wait_s in waits_s(FIRST_POLL_S, LONGEST_POLL_S):
        thread.join(wait_s)
        state = (not thread.is_alive(), errors[0] if errors else None)
        states = comm.all_gather_object(state, group)
        if all(done for done, _ in states):
            break
    failures = [error for _, error in states if error is not None]
    if failures:
        raise _worst(failures) from (errors[0] if errors else None)
    return results[0]


def _worst(failures: list[Exception]) -> Exception:
    damages = []
    for failure in failures:
        if not isinstance(failure, DamagedCheckpointError):
            return failure
        damages += [damage for damage in failure.damages if damage not in damages]
    return DamagedCheckpointError(failures[0].path, damages)  # type: ignore[attr-defined]


def deadline(seconds: float) -> Callable[[], bool]:
    """A function that returns whether `seconds` have passed since this call."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end
