"""Slow work on every rank without a slow collective: meanwhile ranks only run short exchanges.

A rank whose disk takes longer than the group's timeout would otherwise end the others, which wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from rayrec.checkpoint.errors import DamagedCheckpointError
from rayrec.distributed import comm

T = TypeVar("T")


def pauses(longest_s: float = 0.5) -> Iterator[float]:
    """Seconds to sleep between two looks: short at first."""
    pause = 0.002
    while True:
        yield pause
        pause = min(longest_s, 2 * pause)


def on_every_rank(work: Callable[[], T], group: comm.Group) -> T:
    """Do `work`, which exchanges nothing itself, on every rank; returns this rank's result when all have theirs.

    Raises:
        Exception: on every rank, if it failed on any: the first that is no damage, else all damage together.
    """
    if group is None or group.size() == 1:
        return work()
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="rayrec-checkpoint", daemon=True)
    thread.start()
    for pause in pauses():
        thread.join(pause)
        mine = (not thread.is_alive(), errors[0] if errors else None)
        states = comm.all_gather_object(mine, group)
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
    """Whether so many seconds have passed since this call."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end
