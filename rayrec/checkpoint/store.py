"""The checkpoints of a run: saves (now or in the background), lists, loads and prunes them."""

from __future__ import annotations

import errno
import json
import math
import socket
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch

from rayrec._runtime.ranks import ranks_text
from rayrec.checkpoint import contents
from rayrec.checkpoint.contents import (
    empty_random_states,
    random_states,
    set_random_states,
    set_update_counts,
    update_counts,
)
from rayrec.checkpoint.errors import Damage, DamagedCheckpointError, NotSharedError, no_whole
from rayrec.checkpoint.format import SavedTensor
from rayrec.checkpoint.increments import (
    LARGEST_SHARE,
    LONGEST,
    AnyReader,
    Chain,
    RowSet,
    Tip,
    open_reader,
    row_items,
    split,
    take_sparse,
)
from rayrec.checkpoint.manifest import Checkpoint, IdMapping, Manifest, check_mapping, read_checkpoint
from rayrec.checkpoint.ownership import Attempt, Launch, base_of, folder_name, increment_name
from rayrec.checkpoint.polling import on_every_rank
from rayrec.checkpoint.rectangles import Rectangles
from rayrec.checkpoint.retention import Best, best_of, checkpoint_names, note_scores, remove_old, remove_unfinished
from rayrec.checkpoint.save_plan import SavePlan, Work, items_of
from rayrec.checkpoint.saving import BackgroundSave, Outcome, Save, fits_in_memory, is_rank_0
from rayrec.checkpoint.writer import Item, snapshot
from rayrec.distributed import DistributedModelParallel, ShardingPlan, comm
from rayrec.storage.folder import Folder, open_folder

