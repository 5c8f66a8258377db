"""A save in a background thread: whether the host has memory for it, waiting for it, and its outcome."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rayrec._runtime.cgroup_limits import available_bytes
from rayrec.checkpoint.errors import FencedError
from rayrec.checkpoint.manifest import MANIFEST
from rayrec.checkpoint.polling import FIRST_POLL_S, LONGEST_POLL_S, deadline, on_every_rank
from rayrec.checkpoint.saving import Save, SaveThread
from rayrec.checkpoint.writer import StoppedError
from rayrec.distributed import comm
from rayrec.storage.retries import waits_s

REMOVAL_S = 5.0  # time limit for removing the files of a failed save
_MEMORY_SHARE = 0.8  # of the free memory; leaves the rest to the page cache and training


@dataclass(frozen=True)
class Outcome:
    """The outcome of a save.

    Args:
        error: the reason that it failed; None: the save succeeded.
        seconds: duration of the save.
    """

    step: int
    error: Exception | None
    seconds: float


class _State(NamedTuple):
    """The state of a rank's share of a save, which it exchanges with other ranks."""

    running: bool
    error: Exception | None
    late: bool
    stalled: bool


class BackgroundSave:
    """This rank's share of a background save; at most one at a time."""

    def __init__(self) -> None:
        self._thread: SaveThread | None = None
        self._waited_s = 0.0  # of this save
        self._ended: list[Outcome] = []

    def start(self, save: Save, during_training: bool = False, shares_cpus: bool = False) -> None:
        """Start a save; see `SaveThread`."""
        assert self._thread is None
        self._waited_s = 0.0
        self._thread = SaveThread(save, during_training, shares_cpus)

    def wait(self, group: comm.Group, patience_s: float = math.inf, stall_s: float = math.inf) -> bool:
        """Wait until all ranks have ended their share of the save, and remove the files of a failed save. A collective.

        Args:
            patience_s: total seconds to wait for one save, over all calls.
            stall_s: seconds to wait for a rank without storage progress.

        Returns:
            False if some rank is still writing after that time.

        Raises:
            FencedError: on every rank, if another attempt has taken over the run.
        """
        start = time.monotonic()
        late = deadline(patience_s - self._waited_s)
        thread = self._thread
        if thread is not None:
            thread.throttle.release()
        for wait_s in waits_s(FIRST_POLL_S, LONGEST_POLL_S):
            state = _State(False, None, late(), False)
            if thread is not None:
                stalled = min(thread.stalled_s, time.monotonic() - start) >= stall_s
                state = _State(thread.running, thread.error, late(), stalled)
            states = comm.all_gather_object(state, group)
            errors = [peer.error for peer in states if peer.error is not None]
            if thread is not None and errors:
                thread.throttle.stop()
            if not any(peer.running for peer in states):
                break
            # All ranks decide by rank 0's clock.
            if states[0].late or any(peer.stalled for peer in states):
                self._waited_s += time.monotonic() - start
                return False
            time.sleep(0) if thread is None else thread.join(wait_s)
        self._thread = None
        if thread is not None:
            self._finish(thread, errors, group)
        return True

    def _finish(self, thread: SaveThread, errors: list[Exception], group: comm.Group) -> None:
        causes = [error for error in errors if not isinstance(error, StoppedError)] or errors
        fenced = next((error for error in causes if isinstance(error, FencedError)), None)
        error = fenced or (causes[0] if causes else None)
        self._add_outcome(thread, error)
        if error is not None and fenced is None:
            is_rank_0 = group is None or group.rank() == 0
            on_every_rank(lambda: _remove_in_background(thread) if is_rank_0 else None, group)
        if fenced is not None:
            raise fenced

    @property
    def running(self) -> bool:
        """Whether this rank's share of a save is being written."""
        return self._thread is not None and self._thread.running

    def ended(self) -> list[Outcome]:
        """Outcomes of saves on this rank that ended since the last call. Only rank 0 knows whether one is complete."""
        if self._thread is not None and not self._thread.running:
            self._add_outcome(self._thread, self._thread.error)
        outcomes, self._ended = self._ended, []
        return outcomes

    def _add_outcome(self, thread: SaveThread, error: Exception | None) -> None:
        if not thread.reported:
            thread.reported = True
            self._ended.append(Outcome(thread.step, error, thread.seconds))

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` for the save, then abandon it. Not a collective."""
        if self._thread is not None:
            self._thread.throttle.release()
            self._thread.join(seconds)
            self._thread.throttle.stop()


def _remove_in_background(save: SaveThread) -> None:
    """Remove the files of a failed save in a thread. If the storage hangs, return before they are removed."""
    thread = threading.Thread(target=_remove, args=(save,), name="rayrec-remove", daemon=True)
    thread.start()
    thread.join(REMOVAL_S)


def _remove(save: SaveThread) -> None:
    """Remove the files of a failed save, unless it was committed nevertheless."""
    with suppress(OSError):  # the next attempt tries again
        if MANIFEST not in save.folder.names():
            save.folder.remove_all()


def fits_in_memory(need_bytes: int, group: comm.Group) -> bool:
    """Whether every host has memory for the copies of all its ranks. A collective; the result is equal on all ranks.

    Args:
        need_bytes: size of this rank's copies.
    """
    need_bytes = max(0, need_bytes - _pinned_bytes())
    return _fit(comm.all_gather_object((socket.gethostname(), need_bytes, available_bytes()), group))


def _pinned_bytes() -> int:
    """Pinned memory that torch caches after earlier copies and reuses."""
    if not torch.cuda.is_available():
        return 0
    stats = torch.cuda.host_memory_stats()
    return int(stats.get("allocated_bytes.current", 0) - stats.get("active_bytes.current", 0))


def _fit(demands: Iterable[tuple[str, int, int]]) -> bool:
    """Whether all hosts have enough memory, from each rank's (host, bytes needed, bytes available)."""
    needs: dict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for host, need, available in demands:
        needs[host] += need
        free[host] = min(available, free.get(host, available))
    return all(needs[host] <= _MEMORY_SHARE * free[host] for host in needs)
