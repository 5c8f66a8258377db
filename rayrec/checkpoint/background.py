"""The save that is under way: waiting for it without holding up other ranks, and what became of it."""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from rayrec.checkpoint.errors import FencedError
from rayrec.checkpoint.manifest import MANIFEST
from rayrec.checkpoint.pace import StoppedError
from rayrec.checkpoint.polling import deadline, on_every_rank, pauses
from rayrec.checkpoint.saving import Job, Save
from rayrec.distributed import comm

REMOVAL_S = 5.0  # that ranks wait until what a failed save left is removed


@dataclass(frozen=True)
class Outcome:
    """How a save beside training ended.

    Args:
        error: why there is no checkpoint; None: there is one.
        seconds: from its begin to its end.
    """

    step: int
    error: Exception | None
    seconds: float


class _State(NamedTuple):
    """A rank's part of a save, as the others hear of it."""

    running: bool
    error: Exception | None
    late: bool
    still: bool


class Underway:
    """At most one save at a time, of this rank."""

    def __init__(self) -> None:
        self._job: Job | None = None
        self._waited_s = 0.0  # for this job
        self._ended: list[Outcome] = []

    def start(self, save: Save, beside_training: bool = False, shares_cpus: bool = False) -> None:
        assert self._job is None
        self._waited_s = 0.0
        self._job = Job(save, beside_training, shares_cpus)

    def settle(self, group: comm.Group, patience_s: float = math.inf, still_s: float = math.inf) -> bool:
        """Wait until every rank's part of the save is over; remove what a failed one left. A collective.

        Args:
            patience_s: seconds to wait for one save, over all calls.
            still_s: seconds to wait for a rank whose storage takes nothing meanwhile.

        Returns:
            False: some rank is still writing after that.

        Raises:
            FencedError: on every rank, where the run has been taken over.
        """
        began = time.monotonic()
        late = deadline(patience_s - self._waited_s)
        if self._job is not None:
            self._job.pace.hurry()
        for pause in pauses():
            job = self._job
            mine = _State(False, None, late(), False)
            if job is not None:
                still = min(job.still_s, time.monotonic() - began) >= still_s
                mine = _State(job.running, job.error, late(), still)
            states = comm.all_gather_object(mine, group)
            errors = [state.error for state in states if state.error is not None]
            if job is not None and errors:
                job.pace.stop()
            if not any(state.running for state in states):
                break
            if states[0].late or any(state.still for state in states):  # rank 0's clock decides for all
                self._waited_s += time.monotonic() - began
                return False
            time.sleep(0) if job is None else job.join(pause)
        self._job = None
        if job is not None:
            self._end(job, errors, group)
        return True

    def _end(self, job: Job, errors: list[Exception], group: comm.Group) -> None:
        causes = [error for error in errors if not isinstance(error, StoppedError)] or errors
        fenced = next((error for error in causes if isinstance(error, FencedError)), None)
        error = fenced or (causes[0] if causes else None)
        self._report(job, error)
        if error is not None and fenced is None:
            first = group is None or group.rank() == 0
            on_every_rank(lambda: _remove_soon(job) if first else None, group)
        if fenced is not None:
            raise fenced

    @property
    def running(self) -> bool:
        """Whether this rank's part of a save is being written."""
        return self._job is not None and self._job.running

    def ended(self) -> list[Outcome]:
        """Saves that ended since the last call, as far as this rank knows; rank 0 knows when one is complete."""
        if self._job is not None and not self._job.running:
            self._report(self._job, self._job.error)
        found, self._ended = self._ended, []
        return found

    def _report(self, job: Job, error: Exception | None) -> None:
        if not job.reported:
            job.reported = True
            self._ended.append(Outcome(job.step, error, job.seconds))

    def close(self, seconds: float) -> None:
        """Let the save come to its end, at the end of this process's part of the run; exchanges nothing."""
        if self._job is not None:
            self._job.pace.hurry()
            self._job.join(seconds)
            self._job.pace.stop()


def _remove_soon(job: Job) -> None:
    """Remove what a failed save left; on storage that hangs, whenever that goes on."""
    thread = threading.Thread(target=_remove, args=(job,), name="rayrec-remove", daemon=True)
    thread.start()
    thread.join(REMOVAL_S)


def _remove(job: Job) -> None:
    """What a failed save left; never what has become a checkpoint all the same."""
    with suppress(OSError):  # tried again by the next attempt
        if MANIFEST not in job.folder.names():
            job.folder.remove_all()
