"""Writing one checkpoint: who writes what, in which thread, and the commit.

Ranks agree on the plan in two small exchanges. After that no exchange waits for a disk: every rank writes its data file
and then its part of the index; rank 0 sees the parts appear, joins them, and writes the manifest.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from torch.distributed.checkpoint.planner import SavePlan

from rayrec.checkpoint.errors import DamagedScoresError
from rayrec.checkpoint.index import INDEX, Index, part_file
from rayrec.checkpoint.manifest import MANIFEST, Manifest, sha256
from rayrec.checkpoint.memory import copy_bytes
from rayrec.checkpoint.pace import SHARE, Pace
from rayrec.checkpoint.polling import pauses
from rayrec.checkpoint.rectangles import Rectangles, SavePlanner
from rayrec.checkpoint.writer import Item, snapshot, write
from rayrec.distributed import comm
from rayrec.storage.folder import Folder

NICE = 10  # of the thread that writes beside training


@dataclass(frozen=True)
class Work:
    """What this rank writes, and the keys of what all ranks write (rank 0 knows them)."""

    items: list[Item]
    keys: frozenset[str]


def plan_save(state: dict[str, Rectangles], group: comm.Group) -> Work:
    """The pieces that this rank writes; what several ranks hold is dealt out among them. A collective.

    Raises:
        ValueError: the ranks' pieces do not make whole tensors.
    """
    rank = 0 if group is None else group.rank()
    planner = SavePlanner()
    planner.set_up_planner({key: held.to_save() for key, held in state.items()}, is_coordinator=rank == 0)
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
    mine = planner.finish_plan(answer[rank])
    items = []
    for item in mine.items:
        assert item.tensor_data is not None
        tensor = planner.lookup_object(item.index)
        items.append(Item(item.index.fqn, tuple(item.tensor_data.size), tuple(item.index.offset or ()), tensor))
    return Work(items, keys)


@dataclass(frozen=True, kw_only=True)
class Save:
    """What one rank does for a checkpoint.

    Args:
        folder: of the checkpoint.
        manifest: without the index's size and checksum, which come with the commit.
        work: which pieces.
        may_commit: raises where the folder is another attempt's.
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
        """Host memory that `copied` takes."""
        return copy_bytes(item.tensor for item in self.work.items)

    def copied(self) -> Save:
        """The same from copies in host memory, so that training may go on."""
        return replace(self, work=Work(snapshot(self.work.items), self.work.keys))

    def run(self, pace: Pace) -> None:
        """Write; on rank 0 also wait for the others and commit.

        Raises:
            OSError, CheckpointError: it failed; there is no manifest.
            FencedError: another attempt owns the folder.
            StoppedError: `pace` was stopped.
        """
        try:
            index = write(self.folder, self.rank, self.work.items, pace)
            pace.wait(0.0)
            self.folder.write(part_file(self.rank), index.to_json())
            if self.rank == 0:
                self._commit(pace)
        except OSError:
            self.may_commit()  # another attempt may have removed what this one was writing
            raise
        if self.rank == 0:
            with suppress(OSError, DamagedScoresError):  # what cannot be removed now is removed after a later one
                self.committed()

    def _commit(self, pace: Pace) -> None:
        ranks = range(self.manifest.world_size)
        self._await_parts({part_file(rank) for rank in ranks}, pace)
        pace.wait(0.0)
        parts = [Index.from_json(self.folder.read(part_file(rank)), whole=False) for rank in ranks]
        index = Index.joined(parts)
        if set(index.tensors) != self.work.keys:
            raise ValueError(f"{self.folder.path}: the ranks have written other tensors than were planned")
        data = index.to_json()
        self.folder.write(INDEX, data)
        for rank in ranks:
            pace.wait(0.0)
            self.folder.remove(part_file(rank))
        self.may_commit()
        manifest = replace(self.manifest, index_size=len(data), index_sha256=sha256(data))
        self.folder.write(MANIFEST, manifest.to_json())

    def _await_parts(self, wanted: set[str], pace: Pace) -> None:
        for pause in pauses():
            if wanted <= set(self.folder.names()):
                return
            pace.wait(pause)


class Job:
    """A `Save` in a thread of its own.

    Args:
        beside_training: at a lower priority than the steps.
        shares_cpus: the steps need the CPUs too; only a small part of one is used then.
    """

    def __init__(self, save: Save, beside_training: bool = False, shares_cpus: bool = False) -> None:
        self.step, self.folder = save.manifest.step, save.folder
        self.error: Exception | None = None
        self.reported = False
        self.seconds = 0.0
        self.pace = Pace(SHARE if beside_training and shares_cpus else 1.0)
        self._thread = threading.Thread(
            target=self._run, args=(save, beside_training), name=f"rayrec-save-{self.step}", daemon=True
        )
        self._thread.start()

    def _run(self, save: Save, beside_training: bool) -> None:
        if beside_training:
            with suppress(OSError, AttributeError):  # threads have priorities of their own on Linux only
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        began = time.monotonic()
        try:
            save.run(self.pace)
        except Exception as error:
            self.error = error
        self.seconds = time.monotonic() - began

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def still_s(self) -> float:
        """Seconds for which the storage has taken nothing."""
        return self.pace.still_s if self.running else 0.0

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
