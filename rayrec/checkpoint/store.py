"""The checkpoints of a run: saved now or beside training, found, loaded, thinned out."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rayrec.checkpoint import contents
from rayrec.checkpoint.attempt import Attempt, folder_name
from rayrec.checkpoint.background import Outcome, Underway
from rayrec.checkpoint.contents import random_states, room_for, set_random_states, set_update_counts, update_counts
from rayrec.checkpoint.errors import Damage, DamagedCheckpointError, no_whole
from rayrec.checkpoint.launch import Launch
from rayrec.checkpoint.manifest import Checkpoint, Manifest, read_checkpoint
from rayrec.checkpoint.mapping import MAPPING, check_mapping
from rayrec.checkpoint.memory import fits_in_memory
from rayrec.checkpoint.polling import on_every_rank
from rayrec.checkpoint.reader import Reader
from rayrec.checkpoint.rectangles import Rectangles
from rayrec.checkpoint.retention import Best, checkpoint_names, note_scores, remove_unfinished, thin_out
from rayrec.checkpoint.saving import Save, plan_save
from rayrec.distributed import DistributedModelParallel, comm
from rayrec.storage.folder import Folder, open_folder

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
        still_s: a save that is waited for fails when its storage has taken nothing for so many seconds.
        launch: that holds the folder, if the run has a driver; no other may take it over.
    """

    def __init__(
        self,
        root: str | Path | Folder,
        keep: int | None = None,
        best: Best | None = None,
        still_s: float = math.inf,
        launch: Launch | None = None,
    ) -> None:
        self.root = open_folder(root)
        self._keep, self._best, self._still_s, self._launch = keep, best, still_s, launch
        self._attempt: Attempt | None = None
        self._steps: set[int] = set()  # that this attempt has saved
        self._loaded: Checkpoint | None = None
        self.copied = True  # whether the last save beside training was from copies
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
        self.finish(group)
        self._underway.ended()
        saving = saving or Saving(extra=extra)
        save = self._prepare(step, model, dense_optimizer, saving, group)
        self._underway.start(save)
        self.finish(group)
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
            patience_s: seconds that training waits for one save to be written, over all calls.

        Returns:
            Whether it was begun: not if the one before is still being written.

        Raises:
            FencedError: on every rank, where another attempt has taken the folder over.
        """
        if not self._underway.settle(group, patience_s):
            return False
        save = self._prepare(step, model, dense_optimizer, saving, group)
        self.copied = fits_in_memory(save.copy_bytes, group)
        work = save.copied() if self.copied else save
        self._underway.start(work, self.copied, shares_cpus=model.device.type == "cpu")
        if not self.copied:
            self.finish(group)
        return True

    def finish(self, group: comm.Group = None) -> None:
        """Wait for a save that is under way; every rank calls it. `ended` returns the outcome.

        Raises:
            TimeoutError, on every rank: the storage has taken nothing for `still_s`.
        """
        if not self._underway.settle(group, still_s=self._still_s):
            text = f"the storage has taken nothing of a checkpoint for {self._still_s:g} s"
            raise TimeoutError(errno.ETIMEDOUT, text, self.root.path)

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
        attempt = self._claim_step(step, group)
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

    def claim(self, group: comm.Group = None) -> Attempt:
        """Own the folder, as a new attempt, from now on; every rank calls it. `save` does it where it was not done.

        Raises:
            TakenOverError: another launch holds it.
            OSError: it cannot be read or written.
        """
        claimed = on_every_rank(lambda: self._take_over() if _is_first(group) else None, group)
        attempt = comm.broadcast_object(claimed, group)
        assert attempt is not None
        self._attempt, self._steps = attempt, set()
        return attempt

    def _claim_step(self, step: int, group: comm.Group) -> Attempt:
        """Claims the folder again if this step was saved before, so that no saved bytes are overwritten."""
        attempt = self._attempt
        if attempt is None or step in self._steps:
            attempt = self.claim(group)
        self._steps.add(step)
        return attempt

    def _take_over(self) -> Attempt:
        attempt = Attempt.claim(self.root, self._launch)
        remove_unfinished(self.root)
        return attempt

    def listing(self) -> tuple[list[Checkpoint], list[DamagedCheckpointError]]:
        """Committed checkpoints, the oldest first, and those whose manifest is damaged.

        A folder without a manifest is no checkpoint; any other error is one.

        Raises:
            OSError: the folder or a manifest cannot be read.
        """
        whole, damaged = [], []
        for name in checkpoint_names(self.root):
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
            RemovedCheckpointError: it is no longer there.
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
        self._loaded = checkpoint
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

    def note_scores(self, step: int, scores: Mapping[str, Any]) -> bool:
        """How good the checkpoint of a step is, which was saved or loaded; rank 0 calls it, and another may go for it.

        Returns:
            Whether there is one.
        """
        if self._attempt is not None and step in self._steps:
            name = folder_name(step, self._attempt.number)
        elif self._loaded is not None and self._loaded.step == step:
            name = self._loaded.name
        else:
            return False
        note_scores(self.root, name, scores)
        if self._keep is not None and not self._underway.running:
            self.prune(self._keep)
        return True

    def prune(self, keep: int) -> None:
        """Removes all but the `keep` newest committed checkpoints and the best, and older folders that are none.

        Only one process of a run may call this, and not while another saves.

        Raises:
            FencedError: another attempt has taken the folder over.
            OSError, DamagedScoresError: as `thin_out`.
        """
        if self._attempt is not None:
            self._attempt.check(self.root)
        thin_out(self.root, keep, self._best)

    def _read(self, name: str) -> Checkpoint | None:
        return read_checkpoint(self.root.sub(name))


def _is_first(group: comm.Group) -> bool:
    return group is None or group.rank() == 0
