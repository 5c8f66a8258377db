"""Writes a checkpoint: writes the share of each rank in a thread, commits, and waits for the outcome.

No collective waits for a disk: every rank writes its data file and then its part of the index; rank 0 waits for these
parts, merges them, and writes the manifest.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from rayrec._runtime.cgroup_limits import available_bytes
from rayrec.checkpoint import ownership
from rayrec.checkpoint.errors import DamagedScoresError, FencedError
from rayrec.checkpoint.format import INDEX, PARTS, Index, part_file, without_rows
from rayrec.checkpoint.manifest import MANIFEST, Manifest, sha256
from rayrec.checkpoint.polling import FIRST_POLL_S, LONGEST_POLL_S, deadline, on_every_rank
from rayrec.checkpoint.save_plan import Work
from rayrec.checkpoint.writer import SHARE, StoppedError, Throttle, snapshot, write
from rayrec.distributed import comm
from rayrec.storage.folder import Folder
from rayrec.storage.parallel import in_threads
from rayrec.storage.retries import waits_s

NICE = 10  # of a thread that writes during training
REMOVAL_S = 5.0  # time limit for removing the files of a failed save
_CLOSING_POLL_S = 0.1
_READERS = 32  # threads; pyarrow has 25 connections to an object store
_LEAST_WAIT_S = 2.0  # for files of ranks of which one has died
_MEMORY_SHARE = 0.8  # of the free memory; leaves the rest to the page cache and training


@dataclass(frozen=True, kw_only=True)
class Save:
    """One rank's share of a save.

    Args:
        folder: folder of the checkpoint.
        work: tensors that this rank writes.
        manifest: manifest without the index's size and checksum, which the commit adds.
        may_commit: raises if another attempt owns the folder.
        committed: called by rank 0, with the written manifest, when the checkpoint is complete.
    """

    folder: Folder
    rank: int
    work: Work
    manifest: Manifest
    may_commit: Callable[[], None]
    committed: Callable[[Manifest], None]

    @property
    def _parts(self) -> Folder:
        """The ranks' parts of the index. A folder of their own, which an object store removes in a few requests."""
        return self.folder.sub(PARTS)

    @property
    def copy_bytes(self) -> int:
        """Host memory that `copied` needs."""
        return copy_bytes(item.tensor for item in self.work.items)

    def copied(self) -> Save:
        """The same save from copies in host memory, so that training can continue."""
        return replace(self, work=Work(snapshot(self.work.items), self.work.keys))

    def run(self, throttle: Throttle) -> None:
        """Write this rank's share; rank 0 also waits for the other ranks and commits.

        Raises:
            OSError, CheckpointError: the save failed, without a manifest.
            FencedError: another attempt owns the folder.
            StoppedError: the throttle was stopped.
        """
        try:
            index = write(self.folder, self.rank, self.work.items, throttle)
            throttle.wait(0.0)
            self._parts.write(part_file(self.rank), index.to_json())
            written = self._commit(throttle) if self.rank == 0 else None
        except OSError:
            self.may_commit()  # another attempt may have removed these files
            raise
        if written is not None:
            with suppress(OSError, DamagedScoresError):  # a later commit removes old checkpoints as well
                self.committed(written)

    def _commit(self, throttle: Throttle) -> Manifest:
        names = [part_file(rank) for rank in range(self.manifest.world_size)]
        self._await_files(set(names), throttle)
        rank_indexes = []
        # An object store takes about as long for one file as for many at a time.
        for data in in_threads(self._parts.read, names, _READERS):
            throttle.wait(0.0)
            rank_indexes.append(Index.from_json(data, whole=False))
        index = Index.joined(rank_indexes)
        if without_rows(index.tensors) != self.work.keys:
            raise ValueError(f"{self.folder.path}: the ranks wrote other tensors than planned")
        data = index.to_json()
        self.folder.write(INDEX, data)
        throttle.wait(0.0)
        self._parts.remove_all()
        self.may_commit()
        manifest = replace(self.manifest, index_size=len(data), index_sha256=sha256(data))
        self.folder.write(MANIFEST, manifest.to_json())
        return manifest

    def _await_files(self, names: set[str], throttle: Throttle) -> None:
        throttle.awaited_since = time.monotonic()
        for wait_s in waits_s(FIRST_POLL_S, LONGEST_POLL_S):
            throttle.awaited = frozenset(names.difference(self._parts.names()))
            if not throttle.awaited:
                return
            throttle.wait(wait_s)


