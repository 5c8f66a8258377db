"""The checkpoints of a run: saved now or beside training, found, loaded, thinned out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rayrec.checkpoint import contents
from rayrec.checkpoint.attempt import Attempt, folder_name, order_of
from rayrec.checkpoint.background import Outcome, Underway
from rayrec.checkpoint.committed import Checkpoint, read_checkpoint
from rayrec.checkpoint.errors import Damage, DamagedCheckpointError, no_whole
from rayrec.checkpoint.folder import Folder, open_folder
from rayrec.checkpoint.manifest import MANIFEST, Manifest
from rayrec.checkpoint.mapping import MAPPING, check_mapping
from rayrec.checkpoint.memory import fits_in_memory
from rayrec.checkpoint.polling import on_every_rank
from rayrec.checkpoint.random_state import random_states, room_for, set_random_states
from rayrec.checkpoint.reader import Reader
from rayrec.checkpoint.rectangles import Rectangles
from rayrec.checkpoint.saving import Save, plan_save
from rayrec.checkpoint.scores import Best, best_of, note_scores
from rayrec.checkpoint.update_counts import set_update_counts, update_counts
from rayrec.distributed import DistributedModelParallel, comm

TENSOR = "tensor"


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What is saved beside model and optimizer.

    Args:
        extra: JSON; rank 0's is stored.
        tensors: further ones by name; rank 0's are stored.
        mapping: what maps an id to a row, by feature; `load` refuses others.
    """

    extra: Mapping[str, Any] | None = None
    tensors: Mapping[str, torch.Tensor] | None = None
    mapping: MAPPING | None = None


