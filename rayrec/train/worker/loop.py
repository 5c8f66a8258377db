"""The loop of one rank: epochs of steps, with logging, checkpoints and evaluation. Every rank runs it in step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from rayrec.checkpoint import CheckpointStore
from rayrec.data import Cursor, RankCursor, data_sets, empty_batch
from rayrec.distributed.comm import broadcast_object
from rayrec.train import build
from rayrec.train.errors import TrainError, plain_errors
from rayrec.train.worker.evaluation import evaluate
from rayrec.train.worker.learner import Learner, make_learner
from rayrec.train.worker.lockstep import RankError, StepInput, StopRequested, due, in_step
from rayrec.train.worker.position import START, Position
from rayrec.train.worker.session import Job, Session
from rayrec.train.worker.skipped import SkippedRows
from rayrec.train.worker.streams import Stream, Streams
from rayrec.train.worker.window import Window

PROGRESS_EVERY_S = 0.2
PREPARE_AHEAD_S = 5.0
EVAL_ROWS = Cursor.start(0)


class Loop:
    """One rank's training, from the last committed checkpoint to the last epoch."""

    def __init__(self, job: Job, session: Session, streams: Streams) -> None:
        self.job, self.session, self.streams, self.config = job, session, streams, job.config
        self.store = CheckpointStore(job.files.checkpoints)
        latest = self.store.latest() if session.rank == 0 else None
        self.resumed = broadcast_object(latest, session.control.group)
        self.position = START if self.resumed is None else Position.from_dict(self.resumed.extra["position"])
        self.saved = self.resumed
        self.window = Window(session.device, session.control, session.group, self.config.data_schema.task_names)
        self.empty = empty_batch(self.config.data_schema.for_training)
        self.last_epoch = self.config.trainer.epochs - 1
        self.figures: dict[str, Any] = {}
        self.total_steps = 0
        self._told_at = 0.0

    def load(self) -> Learner:
        """The sharded model, as the last committed checkpoint has it; a collective."""
        learner = make_learner(self.job, self.session)
        if self.resumed is not None:
            with plain_errors():
                self.store.load(self.resumed, learner.model, learner.optimizer, self.session.control.group)
            learner = replace(learner, logit_shift=self.resumed.extra.get("logit_shift", 0.0))
        return learner

    def run(self) -> dict[str, Any]:
        """Train, and return what the driver needs for the result."""
        position = self.position
        assert not isinstance(position.cursor, RankCursor)
        self.streams.prepare("train", position.cursor)
        self.learner = self.load()
        self._tell_start()
        scores: dict[str, Any] | None = None
        while True:
            position = self._epoch(position)
            last = position.epoch >= self.last_epoch
            if last and (self.saved is None or self.saved.step != position.step):
                self._save(position)
            if self.job.eval is not None and (last or position.step not in self.job.evaluated_steps):
                try:
                    scores = self._evaluate(position)
                except StopRequested:
                    self._stop(position)
            if last:
                return self._outcome(position, scores)
            position = position.next_epoch()

    def _epoch(self, position: Position) -> Position:
        """What the position's cursor leaves of its epoch."""
        assert not isinstance(position.cursor, RankCursor)
        began = time.perf_counter()
        stream = self.streams.take("train", position.cursor)
        first_step, whole_epoch = position.step, not position.cursor.done
        with stream, self._watched(stream, "training"):
            for given in in_step(stream, self.empty, self.session.control, since=began):
                given = given.on(self.session.device)
                loss, logits = self.learner.step(given.batch, given.share)
                seconds = time.perf_counter() - began
                self.position = position = position.after(given, seconds)
                self.total_steps = position.step + self._steps_left(position, stream)
                self._after_step(position, given, loss, logits, seconds)
                if given.stop:
                    self._stop(position.merged(self.session.control))
                if stream.batches_left * seconds < PREPARE_AHEAD_S:
                    self._prepare_next(position.epoch)
                began = time.perf_counter()
        if whole_epoch and position.step == first_step:
            names = ", ".join(map(str, data_sets(self.config.data.train)))
            raise TrainError(
                f"no row to train on: of the {self.job.train.rows:,} rows of {names} none passed the "
                "filters and could be used; check the filters, or the rows with `rayrec data check`"
            )
        if not self.window.empty:
            self._log(position)
        return position.merged(self.session.control)

    def _steps_left(self, position: Position, stream: Stream) -> int:
        """To the end of the run, as far as it is known how many rows are left out."""
        per_epoch = self.job.train.rows * stream.share_given / self.config.trainer.batch_size
        return stream.batches_left + (self.last_epoch - position.epoch) * math.ceil(per_epoch)

    def _prepare_next(self, epoch: int) -> None:
        """Let reading begin for what comes after this epoch."""
        if self.job.eval is not None:
            self.streams.prepare("eval", EVAL_ROWS)
        if epoch < self.last_epoch:
            self.streams.prepare("train", Cursor.start(epoch + 1))

    def _after_step(self, position: Position, given: StepInput, loss: Any, logits: Any, seconds: float) -> None:
        self.window.add(given, loss, logits, seconds)
        if due(position.step, self.config.trainer.log_every):
            self._log(position)
        if due(position.step, self.config.trainer.checkpoint_every):
            self.window.check(position.step)
            self._save(position.merged(self.session.control))
            self._tell_skipped()
        self._tell_progress(position)

    def _stop(self, position: Position) -> NoReturn:
        """End between two steps, with a checkpoint of the position of all ranks."""
        if self.saved is None or self.saved.step != position.step:
            self.window.check(position.step)
            self._save(position)
        raise StopRequested(f"stopped at step {position.step}, whose checkpoint is complete")

    def _log(self, position: Position) -> None:
        self.figures = self.window.close(position.step)
        optimizers = self.config.optimizers
        lr = {"dense": optimizers.dense.lr, "sparse": optimizers.sparse.lr}
        self._tell("train", position, **self.figures, lr=lr)

    def _evaluate(self, position: Position) -> dict[str, Any]:
        stream = self.streams.take("eval", EVAL_ROWS)
        with self._watched(stream, "evaluation"):
            scores = evaluate(self.learner, stream, self.config, self.session)
        self._tell("eval", position, **scores)
        return scores

    def _save(self, position: Position) -> None:
        """Write a checkpoint; `position` is that of all ranks."""
        extra = {
            "position": position.to_dict(),
            "config": self.config.to_dict(),
            "world_size": self.session.world_size,
            "logit_shift": self.learner.logit_shift,
        }
        learner, group = self.learner, self.session.control.group
        with plain_errors():
            self.saved = self.store.save(position.step, learner.model, learner.optimizer, extra, group)
        if self.session.rank == 0:
            self.store.prune(self.config.storage.keep)
        self._tell("event", position, event="checkpoint", message=f"checkpoint of step {position.step} is complete")

    @contextmanager
    def _watched(self, stream: Stream, what: str) -> Iterator[None]:
        """Tell of the rows that a stream leaves out: when it is over, and when too many of them end the run."""
        self.skipped = SkippedRows(stream, self.session.control, what)
        try:
            yield
        except RankError:
            self._tell_skipped()
            raise
        self._tell_skipped()

    def _tell_skipped(self) -> None:
        event = self.skipped.event(self.position.epoch)
        if event is not None:
            self._tell("event", self.position, **event)

    def _tell_start(self) -> None:
        step = None if self.resumed is None else self.resumed.step
        if self.session.rank == 0:
            self.session.sink.put({"kind": "begin", "resumed_step": step, "world_size": self.session.world_size})
            dense = sum(p.numel() for p in self.learner.model.other_parameters().values())
            memory = build.plan_memory(self.learner.plan, self.config, self.session.world_size, dense)
            told = {"memory": memory, "time": build.plan_time(self.learner.estimate)}
            self.session.sink.put({"kind": "plan", "plan": {**self.learner.plan.to_dict(), **told}})

    def _tell_progress(self, position: Position) -> None:
        if time.monotonic() - self._told_at >= PROGRESS_EVERY_S:
            self._told_at = time.monotonic()
            self._tell("progress", position, epochs=self.config.trainer.epochs, total_steps=self.total_steps)

    def _tell(self, kind: str, position: Position, **values: Any) -> None:
        """Rank 0 tells the driver."""
        if self.session.rank == 0:
            at = {"step": position.step, "epoch": position.epoch}
            if kind == "train":
                at["samples"] = position.samples
            self.session.sink.put({"kind": kind, "time": time.time(), **at, **values})

    def _outcome(self, position: Position, scores: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "eval": scores,
            "train": {
                "loss": self.figures.get("loss"),
                "ne": self.figures.get("ne"),
                "auc": self.figures.get("auc"),
                "samples": position.samples,
                "skipped": position.skipped,
                "seconds": round(position.seconds, 3),
                "data_wait_fraction": position.wait_s / max(position.seconds, 1e-9),
            },
            "world_size": self.session.world_size,
            "epochs": position.epoch + 1,
            "steps": position.step,
            "samples_per_second": position.samples / max(position.seconds, 1e-9),
            "checkpoint": None if self.saved is None else str(self.saved.path),
        }


def fit(job: Job, session: Session) -> dict[str, Any]:
    """Train to the last epoch."""
    with Streams(job, session) as streams:
        return Loop(job, session, streams).run()


def score_checkpoint(job: Job, session: Session) -> dict[str, Any]:
    """Figures of the last committed checkpoint on the evaluation rows."""
    with Streams(job, session) as streams:
        loop = Loop(job, session, streams)
        assert loop.resumed is not None, "the driver has checked that there is a checkpoint"
        scores = evaluate(loop.load(), streams.take("eval", EVAL_ROWS), job.config, session)
    at = {"step": loop.position.step, "checkpoint": str(loop.resumed.path), "data": str(job.config.data.eval)}
    return {**scores, **at}
