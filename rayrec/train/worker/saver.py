"""Checkpoints of one rank: finds and loads the one to resume from, saves in the background, and reports."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rayrec.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    DamagedCheckpointError,
    RemovedCheckpointError,
    Saving,
    Started,
    newer_damaged,
    no_whole,
)
from rayrec.checkpoint.contents import TABLE
from rayrec.checkpoint.errors import DamagedScoresError
from rayrec.checkpoint.increments import usable_after
from rayrec.checkpoint.polling import on_every_rank
from rayrec.checkpoint.retention import read_scores
from rayrec.checkpoint.warm_start import load_weights
from rayrec.data.mapping.fingerprint import as_before
from rayrec.distributed.comm import all_gather_object, broadcast_object, subgroup
from rayrec.models import Retriever
from rayrec.storage.retries import Patience
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import TrainError, is_lost_peer
from rayrec.train.run.choice import best_metric, refused
from rayrec.train.run.log import Record
from rayrec.train.setup.init_from import WarmStart
from rayrec.train.setup.init_vectors import load_vectors
from rayrec.train.worker.learner import Learner
from rayrec.train.worker.lockstep import Every
from rayrec.train.worker.position import Position
from rayrec.train.worker.session import Job, Session
from rayrec.train.worker.storage_retry import StorageRetry, call_within, is_storage_fault

ReportEvent = Callable[[str, str, int | None], None]
MIN_STALL_S = 60.0  # a busy disk may need this long for one block
MAX_WAIT_S = 30.0  # in total for an earlier save, before the next is skipped
LAST_WAIT_S = 20.0  # for an unfinished save, if this rank ends with an error


class Saver:
    """Checkpoints of one rank; `every` decides when one is due. Methods are collectives unless documented otherwise.

    Args:
        report: called on rank 0 with event, message and step.

    Raises:
        OSError: checkpoints cannot be read.
        CheckpointError: all checkpoints are damaged, or another driver has taken over the run.
    """

    def __init__(self, job: Job, session: Session, report: ReportEvent) -> None:
        self._job, self._session, self._report = job, session, report
        storage = job.config.storage
        best = best_metric(job.config.to_dict())
        stall_s = max(storage.patience_s, MIN_STALL_S)
        self.store = CheckpointStore(job.checkpoints, storage.keep, best, stall_s, job.launch)
        self._group = session.control.group
        self._retry = StorageRetry(
            session.control,
            Patience(outage_s=storage.patience_s),
            lambda text: self._report_first(self._saved_step or 0, "storage", text),
        )
        self._saved_step: int | None = None
        self._candidates: list[Checkpoint] = []
        self._damaged: list[DamagedCheckpointError] = []
        self._scored: set[str] = set()
        self._complete_step: int | None = None
        # Called on rank 0 with the step of a checkpoint that ended, and whether it is complete.
        self.on_ended: Callable[[int, bool], object] = lambda step, complete: None
        # Called on rank 0: the requests of background evaluations whose outcomes are not in the position to save.
        self.pending_evaluations: Callable[[], list[Record]] = list
        self._retry("finding the checkpoints", self._find)
        self._saved_step = self.resumed.step if self.resumed is not None else None
        trainer = job.config.trainer
        self.every = Every(trainer.checkpoint_every)
        self.increments = Every(None if storage.increments is None else storage.increments.every)
        self._increment_steps: set[int] = set()  # of increments whose outcomes were not reported
        self._waits = False  # training waits for writes, because the host has no memory for copies

    def _find(self) -> None:
        """List the checkpoints to resume from. A training run also claims the folder."""
        if self._job.task == "fit":
            try:
                self.store.claim(self._group)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise  # a full disk may have space later
        listed = on_every_rank(lambda: self._list() if self._session.rank == 0 else None, self._group)
        self._candidates, self._damaged, self._scored = broadcast_object(listed, self._group) or ([], [], set())
        if self._job.checkpoint is not None:
            self._candidates = [c for c in self._candidates if c.name == self._job.checkpoint]

    def _list(self) -> tuple[list[Checkpoint], list[DamagedCheckpointError], set[str]]:
        """(checkpoints, newest first; damaged checkpoints; names of checkpoints with recorded scores)"""
        scored: set[str] = set()
        with suppress(DamagedScoresError):  # reported when scores are recorded
            scored = set(read_scores(self.store.root))
        return *self.store.candidates(), scored

    def is_behind(self, step: int) -> bool:
        """Whether a step has no checkpoint, nor one being written. Not a collective."""
        return self._saved_step != step

    @property
    def unscored(self) -> bool:
        """Whether a crash interrupted the evaluation of the checkpoint to resume from."""
        resumed, best = self.resumed, self._job.config.storage.keep_best
        if resumed is None or best is None or self._job.eval is None:
            return False
        return bool(resumed.extra.get("to_score")) and resumed.name not in self._scored

    @property
    def resumed(self) -> Checkpoint | None:
        """The checkpoint to resume from; `load` may choose an older one."""
        return self._candidates[0] if self._candidates else None

    def load(self, learner: Learner) -> tuple[Learner, Mapping[str, torch.Tensor]]:
        """The learner with the state of the newest undamaged checkpoint, and the checkpoint's additional tensors.

        Raises:
            ValueError: the checkpoint belongs to another model or mapping, or all are damaged.
        """
        if self._job.task == "fit" and self._job.config.storage.increments is not None:
            self._track_changes(learner)
        if self.resumed is None:
            self._warm_start(learner)
            self._load_vectors(learner)
            return learner, {}
        tensors = None
        while tensors is None:
            checkpoint = self._candidates[0]
            try:
                tensors = self._read(checkpoint, learner)
            except RemovedCheckpointError:
                if self._job.checkpoint is not None:
                    raise
                self._retry("finding the checkpoints", self._find)
                if not self._candidates:
                    raise
            except DamagedCheckpointError as error:
                if error.name not in {known.name for known in self._damaged}:  # by the listing of manifests
                    self._damaged.append(error)
                if self._job.task != "fit":
                    raise refused(error) from error
                self._candidates = usable_after(error, self._candidates[1:])
                if not self._candidates:
                    raise no_whole(self.store.root.path, self._damaged) from error
        if checkpoint.manifest.world_size != self._session.world_size:
            # Random states are valid for one world size only. A new seed avoids drawing the same numbers again.
            torch.manual_seed((torch.initial_seed() + 1_000_003 * checkpoint.step) % (1 << 63))
        self._saved_step = self._complete_step = checkpoint.step
        return _with_shift(learner, checkpoint), tensors

    def _track_changes(self, learner: Learner) -> None:
        try:
            self.store.track_changes(learner.model)
        except ValueError as error:
            raise TrainError(
                f"storage.increments: {error} (`sharding.replicas: 1`), or remove storage.increments"
            ) from None
        if learner.dynamic is not None:
            learner.dynamic.maps.track_changes()

    def _read(self, checkpoint: Checkpoint, learner: Learner) -> dict[str, torch.Tensor]:
        saved_mapping, schema = checkpoint.manifest.mapping, self._job.config.data_schema
        mapping = as_before(self._job.mapping, saved_mapping, schema) if self._job.mapping else None
        maps = None if learner.dynamic is None else learner.dynamic.rectangles()
        load = partial(self.store.load, checkpoint, learner.model, learner.optimizer, self._group, mapping, maps)
        tensors = self._retry(f"reading the checkpoint of step {checkpoint.step}", load)
        if learner.dynamic is not None:
            learner.dynamic.maps.finish_loading()
        return tensors

    def load_best(self, learner: Learner, last: Checkpoint) -> tuple[Learner, Checkpoint, bool]:
        """The best checkpoint by `storage.keep_best`, or `last` without one; a damaged one is reported.

        Args:
            learner: has the weights of `last`; its state is replaced.
            last: final checkpoint of the run.

        Returns:
            (learner with the weights of the checkpoint, checkpoint, whether it is the best one)
        """
        chosen, is_best = last, False
        tensors: Mapping[str, torch.Tensor] | None = None
        try:
            best = self._retry("finding the best checkpoint", self._find_best)
            if best is not None:
                tensors = None if best.name == last.name else self._read(best, learner)
                chosen, is_best = best, True
        except (CheckpointError, DamagedScoresError) as error:
            text = f"{error}; data.test is evaluated with the last checkpoint instead, of step {last.step}"
            self._report_first(last.step, "damaged", text)
            tensors = self._read(last, learner)  # the failed load may have replaced some weights
        if tensors is None:
            return learner, chosen, is_best
        learner.dense.load_state(tensors)
        return _with_shift(learner, chosen), chosen, is_best

    def _find_best(self) -> Checkpoint | None:
        best = on_every_rank(lambda: self.store.best() if self._session.rank == 0 else None, self._group)
        return broadcast_object(best, self._group)

    def _warm_start(self, learner: Learner) -> None:
        init = self._job.warm_start
        if init is not None:
            names, module = init.names, learner.model.module
            if isinstance(module, Retriever):  # counts of the other run's data; this one counts its own
                names = replace(names, fresh=(*names.fresh, *(f"loss.{name}" for name in module.loss.counted)))
            loaded = load_weights(init.store, init.checkpoint, learner.model, names, init.rows, self._group)
            if learner.dynamic is not None and init.maps:
                init.store.load_maps(init.checkpoint, learner.dynamic.rectangles(init.maps), self._group)
                learner.dynamic.finish_warm_start(init.maps)
            dropped = {} if learner.dynamic is None else on_every_rank(partial(_take_rows, init, learner), self._group)
            text = f"loaded {len(loaded.tables)} tables and {len(loaded.layers)} layers from {init.checkpoint.path}"
            fresh = f"; newly initialized: {', '.join(loaded.fresh)}" if loaded.fresh else ""
            self._report_first(0, "warm_start", text + fresh)
            for name, count in dropped.items():
                more = f"dynamic ids of {name}: {count:,} ids of that run found no row in full buckets of the table"
                self._report_first(0, "warm_start", more)

    def _load_vectors(self, learner: Learner) -> None:
        if self._job.vectors:
            host = self._group
            if host is not None:
                names = all_gather_object(socket.gethostname(), host)
                ranks = [rank for rank, name in enumerate(names) if name == names[self._session.rank]]
                host = subgroup(host, ranks, torch.device("cpu"))
            on_every_rank(lambda: load_vectors(self._job.vectors, learner.model, host), self._group)
            for vectors in self._job.vectors:
                self._report_first(0, "warm_start", vectors.text)

    def report_start(self) -> None:
        """Report damaged checkpoints. Not a collective."""
        if self.resumed is None:
            return
        for error in newer_damaged(self.resumed, self._damaged):
            self._report_first(self.resumed.step, "damaged", f"{error}; resuming from step {self.resumed.step}")

    def save(
        self,
        position: Position,
        learner: Learner,
        tensors: Mapping[str, torch.Tensor] | None = None,
        to_score: bool = False,
        score_rows: int | None = None,
    ) -> None:
        """Start a checkpoint. If it fails, report the failure and continue.

        Args:
            position: merged position of all ranks.
            tensors: additional tensors to save.
            to_score: an evaluation of the checkpoint follows; `unscored` is true after a resume without its result.
            score_rows: approximate number of rows of this evaluation; None: all.
        """
        step = position.step
        if self._saved_step == step:
            return
        try:
            self._begin(step, learner, self._saving(position, learner, tensors, to_score, score_rows))
        except OSError as error:
            if not is_storage_fault(error):
                raise
            self._report_failed(step, error)
        self.report_ended()

    def save_increment(
        self, position: Position, learner: Learner, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Start an increment; a full checkpoint where one is due. While an earlier save is being written, the next
        increment has the changes of this one. If it fails, report the failure and continue."""
        step = position.step
        if step == self._saved_step:
            return
        saving = self._saving(position, learner, tensors)
        background = self._job.config.storage.background
        try:
            started = self.store.save_increment(step, learner.model, learner.optimizer, saving, self._group, background)
        except OSError as error:
            if not is_storage_fault(error):
                raise
            self._report_failed(step, error)
            return
        if started is Started.FULL_IS_DUE:
            self.save(position, learner, tensors)
        elif started is Started.STARTED:
            self._increment_steps.add(step)
        self.report_ended()

    def _begin(self, step: int, learner: Learner, saving: Saving) -> None:
        storage = self._job.config.storage
        if not storage.background:
            self.store.save(step, learner.model, learner.optimizer, group=self._group, saving=saving)
            self._report_complete(step)
        elif not self.store.save_in_background(
            step, learner.model, learner.optimizer, saving, self._group, patience_s=min(storage.patience_s, MAX_WAIT_S)
        ):
            text = (
                f"Skipped the checkpoint at step {step}: the previous one is still being written. Increase "
                "trainer.checkpoint_every or use faster storage."
            )
            self._report_first(step, "save_skipped", text)
            return
        elif not self.store.copied and not self._waits:
            self._waits = True
            text = "Training waits while checkpoints are written: host memory has no room for a copy of the state."
            self._report_first(step, "save_waits", text)
        self._saved_step = step

    def save_last(
        self, position: Position, learner: Learner, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> Checkpoint:
        """Save and commit a checkpoint of `position`, unless one exists.

        Retries while the storage is unavailable, up to `storage.patience_s`; during a stop, up to `trainer.grace_s`.

        Raises:
            OSError: the checkpoint cannot be saved; says which steps are lost.
        """
        saving = self._saving(position, learner, tensors)
        task = f"saving the final checkpoint (step {position.step})"
        try:
            return self._retry(task, lambda: self._save_now(position.step, learner, saving))
        except OSError as error:
            if not is_storage_fault(error):
                raise
            last = self._complete_step
            text = (
                f"the final checkpoint (step {position.step}) could not be saved, and "
                f"{'there is no earlier one' if last is None else f'the last complete one is of step {last}'}. "
                "Once the storage has room and answers, the same command continues from there"
            )
            raise _with_text(error, text) from error

    def _save_now(self, step: int, learner: Learner, saving: Saving) -> Checkpoint:
        self.store.finish(self._group)
        self.report_ended()
        newest = on_every_rank(lambda: self.store.latest() if self._session.rank == 0 else None, self._group)
        newest = broadcast_object(newest, self._group)
        if newest is not None and newest.step == step and newest.manifest.link is None:
            return newest
        saved = self.store.save(step, learner.model, learner.optimizer, group=self._group, saving=saving)
        self._saved_step = step
        self._report_complete(step)
        return saved

    def note_scores(self, step: int, scores: Mapping[str, Any], name: str | None = None) -> None:
        """Record the metrics of a step, if `storage.keep_best` is set. Not a collective.

        Args:
            name: folder of the checkpoint; default: the one of this attempt.
        """
        storage = self._job.config.storage
        if self._session.rank != 0 or storage.keep_best is None:
            return
        try:
            if not call_within(min(storage.patience_s, MAX_WAIT_S), lambda: self.store.note_scores(step, scores, name)):
                text = f"No checkpoint exists for step {step}, so storage.keep_best ignores this evaluation."
                self._report_first(step, "save_skipped", text)
        except (OSError, DamagedScoresError) as error:
            self._report_first(step, "save_failed", f"Could not store the metrics of step {step}: {error}")

    def name_of(self, step: int) -> str | None:
        """The folder of the checkpoint of a step, complete or being written; None without one."""
        return self.store.name_of(step) if self._saved_step == step else None

    def is_complete(self, step: int) -> bool:
        """On rank 0: whether the newest complete checkpoint is the one of this step."""
        return self._complete_step == step

    def existed(self, name: str) -> bool:
        """Whether a checkpoint was there, with a readable manifest, when this rank started."""
        return any(checkpoint.name == name for checkpoint in self._candidates)

    def hold(self, name: str) -> None:
        """Keep a checkpoint until it is released. Call on rank 0."""
        self.store.hold(name)

    def release(self, name: str) -> None:
        """End `hold`. Call on rank 0. An error is reported where the next checkpoint is pruned."""
        with suppress(OSError, CheckpointError, DamagedScoresError):
            call_within(min(self._job.config.storage.patience_s, MAX_WAIT_S), lambda: self.store.release(name))

    def report_ended(self) -> None:
        """Report checkpoints that completed or failed. Not a collective."""
        for outcome in self.store.ended():
            is_increment = outcome.step in self._increment_steps
            self._increment_steps.discard(outcome.step)
            if outcome.error is not None:
                self._report_failed(outcome.step, outcome.error)
            elif is_increment:
                self._report_first(outcome.step, "checkpoint", f"increment of step {outcome.step} is complete")
            else:
                self._report_complete(outcome.step)

    def close(self, error: BaseException | None = None) -> None:
        """Wait up to 20 s for an unfinished save, but not for the files of a rank that has died. Not a collective.

        Args:
            error: the error that ended training on this rank.
        """
        self.store.close(LAST_WAIT_S, lost_peer=error is not None and is_lost_peer(error))
        self.report_ended()

    def _saving(
        self,
        position: Position,
        learner: Learner,
        tensors: Mapping[str, torch.Tensor] | None,
        to_score: bool = False,
        score_rows: int | None = None,
    ) -> Saving:
        config: TrainConfig = self._job.config
        extra = {
            "position": position.to_dict(),
            "config": config.to_dict(),
            "world_size": self._session.world_size,
            "logit_shift": learner.logit_shift,
            "to_score": to_score,
            "score_rows": score_rows,
            "evaluations": self.pending_evaluations(),
        }
        maps = {} if learner.dynamic is None else learner.dynamic.rectangles()
        changed = {} if learner.dynamic is None else learner.dynamic.changed()
        return Saving(extra=extra, tensors=tensors, mapping=self._job.mapping or None, maps=maps, changed=changed)

    def _report_failed(self, step: int, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        text = f"The checkpoint at step {step} failed ({reason}). Earlier ones are intact."
        self._report_first(step, "save_failed", text)
        self.on_ended(step, False)

    def _report_complete(self, step: int) -> None:
        self._complete_step = step
        self._report_first(step, "checkpoint", f"checkpoint of step {step} is complete")
        self.on_ended(step, True)

    def _report_first(self, step: int, event: str, message: str) -> None:
        if self._session.rank == 0:
            self._report(event, message, step)


def _with_text(error: OSError, text: str) -> OSError:
    """An error of the same kind with a text after its own."""
    if error.errno is None:
        return type(error)(f"{error}; {text}")
    return OSError(error.errno, f"{error.strerror}; {text}", error.filename)


def _with_shift(learner: Learner, checkpoint: Checkpoint) -> Learner:
    return replace(learner, logit_shift=checkpoint.extra.get("logit_shift", 0.0))


def _take_rows(init: WarmStart, learner: Learner) -> dict[str, int]:
    """Gives ids of a run without dynamic ids their rows; the number of ids without one by map, where there are any."""
    if learner.dynamic is None or not init.ids:
        return {}
    with init.store.reader(init.checkpoint) as reader:
        sizes = {key: saved.size for key, saved in reader.index.tensors.items()}
        dropped = {}
        for name, earlier in init.ids.items():
            keys = {}
            for path in learner.model.tables():
                source = init.names.source(path)
                if f"{TABLE}/{source}" in sizes:
                    keys[path] = f"{TABLE}/{source}"
            dropped[name] = learner.dynamic.take_rows(name, earlier, keys, reader)
    return {name: count for name, count in dropped.items() if count}