class CheckpointStore:
    """The checkpoints below a folder: `root/step_00000100-0001/`, on a file system that every rank sees.

    A checkpoint belongs to no plan and no world size: tables and optimizer state are stored as whole tensors in
    pieces, and each rank reads the bytes that it needs. The store that saves owns the folder, as a new attempt, until
    another store saves there.

    Args:
        root: a path, or a URI that pyarrow has a file system for.
        keep: newest checkpoints that stay when one is committed; None: all.
        best: the best by a metric stays too.
    """

    def __init__(self, root: str | Path | Folder, keep: int | None = None, best: Best | None = None) -> None:
        self.root = open_folder(root)
        self._keep, self._best = keep, best
        self._attempt: Attempt | None = None
        self._steps: set[int] = set()  # that this attempt has saved
        self._underway = Underway()

    def save(
        self,
        step: int,
        model: DistributedModelParallel,
        dense_optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        group: comm.Group = None,
        saving: Saving | None = None,
    ) -> Checkpoint:
        """Writes and commits a checkpoint, and waits for it; every rank calls it. Needs memory for one piece.

        Args:
            step: training steps so far.
            extra: JSON; rank 0's is stored. Short for `saving=Saving(extra=...)`.
            group: a CPU (gloo) group of all ranks; None for one process.

        Raises:
            OSError or ValueError, on every rank: it could not be written. Earlier ones are intact.
        """
        self._underway.settle(group)
        self._underway.ended()
        saving = saving or Saving(extra=extra)
        save = self._prepare(step, model, dense_optimizer, saving, group)
        self._underway.start(save)
        self._underway.settle(group)
        (outcome,) = self._underway.ended()
        if outcome.error is not None:
            raise outcome.error
        name = folder_name(step, save.manifest.attempt)
        checkpoint = comm.broadcast_object(self._read(name) if _is_first(group) else None, group)
        assert checkpoint is not None
        return checkpoint

    def save_beside(
        self,
        step: int,
        model: DistributedModelParallel,
        dense_optimizer: torch.optim.Optimizer | None,
        saving: Saving,
        group: comm.Group,
        patience_s: float = 30.0,
    ) -> bool:
        """As `save`, but returns when what this rank saves is copied to host memory; a thread writes it.

        The copy is as large as this rank's share of the state, and is held until it is written. Where a host has no
        room for its ranks' copies, training waits for the write instead. `ended` returns the outcome; a failure costs
        this checkpoint only.

        Args:
            patience_s: seconds to wait for the one before to be written.

        Returns:
            Whether it was begun: not if the one before is still being written.

        Raises:
            FencedError: on every rank, where another attempt has taken the folder over.
        """
        if not self._underway.settle(group, patience_s):
            return False
        save = self._prepare(step, model, dense_optimizer, saving, group)
        copied = fits_in_memory(save.nbytes, group)
        self._underway.start(save.copied() if copied else save, copied, shares_cpus=model.device.type == "cpu")
        if not copied:
            self._underway.settle(group)
        return True

    def finish(self, group: comm.Group = None) -> None:
        """Wait for a save beside training; every rank calls it. `ended` returns the outcome."""
        self._underway.settle(group)

    def ended(self) -> list[Outcome]:
        """Background saves that ended since the last call; rank 0 knows when one is complete."""
        return self._underway.ended()

    def close(self, seconds: float) -> None:
        """Give a save beside training some time to end; exchanges nothing."""
        self._underway.close(seconds)

    def _prepare(
        self,
        step: int,
        model: DistributedModelParallel,
        dense_optimizer: torch.optim.Optimizer | None,
        saving: Saving,
        group: comm.Group,
    ) -> Save:
        """What this rank has to write, its tensors as they stand in the model; a collective."""
        attempt = self._claim(step, group)
        rank, error, state = 0 if group is None else group.rank(), None, {}
        try:
            state = contents.to_save(model, dense_optimizer)
        except ValueError as caught:
            error = caught
        further = {f"{TENSOR}/{name}": tensor for name, tensor in (saving.tensors or {}).items()} if rank == 0 else {}
        for key, tensor in {**random_states(rank, model.device), **further}.items():
            state[key] = Rectangles.whole(tensor)
        facts = comm.all_gather_object((update_counts(model), error), group)
        for _, error in facts:
            if error is not None:
                raise error
        updates: dict[str, int] = {}
        for counts, _ in facts:
            updates |= {name: max(count, updates.get(name, 0)) for name, count in counts.items()}
        manifest = Manifest(
            step=step,
            attempt=attempt.number,
            time=time.time(),
            world_size=len(facts),
            iteration=max(updates.values(), default=0),
            updates=updates,
            plan=model.plan.to_dict(),
            mapping=None if saving.mapping is None else {name: dict(of) for name, of in saving.mapping.items()},
            extra=dict(saving.extra or {}),
        )
        return Save(
            folder=self.root.sub(folder_name(step, attempt.number)),
            rank=rank,
            work=plan_save(state, group),
            manifest=manifest,
            may_commit=lambda: attempt.check(self.root),
            committed=lambda: None if self._keep is None else self.prune(self._keep),
        )

    def _claim(self, step: int, group: comm.Group) -> Attempt:
        """Claims the folder, again if this step was saved before, so that no saved bytes are overwritten."""
        if self._attempt is None or step in self._steps:
            claimed = on_every_rank(lambda: self._take_over() if _is_first(group) else None, group)
            self._attempt = comm.broadcast_object(claimed, group)
            self._steps = set()
        assert self._attempt is not None
        self._steps.add(step)
        return self._attempt

    def _take_over(self) -> Attempt:
        """Claim the folder, and remove what earlier attempts left unfinished: it may be what fills the disk."""
        attempt = Attempt.claim(self.root)
        for name in self._names():
            if MANIFEST not in self.root.sub(name).names():
                self.root.sub(name).remove_all()
        return attempt

    def listing(self) -> tuple[list[Checkpoint], list[DamagedCheckpointError]]:
        """Committed checkpoints, the oldest first, and those whose manifest is damaged.

        A folder without a manifest is no checkpoint; any other error is one.

        Raises:
            OSError: the folder or a manifest cannot be read.
        """
        whole, damaged = [], []
        for name in self._names():
            try:
                checkpoint = self._read(name)
            except DamagedCheckpointError as error:
                damaged.append(error)
                continue
            if checkpoint is not None:
                whole.append(checkpoint)
        return whole, damaged

    def all(self) -> list[Checkpoint]:
        """Committed checkpoints with a readable manifest, the oldest first.

        Raises:
            OSError: as `listing`.
        """
        return self.listing()[0]

    def candidates(self) -> tuple[list[Checkpoint], list[DamagedCheckpointError]]:
        """Checkpoints to go on from, the newest first, and those whose manifest is damaged.

        Raises:
            NoWholeCheckpointError: there are some, but all manifests are damaged.
            OSError: as `listing`.
        """
        whole, damaged = self.listing()
        if damaged and not whole:
            raise no_whole(self.root.path, damaged)
        return whole[::-1], damaged

    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint; None where nothing was ever committed.

        Raises:
            NoWholeCheckpointError, OSError: as `candidates`.
        """
        return next(iter(self.candidates()[0]), None)

    def load(
        self,
        checkpoint: Checkpoint,
        model: DistributedModelParallel,
        dense_optimizer: torch.optim.Optimizer | None = None,
        group: comm.Group = None,
        mapping: MAPPING | None = None,
    ) -> dict[str, torch.Tensor]:
        """Fills model and optimizer, whatever their plan and world size; every rank calls it.

        In a world as large as the writers', random numbers go on where they were.

        Returns:
            The further tensors that were saved, on every rank.

        Raises:
            ValueError: the checkpoint does not fit the model or its mapping of ids; names the table or parameter.
            DamagedCheckpointError: file, tensor and rows that are not what was written. Another may be loaded then.
            OSError: it cannot be read.
        """
        check_mapping(checkpoint.path, checkpoint.manifest.mapping, mapping)
        rank, world = (0, 1) if group is None else (group.rank(), group.size())
        further: dict[str, torch.Tensor] = {}
        random: dict[str, torch.Tensor] = {}

        def read() -> None:
            with self.reader(checkpoint) as reader:
                saved = reader.index.metadata().state_dict_metadata
                loading = contents.Loading(model, dense_optimizer, saved)
                random.update(room_for(rank, saved) if checkpoint.manifest.world_size == world else {})
                for key in saved:
                    if key.startswith(f"{TENSOR}/"):
                        further[key.removeprefix(f"{TENSOR}/")] = reader.tensor(key)
                reader.fill({**loading.state, **{key: Rectangles.whole(room) for key, room in random.items()}})
                loading.finish()

        on_every_rank(read, group)
        set_update_counts(model, checkpoint.manifest)
        set_random_states(random, model.device)
        return further

    def reader(self, checkpoint: Checkpoint) -> Reader:
        """To read a checkpoint's tensors one by one, or to verify them."""
        return Reader(self.root.sub(checkpoint.name), checkpoint.manifest)

    def damages(self, checkpoint: Checkpoint) -> list[Damage]:
        """Every place of a checkpoint that is not what was written; reads all of it.

        Raises:
            OSError: it cannot be read.
        """
        try:
            with self.reader(checkpoint) as reader:
                return list(reader.damages())
        except DamagedCheckpointError as error:
            return list(error.damages)

    def note_scores(self, checkpoint_step: int, scores: Mapping[str, Any]) -> None:
        """How good this attempt's checkpoint of a step is; rank 0 calls it, and it may be what makes another go."""
        if self._attempt is not None:
            note_scores(self.root, folder_name(checkpoint_step, self._attempt.number), scores)
            if self._keep is not None and not self._underway.running:
                self.prune(self._keep)

    def best(self, best: Best) -> Checkpoint | None:
        """The best committed checkpoint by a metric; None where none was scored."""
        whole = {checkpoint.name: checkpoint for checkpoint in self.all()}
        name = best_of(self.root, whole, best)
        return None if name is None else whole[name]

    def prune(self, keep: int) -> None:
        """Removes all but the `keep` newest committed checkpoints and the best, and older folders that are none.

        Only one process of a run may call this, and not while another saves.

        Raises:
            FencedError: another attempt has taken the folder over.
        """
        if self._attempt is not None:
            self._attempt.check(self.root)
        names = self._names()
        committed = [name for name in names if MANIFEST in self.root.sub(name).names()]
        kept = set(committed[-max(keep, 1) :])
        if self._best is not None:
            kept.add(best_of(self.root, committed, self._best) or "")
        newest = order_of(committed[-1]) if committed else None
        for name in names:
            order = order_of(name)
            if name not in kept and newest is not None and order is not None and order <= newest:
                self.root.sub(name).remove(MANIFEST)  # no longer a checkpoint, even if removal is cut short
                self.root.sub(name).remove_all()

    def _names(self) -> list[str]:
        """Folders of checkpoints, complete or not, the oldest first."""
        found = [(order, name) for name in self.root.names() if (order := order_of(name))]
        return [name for _, name in sorted(found)]

    def _read(self, name: str) -> Checkpoint | None:
        return read_checkpoint(self.root.sub(name))


def _is_first(group: comm.Group) -> bool:
    return group is None or group.rank() == 0