TENSOR = "tensor"
Listing = tuple[list[Checkpoint], list[DamagedCheckpointError]]


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Contents of a checkpoint besides model and optimizer.

    Args:
        extra: JSON; rank 0's is stored.
        tensors: additional tensors by name; rank 0's are stored.
        mapping: rule that maps ids to rows, by feature; `load` refuses another mapping.
        maps: state of the maps of tables with dynamic ids, by key.
        changed: for increments, live marks of what changed in the rows of `maps`, by key.
    """

    extra: Mapping[str, Any] | None = None
    tensors: Mapping[str, torch.Tensor] | None = None
    mapping: IdMapping | None = None
    maps: Mapping[str, Rectangles] = field(default_factory=dict)
    changed: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Started(Enum):
    """What `CheckpointStore.save_increment` did."""

    STARTED = auto()  # the increment is written, or being written
    NOTHING = auto()  # an earlier save is still being written, or the step has a checkpoint
    FULL_IS_DUE = auto()  # nothing; save a full checkpoint


class CheckpointStore:
    """The checkpoints in a folder, as `root/step_00000100-0001/`, on a file system that every rank sees.

    A checkpoint is independent of the plan and the world size: it stores tables and optimizer state as whole tensors,
    in rectangles, and each rank reads the bytes that it needs. The store that saves owns the folder, as a new attempt,
    until another store saves there.

    Args:
        root: a path, or a URI of a file system that pyarrow supports.
        keep: number of newest checkpoints to keep after a commit; None: all.
        best: also keep the best checkpoints by this metric.
        stall_s: `finish` fails when the storage has made no progress for this many seconds.
        launch: launch of the run's driver, if any; other launches may not take over the folder.
    """

    def __init__(
        self,
        root: str | Path | Folder,
        keep: int | None = None,
        best: Best | None = None,
        stall_s: float = math.inf,
        launch: Launch | None = None,
    ) -> None:
        self.root = open_folder(root)
        self._keep, self._best, self._stall_s, self._launch = keep, best, stall_s, launch
        self._attempt: Attempt | None = None
        self._steps: set[int] = set()  # that this attempt has saved
        self._held: frozenset[str] = frozenset()  # a thread that commits a checkpoint reads it, so it is replaced whole
        self._loaded: Checkpoint | None = None
        # Stays until this store has saved a full one: newer ones may be damaged, and increments go on from it.
        self._resumed: str | None = None
        self.copied = True  # whether the last save during training was from copies
        self._background = BackgroundSave()
        self._save_plan = SavePlan()
        self._written_plan: tuple[ShardingPlan, dict[str, Any]] | None = None  # the model's plan, for the manifest
        self._tracks = False  # whether the model marks its changes
        self._tip: Tip | None = None  # of the chain that increments go on with
        self._tip_sha256 = ""  # of its index, on rank 0
        self._pending: Tip | None = None  # the tip when the save that is being written is complete
        self._pending_sha256 = ""
        self._cleared: list[RowSet] = []  # by that save
        self._increment_plan = SavePlan()  # of what increments have whole

    def save(
        self,
        step: int,
        model: DistributedModelParallel,
        dense_optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        group: comm.Group = None,
        saving: Saving | None = None,
    ) -> Checkpoint:
        """Write and commit a checkpoint, and wait for it. A collective. Copies one block at a time.

        Args:
            step: training steps so far.
            extra: shorthand for `saving=Saving(extra=...)`.
            group: a CPU (gloo) group of all ranks; None for one process.

        Raises:
            OSError or ValueError, on every rank: the checkpoint could not be written. Earlier checkpoints are intact.
        """
        self.finish(group)
        self._background.ended()
        saving = saving or Saving(extra=extra)
        save = self._prepare_full(step, model, dense_optimizer, saving, group)
        self._background.start(save)
        self.finish(group)
        (outcome,) = self._background.ended()
        if outcome.error is not None:
            raise outcome.error
        name = folder_name(step, save.manifest.attempt)
        checkpoint = comm.broadcast_object(self._read(name) if is_rank_0(group) else None, group)
        assert checkpoint is not None
        return checkpoint

    def save_in_background(
        self,
        step: int,
        model: DistributedModelParallel,
        dense_optimizer: torch.optim.Optimizer | None,
        saving: Saving,
        group: comm.Group,
        patience_s: float = 30.0,
    ) -> bool:
        """Like `save`, but returns after this rank's state is copied to host memory; a thread writes the copy.

        The copy has the size of this rank's share of the state, and is freed after the write. If a host has no memory
        for the copies of its ranks, training waits for the write instead. `ended` returns the outcome. A failure does
        not end training.

        Args:
            patience_s: total seconds to wait for an earlier save, over all calls.

        Returns:
            Whether the save was started; False if an earlier one is still being written.

        Raises:
            FencedError: on every rank, if another attempt has taken over the folder.
        """
        if not self._background.wait(group, patience_s):
            return False
        self._settle()
        save = self._prepare_full(step, model, dense_optimizer, saving, group)
        self.copied = fits_in_memory(save.copy_bytes, group)
        work = save.copied() if self.copied else save
        self._background.start(work, self.copied, shares_cpus=model.device.type == "cpu")
        if not self.copied:
            self.finish(group)
        return True

    def finish(self, group: comm.Group = None) -> None:
        """Wait for the background save, if any. A collective. `ended` returns the outcome.

        Raises:
            TimeoutError, on every rank: the storage has made no progress for `stall_s`.
        """
        if not self._background.wait(group, stall_s=self._stall_s):
            text = f"the storage has accepted no data of a checkpoint for {self._stall_s:g} s"
            raise TimeoutError(errno.ETIMEDOUT, text, self.root.path)
        self._settle()

    def track_changes(self, model: DistributedModelParallel) -> None:
        """Make a model mark the rows that change, which `save_increment` needs. Call it before training and `load`.

        Raises:
            ValueError: the model has several sharding groups.
        """
        model.track_changes()
        self._tracks = True

    def save_increment(
        self,
        step: int,
        model: DistributedModelParallel,
        dense_optimizer: torch.optim.Optimizer | None,
        saving: Saving,
        group: comm.Group = None,
        background: bool = True,
    ) -> Started:
        """Save what changed since the last checkpoint or increment. A collective.

        This rank's changed rows are copied to host memory; a thread writes them, as in `save_in_background`. Without
        an earlier checkpoint of this store to go on from, or after as many bytes of increments as half a full
        checkpoint, a full one is due. Never waits for an earlier save: the next increment has its changes as well.

        Args:
            background: whether to return before the increment is written.

        Raises:
            FencedError: on every rank, if another attempt has taken over the folder.
        """
        if not self._background.wait(group, patience_s=0.0, hurry=False):
            return Started.NOTHING
        self._settle()
        tip = self._tip
        if tip is None or not self._tracks or tip.sequence >= LONGEST:
            return Started.FULL_IS_DUE
        if tip.step == step:
            return Started.NOTHING
        save = self._prepare(step, model, dense_optimizer, saving, group, tip)
        if save is None:
            return Started.FULL_IS_DUE
        self._background.start(save, during_training=background, shares_cpus=model.device.type == "cpu")
        if not background:
            self.finish(group)
        return Started.STARTED

    def _settle(self) -> None:
        """Note the outcome of the last save, for which all ranks have waited. If it failed, its changes are still to
        be saved."""
        if self._background.failed:
            for rows in self._cleared:
                rows.put_back()
        elif self._pending is not None:
            self._tip, self._tip_sha256 = self._pending, self._pending_sha256
        self._pending, self._cleared = None, []

    def ended(self) -> list[Outcome]:
        """Outcomes of background saves that ended since the last call. Only rank 0 knows whether a save is complete."""
        return self._background.ended()

    def close(self, seconds: float, lost_peer: bool = False) -> None:
        """Wait up to `seconds` for a background save. Not a collective.

        Args:
            lost_peer: a rank has died; do not wait for its files.
        """
        self._background.close(seconds, lost_peer)

    def _prepare_full(
        self,
        step: int,
        model: DistributedModelParallel,
        dense_optimizer: torch.optim.Optimizer | None,
        saving: Saving,
        group: comm.Group,
    ) -> Save:
        """Plan this rank's share of a full save, without copying tensors. A collective."""
        save = self._prepare(step, model, dense_optimizer, saving, group)
        assert save is not None
        return save

    def _prepare(
        self,
        step: int,
        model: DistributedModelParallel,
        dense_optimizer: torch.optim.Optimizer | None,
        saving: Saving,
        group: comm.Group,
        tip: Tip | None = None,
    ) -> Save | None:
        """Plan this rank's share of a save. A collective.

        Args:
            tip: the changes since it are saved, and copied; None: all state is saved, and not copied.

        Returns:
            None, on every rank, if a full checkpoint is due instead of an increment.
        """
        attempt = self._claim_step(step, group) if tip is None else self._attempt or self.claim(group)
        rank, world_size = (0, 1) if group is None else (group.rank(), group.size())
        error, state, sets, sparse = None, {}, list[RowSet](), list[Item]()
        try:
            state = contents.to_save(model, dense_optimizer)
        except ValueError as caught:
            error = caught
        tensors = random_states(rank, model.device)
        if rank == 0:
            tensors |= {f"{TENSOR}/{name}": tensor for name, tensor in (saving.tensors or {}).items()}
        for key, tensor in tensors.items():
            state[key] = Rectangles.whole(tensor)
        state |= {f"{contents.MAP}/{name}": rectangles for name, rectangles in saving.maps.items()}
        whole, plan = state, self._save_plan if tip is None else self._increment_plan
        if self._tracks and error is None:
            sets, rest = split(model, state, saving.changed, rank, world_size)
            if tip is not None:
                whole, sparse = rest, take_sparse(rest, TENSOR, rank)
        items = items_of(whole)
        # The numbers of updates, whether some rank failed or needs another plan, and bytes, in one exchange.
        counts, names = update_counts(model), sorted(model.tables())
        flags = [error is not None, not plan.fits(items)]
        shared = sum(item.tensor.nbytes for item in items) if rank == 0 else 0
        own_bytes = sum(item.tensor.nbytes for item in sparse) + sum(rows.nbytes for rows in sets)
        nbytes = [shared + own_bytes, shared + sum(rows.full_bytes for rows in sets)]
        mine = torch.tensor([*nbytes, *flags, *(counts.get(name, -1) for name in names)], dtype=torch.int64)
        both = comm.combine(mine, group, lambda ranks: torch.cat([ranks[:, :2].sum(0), ranks[:, 2:].amax(0)]))
        added, all_bytes, failed, changed, *largest = both.tolist()
        if failed:
            raise next(error for error in comm.all_gather_object(error, group) if error is not None)
        if tip is not None and tip.nbytes + added > LARGEST_SHARE * all_bytes:
            return None
        if changed:
            plan.renew(items, group)
        updates = {name: count for name, count in zip(names, largest, strict=True) if count >= 0}
        manifest = Manifest(
            step=step,
            attempt=attempt.number,
            time=time.time(),
            world_size=world_size,
            iteration=max(updates.values(), default=0),
            updates=updates,
            plan=self._plan_to_write(model.plan) if rank == 0 else {},
            mapping=None if saving.mapping is None else {name: dict(rule) for name, rule in saving.mapping.items()},
            extra=dict(saving.extra or {}),
            link=None if tip is None else tip.link(self._tip_sha256),
        )
        work = plan.work(items)
        if tip is None:
            name = folder_name(step, attempt.number)
            pending = Tip(name=name, step=step)
        else:
            name = increment_name(base_of(tip.name), step, attempt.number)
            pending = tip.after(name, step, added)
            work = Work([*snapshot(work.items), *row_items(sets, rank), *sparse], work.keys)
        if self._tracks:
            self._pending, self._cleared = pending, sets
            for rows in sets:
                rows.clear()
        return Save(
            folder=self.root.sub(name),
            rank=rank,
            work=work,
            manifest=manifest,
            may_commit=lambda: attempt.check(self.root),
            committed=self._committed,
        )

    def _committed(self, manifest: Manifest) -> None:
        self._pending_sha256 = manifest.index_sha256
        if manifest.link is None:  # increments go with the full one that they need
            self._resumed = None
            if self._keep is not None:
                self.prune(self._keep)

    def _plan_to_write(self, plan: ShardingPlan) -> dict[str, Any]:
        """The model's plan for the manifest, kept between saves: it names every shard of every rank."""
        if self._written_plan is None or self._written_plan[0] is not plan:
            self._written_plan = (plan, plan.to_dict())
        return self._written_plan[1]

    def claim(self, group: comm.Group = None) -> Attempt:
        """Become the owner of the folder, as a new attempt. A collective. The first `save` calls this if you do not.

        Raises:
            NotSharedError: on every rank, if a rank does not see the folder of rank 0 or of the driver.
            TakenOverError: another launch holds the folder.
            OSError: the folder cannot be read or written.
        """
        claimed = on_every_rank(lambda: self._take_over() if is_rank_0(group) else None, group)
        attempt = comm.broadcast_object(claimed, group)
        assert attempt is not None
        self._check_shared(attempt, group)
        self._attempt, self._steps = attempt, set()
        return attempt

    def _check_shared(self, attempt: Attempt, group: comm.Group) -> None:
        """Check that every rank sees the claim of rank 0. Otherwise each would write its part to another disk."""
        shown = on_every_rank(lambda: attempt.is_shown_in(self.root), group)
        ranks_by_node: dict[str, list[int]] = defaultdict(list)
        states = comm.all_gather_object((socket.gethostname(), shown), group)
        for rank, (node, is_shown) in enumerate(states):
            if not is_shown:
                ranks_by_node[node].append(rank)
        if ranks_by_node:
            nodes = ", ".join(f"{node} (ranks {ranks_text(ranks)})" for node, ranks in ranks_by_node.items())
            problem = f"what rank 0 on node {states[0][0]} wrote is not found on {nodes}"
            raise NotSharedError(self.root.path, problem)

    def _claim_step(self, step: int, group: comm.Group) -> Attempt:
        """Claim the folder again if this attempt has already saved the step, so that no saved bytes are overwritten."""
        attempt = self._attempt
        if attempt is None or step in self._steps:
            attempt = self.claim(group)
        self._steps.add(step)
        return attempt

    def _take_over(self) -> Attempt:
        attempt = Attempt.claim(self.root, self._launch)
        remove_unfinished(self.root)
        return attempt

    def listing(self) -> Listing:
        """(committed checkpoints, oldest first; those with a damaged manifest)

        Raises:
            OSError: the folder or a manifest cannot be read.
        """
        checkpoints, damaged = [], []
        for name in checkpoint_names(self.root):
            try:
                checkpoint = self._read(name)
            except DamagedCheckpointError as error:
                damaged.append(error)
                continue
            if checkpoint is not None:
                checkpoints.append(checkpoint)
        return checkpoints, damaged

    def all(self) -> list[Checkpoint]:
        """Committed checkpoints with a readable manifest, oldest first.

        Raises:
            OSError: as `listing`.
        """
        return self.listing()[0]

    def candidates(self) -> Listing:
        """(checkpoints to resume from, newest first; those with a damaged manifest)

        Raises:
            NoWholeCheckpointError: all manifests are damaged.
            OSError: as `listing`.
        """
        checkpoints, damaged = self.listing()
        if damaged and not checkpoints:
            raise no_whole(self.root.path, damaged)
        return checkpoints[::-1], damaged

    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint; None without checkpoints.

        Raises:
            NoWholeCheckpointError, OSError: like `candidates`.
        """
        return next(iter(self.candidates()[0]), None)

    def best(self, listed: Listing | None = None) -> Checkpoint | None:
        """The best committed checkpoint by the store's metric; None without a metric, or if no checkpoint has it.

        Args:
            listed: what `listing` returned; None: list now.

        Raises:
            DamagedCheckpointError: the manifest of the best checkpoint is damaged.
            OSError, DamagedScoresError: the checkpoints or their metrics cannot be read.
        """
        if self._best is None:
            return None
        readable, damaged = self.listing() if listed is None else listed
        by_name: dict[str, Checkpoint | DamagedCheckpointError] = {item.name: item for item in readable}
        by_name |= {error.name: error for error in damaged}
        name = best_of(self.root, by_name, self._best)
        best = None if name is None else by_name[name]
        if isinstance(best, DamagedCheckpointError):
            raise best
        return best

    def load(
        self,
        checkpoint: Checkpoint,
        model: DistributedModelParallel,
        dense_optimizer: torch.optim.Optimizer | None = None,
        group: comm.Group = None,
        mapping: IdMapping | None = None,
        maps: Mapping[str, Rectangles] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Load a checkpoint into model and optimizer, under any plan and world size. A collective.

        Restores random states only if the world size is unchanged.

        Args:
            maps: arrays to fill with the state of the maps of tables with dynamic ids.

        Returns:
            The additional tensors of the checkpoint, on every rank.

        Raises:
            ValueError: the checkpoint does not match the model or its mapping of ids; names the table or parameter.
            DamagedCheckpointError: names the changed file, tensor and rows. You may load another checkpoint.
            RemovedCheckpointError: the checkpoint no longer exists.
            OSError: the checkpoint cannot be read.
        """
        check_mapping(checkpoint.path, checkpoint.manifest.mapping, mapping)
        rank, world = (0, 1) if group is None else (group.rank(), group.size())
        tensors: dict[str, torch.Tensor] = {}
        random: dict[str, torch.Tensor] = {}
        saved_keys: set[str] = set()
        chain_bytes = 0

        def read() -> None:
            nonlocal chain_bytes
            with self.reader(checkpoint) as reader:
                saved = reader.index.tensors
                saved_keys.update(saved)
                chain_bytes = reader.nbytes if isinstance(reader, Chain) else 0
                loading = contents.Loading(model, dense_optimizer, saved)
                random.update(empty_random_states(rank, saved) if checkpoint.manifest.world_size == world else {})
                for key in saved:
                    if key.startswith(f"{TENSOR}/"):
                        tensors[key.removeprefix(f"{TENSOR}/")] = reader.tensor(key)
                states = {**loading.state, **_maps_to_load(maps or {}, saved)}
                reader.fill({**states, **{key: Rectangles.whole(state) for key, state in random.items()}})
                loading.finish()

        on_every_rank(read, group)
        self._loaded, self._resumed = checkpoint, checkpoint.name
        if self._tracks:
            self._go_on_from(checkpoint, chain_bytes, model, saved_keys, group)
        set_update_counts(model, checkpoint.manifest)
        set_random_states(random, model.device)
        return tensors

    def _go_on_from(
        self,
        checkpoint: Checkpoint,
        nbytes: int,
        model: DistributedModelParallel,
        saved: Collection[str],
        group: comm.Group,
    ) -> None:
        """Let increments go on from a loaded checkpoint, if its tensors have the same rectangles as those to save.

        Row-wise optimizer state is saved by column shards: with others, its rows that did not change differ.

        Args:
            nbytes: bytes of the increments of its chain.
            saved: keys of its tensors.
        """
        plan_before, plan_now = checkpoint.manifest.plan, json.loads(json.dumps(model.plan.to_dict()))
        same = plan_before == plan_now
        for name, table in model.tables().items():
            prefix = f"{contents.TABLE_STATE}/{name}/"
            for item in table.local:
                same &= {f"{prefix}{key}" for key in item.state} == {key for key in saved if key.startswith(prefix)}
                if item.changed is not None:
                    item.changed.zero_()
        on_all = comm.combine(torch.tensor([same]), group, lambda ranks: ranks.amin(0))
        link, self._pending, self._cleared = checkpoint.manifest.link, None, []
        sequence, self._tip_sha256 = (0 if link is None else link.sequence), checkpoint.manifest.index_sha256
        self._tip = (
            Tip(name=checkpoint.name, step=checkpoint.step, sequence=sequence, nbytes=nbytes) if bool(on_all) else None
        )

    def load_maps(self, checkpoint: Checkpoint, maps: Mapping[str, Rectangles], group: comm.Group = None) -> None:
        """Fill arrays with the state of maps of dynamic ids alone. A collective.

        Raises:
            ValueError, DamagedCheckpointError, OSError: as `load`.
        """

        def read() -> None:
            with self.reader(checkpoint) as reader:
                reader.fill(_maps_to_load(maps, reader.index.tensors))

        on_every_rank(read, group)

    def reader(self, checkpoint: Checkpoint) -> AnyReader:
        """A reader of single tensors of a checkpoint.

        Raises:
            DamagedCheckpointError: also if a checkpoint that an increment needs is missing or damaged.
        """
        return open_reader(self.root.sub(checkpoint.name), checkpoint.manifest)

    def damages(self, checkpoint: Checkpoint) -> list[Damage]:
        """All damage of a checkpoint. Reads every byte.

        Raises:
            OSError: the checkpoint cannot be read.
        """
        try:
            with self.reader(checkpoint) as reader:
                return list(reader.damages())
        except DamagedCheckpointError as error:
            return list(error.damages)

    def name_of(self, step: int) -> str | None:
        """The folder of the checkpoint of a step that was saved or loaded; None without one."""
        if self._attempt is not None and step in self._steps:
            return folder_name(step, self._attempt.number)
        return self._loaded.name if self._loaded is not None and self._loaded.step == step else None

    def note_scores(self, step: int, scores: Mapping[str, Any], name: str | None = None) -> bool:
        """Record the metrics of the checkpoint of a step, and prune. Call on rank 0 only.

        Args:
            name: folder of the checkpoint; default: the one of the step that was saved or loaded.

        Returns:
            Whether the checkpoint exists.
        """
        name = name or self.name_of(step)
        if name is None:
            return False
        note_scores(self.root, name, scores)
        self._prune_if_idle()
        return True

    def hold(self, name: str) -> None:
        """Keep a checkpoint until it is released. Call on rank 0 only."""
        self._held |= {name}

    def release(self, name: str) -> None:
        """End `hold`, and prune. Call on rank 0 only.

        Raises:
            FencedError, OSError, DamagedScoresError: like `prune`.
        """
        self._held -= {name}
        self._prune_if_idle()

    def _prune_if_idle(self) -> None:
        if self._keep is not None and not self._background.running:
            self.prune(self._keep)

    def prune(self, keep: int) -> None:
        """Remove all but the `keep` newest committed checkpoints, the best and held ones, the one that was loaded until
        a full one is saved, and unfinished older folders.

        Call from one process of a run only, and not during a save of another process.

        Raises:
            FencedError: another attempt has taken over the folder.
            OSError, DamagedScoresError: see `remove_old`.
        """
        if self._attempt is not None:
            self._attempt.check(self.root)
        held = self._held if self._resumed is None else self._held | {self._resumed}
        remove_old(self.root, keep, self._best, held)

    def _read(self, name: str) -> Checkpoint | None:
        return read_checkpoint(self.root.sub(name))


def _maps_to_load(maps: Mapping[str, Rectangles], saved: Mapping[str, SavedTensor]) -> dict[str, Rectangles]:
    for name, rectangles in maps.items():
        size = getattr(saved.get(f"{contents.MAP}/{name}"), "size", None)
        if size is None or tuple(size) != tuple(rectangles.shape):
            raise ValueError(
                f"dynamic ids: the checkpoint has {'no ' if size is None else ''}{name!r} "
                f"{'' if size is None else f'of shape {tuple(size)} instead of {tuple(rectangles.shape)}'}; use the "
                "mapping that it was made with, or start a new run under another name"
            )
    return {f"{contents.MAP}/{name}": rectangles for name, rectangles in maps.items()}
