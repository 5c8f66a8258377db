"""Writes a checkpoint: plans the share of each rank, writes it in a thread, and commits.

Ranks agree on the plan in two small collectives. After that, no collective waits for a disk: every rank writes its data
file and then its part of the index; rank 0 waits for these parts, merges them, and writes the manifest.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.planner import SavePlan

from rayrec.checkpoint.errors import DamagedScoresError
from rayrec.checkpoint.index import INDEX, Index, part_file
from rayrec.checkpoint.manifest import MANIFEST, Manifest, sha256
from rayrec.checkpoint.polling import FIRST_POLL_S, LONGEST_POLL_S
from rayrec.checkpoint.rectangles import Rectangles, SavePlanner
from rayrec.checkpoint.writer import SHARE, Item, Throttle, snapshot, write
from rayrec.distributed import comm
from rayrec.storage.folder import Folder
from rayrec.storage.retries import waits_s

NICE = 10  # of a thread that writes during training


@dataclass(frozen=True)
class Work:
    """The tensors that a rank writes.

    Args:
        keys: keys of all ranks' tensors; empty except on rank 0.
    """

    items: list[Item]
    keys: frozenset[str]


def plan_save(state: dict[str, Rectangles], group: comm.Group) -> Work:
    """Plan this rank's work; duplicate rectangles are divided among the ranks that have them. A collective.

    Raises:
        ValueError: the rectangles of all ranks do not cover whole tensors.
    """
    rank = 0 if group is None else group.rank()
    planner = SavePlanner()
    planner.set_up_planner({key: rectangles.to_save() for key, rectangles in state.items()}, is_coordinator=rank == 0)
    plans = comm.all_gather_object(planner.create_local_plan(), group)
    answer: list[SavePlan] | ValueError = []
    keys: frozenset[str] = frozenset()
    if rank == 0:
        try:
            answer, metadata = planner.create_global_plan(plans)
            keys = frozenset(metadata.state_dict_metadata)
        except ValueError as error:
            answer = error
    answer = comm.broadcast_object(answer, group)
    if isinstance(answer, ValueError):
        raise answer
    items = []
    for item in planner.finish_plan(answer[rank]).items:
        assert item.tensor_data is not None
        tensor = planner.lookup_object(item.index)
        items.append(Item(item.index.fqn, tuple(item.tensor_data.size), tuple(item.index.offset or ()), tensor))
    return Work(items, keys)


@dataclass(frozen=True, kw_only=True)
class Save:
    """One rank's share of a save.

    Args:
        folder: folder of the checkpoint.
        work: tensors that this rank writes.
        manifest: manifest without the index's size and checksum, which the commit adds.
        may_commit: raises if another attempt owns the folder.
        committed: called by rank 0 when the checkpoint is complete.
    """

    folder: Folder
    rank: int
    work: Work
    manifest: Manifest
    may_commit: Callable[[], None]
    committed: Callable[[], None]

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
            self.folder.write(part_file(self.rank), index.to_json())
            if self.rank == 0:
                self._commit(throttle)
        except OSError:
            self.may_commit()  # another attempt may have removed these files
            raise
        if self.rank == 0:
            with suppress(OSError, DamagedScoresError):  # a later commit removes old checkpoints as well
                self.committed()

    def _commit(self, throttle: Throttle) -> None:
        ranks = range(self.manifest.world_size)
        self._await_files({part_file(rank) for rank in ranks}, throttle)
        throttle.wait(0.0)
        rank_indexes = [Index.from_json(self.folder.read(part_file(rank)), whole=False) for rank in ranks]
        index = Index.joined(rank_indexes)
        if set(index.tensors) != self.work.keys:
            raise ValueError(f"{self.folder.path}: the ranks wrote other tensors than planned")
        data = index.to_json()
        self.folder.write(INDEX, data)
        for rank in ranks:
            throttle.wait(0.0)
            self.folder.remove(part_file(rank))
        self.may_commit()
        manifest = replace(self.manifest, index_size=len(data), index_sha256=sha256(data))
        self.folder.write(MANIFEST, manifest.to_json())

    def _await_files(self, names: set[str], throttle: Throttle) -> None:
        for wait_s in waits_s(FIRST_POLL_S, LONGEST_POLL_S):
            if names <= set(self.folder.names()):
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

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