def copy_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Host memory that copies of tensors need; torch rounds pinned memory up to powers of two."""
    return sum(1 << (t.nbytes - 1).bit_length() if t.is_cuda and t.nbytes else t.nbytes for t in tensors)


class SaveThread:
    """Runs a `Save` in a thread.

    Args:
        during_training: run at a lower priority than the training steps.
        shares_cpus: the steps use the CPUs too, so limit the thread to a small share of one CPU.
    """

    def __init__(self, save: Save, during_training: bool = False, shares_cpus: bool = False) -> None:
        self.step, self.folder = save.manifest.step, save.folder
        self.error: Exception | None = None
        self.reported = False
        self.seconds = 0.0
        self._began = time.monotonic()
        self.throttle = Throttle(SHARE if during_training and shares_cpus else 1.0)
        self._thread = threading.Thread(
            target=self._run, args=(save, during_training), name=f"rayrec-save-{self.step}", daemon=True
        )
        self._thread.start()

    def _run(self, save: Save, during_training: bool) -> None:
        if during_training:
            with suppress(OSError, AttributeError):  # only Linux has thread priorities
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        start = time.monotonic()
        try:
            save.run(self.throttle)
        except Exception as error:
            self.error = error
        self.seconds = time.monotonic() - start

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def stalled_s(self) -> float:
        """Seconds for which the storage has made no progress."""
        return self.throttle.stalled_s if self.running else 0.0

    def fail_if_parts_are_missing(self) -> None:
        """End the save of rank 0 if the other ranks ended theirs and their files do not appear: they are elsewhere."""
        throttle = self.throttle
        if throttle.awaited and time.monotonic() - throttle.awaited_since > ownership.SHOWN_WITHIN_S:
            files = ", ".join([*sorted(throttle.awaited)[:3], *(["…"] if len(throttle.awaited) > 3 else [])])
            throttle.stop(
                TimeoutError(
                    f"{self.folder.path}: files that other ranks have written ({files}) do not appear on node "
                    f"{socket.gethostname()}; check that storage.path is mounted on every node"
                )
            )

    @property
    def waits_in_vain(self) -> bool:
        """Whether the files of other ranks, of which one has died, are overdue.

        All ranks write about equally much, so the others need about as long as this one.
        """
        throttle = self.throttle
        if not throttle.awaited:
            return False
        own_s = throttle.awaited_since - self._began
        return time.monotonic() - throttle.awaited_since > max(_LEAST_WAIT_S, own_s)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)


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
    """What is true of some rank's share of a save; `late` is rank 0's, by whose clock all ranks decide."""

    running: bool
    others_running: bool  # of ranks other than 0
    failed: bool
    late: bool
    stalled: bool

    def of_all(self, group: comm.Group) -> _State:
        """The state of all ranks. A collective."""
        flags = comm.combine(torch.tensor(self, dtype=torch.uint8), group, lambda states: states.amax(0))
        return _State(*map(bool, flags.tolist()))


class BackgroundSave:
    """This rank's share of a background save; at most one at a time."""

    def __init__(self) -> None:
        self._thread: SaveThread | None = None
        self._waited_s = 0.0  # of this save
        self._ended: list[Outcome] = []
        self.failed = False  # whether the last save for which all ranks waited to its end has failed

    def start(self, save: Save, during_training: bool = False, shares_cpus: bool = False) -> None:
        """Start a save; see `SaveThread`."""
        assert self._thread is None
        self._waited_s = 0.0
        self._thread = SaveThread(save, during_training, shares_cpus)

    def wait(
        self, group: comm.Group, patience_s: float = math.inf, stall_s: float = math.inf, hurry: bool = True
    ) -> bool:
        """Wait until all ranks have ended their share of the save, and remove the files of a failed save. A collective.

        Args:
            patience_s: total seconds to wait for one save, over all calls.
            stall_s: seconds to wait for a rank without storage progress.
            hurry: whether the save may use all of the CPU from now on.

        Returns:
            False if some rank is still writing after that time.

        Raises:
            FencedError: on every rank, if another attempt has taken over the run.
        """
        start = time.monotonic()
        late = deadline(patience_s - self._waited_s)
        thread, first = self._thread, is_rank_0(group)
        if thread is not None and hurry:
            thread.throttle.release()
        for wait_s in waits_s(FIRST_POLL_S, LONGEST_POLL_S):
            state = _State(False, False, False, first and late(), False)
            if thread is not None:
                stalled = min(thread.stalled_s, time.monotonic() - start) >= stall_s
                running = thread.running
                state = _State(running, running and not first, thread.error is not None, state.late, stalled)
            state = state.of_all(group)
            if thread is not None and state.failed:
                thread.throttle.stop()
            if not state.running:
                break
            if thread is not None and not state.others_running:
                thread.fail_if_parts_are_missing()
            if state.late or state.stalled:
                self._waited_s += time.monotonic() - start
                return False
            time.sleep(0) if thread is None else thread.join(wait_s)
        self._thread = None
        if thread is not None:
            self.failed = state.failed
            by_rank = comm.all_gather_object(thread.error, group) if state.failed else []
            self._finish(thread, [error for error in by_rank if error is not None], group)
        return True

    def _finish(self, thread: SaveThread, errors: list[Exception], group: comm.Group) -> None:
        causes = [error for error in errors if not isinstance(error, StoppedError)] or errors
        fenced = next((error for error in causes if isinstance(error, FencedError)), None)
        error = fenced or (causes[0] if causes else None)
        self._add_outcome(thread, error)
        if error is not None and fenced is None:
            on_every_rank(lambda: _remove_in_background(thread) if is_rank_0(group) else None, group)
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

    def close(self, seconds: float, lost_peer: bool = False) -> None:
        """Wait up to `seconds` for the save, then abandon it. Not a collective.

        Args:
            lost_peer: a rank has died; do not wait for its files.
        """
        thread, late = self._thread, deadline(seconds)
        if thread is None:
            return
        thread.throttle.release()
        while thread.running and not late() and not (lost_peer and thread.waits_in_vain):
            thread.join(min(seconds, _CLOSING_POLL_S))
        thread.throttle.stop()


def is_rank_0(group: comm.Group) -> bool:
    return group is None or group.rank() == 0


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
    rank, world_size = (0, 1) if group is None else (group.rank(), group.size())
    host = hashlib.blake2b(socket.gethostname().encode(), digest_size=7).digest()
    demands = torch.zeros(world_size, 3, dtype=torch.int64)  # each rank adds its row
    need_bytes = max(0, need_bytes - _pinned_bytes())
    demands[rank] = torch.tensor([int.from_bytes(host), need_bytes, available_bytes()])
    return _fit(comm.combine(demands.flatten(), group, lambda parts: parts.sum(0)).view_as(demands).tolist())


def _pinned_bytes() -> int:
    """Pinned memory that torch caches after earlier copies and reuses."""
    if not torch.cuda.is_available():
        return 0
    stats = torch.cuda.host_memory_stats()
    return int(stats.get("allocated_bytes.current", 0) - stats.get("active_bytes.current", 0))


def _fit(demands: Iterable[Sequence[int]]) -> bool:
    """Whether all hosts have enough memory, from each rank's (host, bytes needed, bytes available)."""
    needs: dict[int, int] = defaultdict(int)
    free: dict[int, int] = {}
    for host, need, available in demands:
        needs[host] += need
        free[host] = min(available, free.get(host, available))
    return all(needs[host] <= _MEMORY_SHARE * free[host] for host in needs)
