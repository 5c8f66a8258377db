"""The loop of one rank: epochs of steps, with logging, checkpoints and evaluation. Every rank runs it in step."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch

from rayrec.checkpoint import Checkpoint
from rayrec.data import Cursor, data_sets, empty_batch
from rayrec.distributed import TrainPipeline
from rayrec.distributed.comm.trace import listen
from rayrec.models import Retriever
from rayrec.train.errors import TrainError
from rayrec.train.setup import build
from rayrec.train.worker.evaluation import evaluate, item_counts
from rayrec.train.worker.guards import Guards
from rayrec.train.worker.learner import Learner, make_learner
from rayrec.train.worker.lockstep import Every, NotFiniteError, RankError, StepInput, StopRequested, in_step
from rayrec.train.worker.machine import planned_for
from rayrec.train.worker.memory import is_out_of_memory, out_of_memory
from rayrec.train.worker.position import START, Position
from rayrec.train.worker.profiling import ExchangeClock, Profile, Stalls
from rayrec.train.worker.saver import Saver
from rayrec.train.worker.session import TEST, Job, Session
from rayrec.train.worker.streams import SkippedRows, Stream, Streams
from rayrec.train.worker.window import Window, touched

PROGRESS_EVERY_S = 0.2
PREPARE_AHEAD_S = 5.0
TABLES_EVERY_S = 60.0
EVAL_ROWS = Cursor.start(0)


class Loop:
    """One rank's training, from the last committed checkpoint to the last epoch.

    Args:
        halvings: of the learning rates, at least; a checkpoint may know of more.
    """

    def __init__(self, job: Job, session: Session, streams: Streams, halvings: int = 0) -> None:
        self.job, self.session, self.streams, self.config = job, session, streams, job.config
        self.halvings = halvings
        self.position = START
        self.saver = Saver(job, session, self._report_checkpoint)
        self.position = self._resumed_position()
        self.last_epoch = self._last_epoch()
        self.saved: Checkpoint | None = None  # the last one that is known to be complete
        schema = self.config.data_schema
        labels = (schema.task_names, schema.label_kinds)
        self.window = Window(session.device, session.control, session.group, *labels)
        self.empty = empty_batch(self.config.data_schema.for_training)
        self.figures: dict[str, Any] = {}
        self.total_steps = 0
        self.skipped: SkippedRows | None = None
        self.guards = Guards(self.config.trainer.guards)
        self.scores: dict[str, Any] | None = None
        self.test: dict[str, Any] | None = None
        self._counts_I: torch.Tensor | None = None
        self.scored_step: int | None = None  # of the last evaluation of all rows
        self.ended: str | None = None
        trainer = self.config.trainer
        self._lines = Every(trainer.log_every, trainer.log_every_s if trainer.log_every is None else math.inf)
        self._evaluations = Every(trainer.eval_every, 60 * (trainer.eval_every_minutes or math.inf))
        self._exchanges = ExchangeClock()
        self._stalls = Stalls()
        profiled = trainer.profile if session.rank == 0 else None
        self._profile = Profile(job.folder, profiled, session.device)
        self._reported_at = 0.0
        self._tables_told_at = -math.inf

    def _resumed_position(self) -> Position:
        resumed = self.saver.resumed
        position = START if resumed is None else Position.from_dict(resumed.extra["position"])
        position = position.among(self.job.periods)
        return replace(position, halvings=max(position.halvings, self.halvings))

    def _last_epoch(self) -> int:
        periods, at = self.job.periods, self.position.cursor.only
        if periods is None or at is None:
            return self.config.trainer.epochs - 1
        return self.position.epoch + len(periods.remaining(at[1]))

    def load(self) -> Learner:
        """The sharded model, as the newest whole checkpoint has it; a collective."""
        learner, kept = self.saver.load(make_learner(self.job, self.session))
        self.window.load_state(kept)
        learner.dense.load_state(kept)
        return learner

    def run(self) -> dict[str, Any]:
        """Train, and return what the driver needs for the result.

        Raises:
            OutOfMemory: the memory of this rank's device or host ran out.
        """
        try:
            with listen(self._exchanges):
                return self._run()
        except Exception as error:
            if is_out_of_memory(error):
                learner = getattr(self, "learner", None)  # none while it is being made
                raise out_of_memory(error, learner, self.session.device, self.session.rank) from error
            raise
        finally:
            self._profile.close()
            self.saver.close()

    def _run(self) -> dict[str, Any]:
        self.streams.prepare("train", self.position.cursor)
        self.learner = self.load()
        position = self._resumed_position()
        if position != self.position:  # the newest checkpoint was damaged
            self.position = position
            self.last_epoch = self._last_epoch()
            self.streams.close()
            self.streams.prepare("train", position.cursor)
        self._report_start()
        if self.saver.unscored:  # a crash cut its evaluation short, and it may be the best
            position = self._evaluate(position)
        while True:
            position = self._epoch(position)
            last = position.epoch >= self.last_epoch or self.ended is not None
            if last:
                self._save_last(position)
            elif self.config.storage.keep_best is not None and self.job.eval is not None:
                self._save(position)
            if self.job.eval is not None and self._is_unscored(position, last):
                position = self._evaluate(position)
            if last or self.ended is not None:
                self._save_last(position)
                self._test(position)
                return self._outcome(position)
            position = position.next_epoch(self.job.periods)

    def _is_unscored(self, position: Position, last: bool) -> bool:
        """Whether the full evaluation at the end of an epoch is still missing."""
        counted = self.config.trainer.early_stopping is not None
        reported = position.step in self.job.evaluated_steps and not counted
        return self.scored_step != position.step and (last or not reported)

    def _epoch(self, position: Position) -> Position:
        """What the position's cursor leaves of its epoch."""
        began, exchanged = time.perf_counter(), self._exchanges.seconds
        stream = self.streams.take("train", position.cursor)
        first_step, whole_epoch = position.step, not position.cursor.rows_done
        with stream, self._watched(stream, "training"):
            for given in self._ahead(in_step(stream, self.empty, self.session.control, since=began)):
                self._profile.before_step(position.step + 1)
                self.learner.rates.set(position.step, self.learner.optimizer, *self._learning_rates(position.step))
                loss, logits = self.learner.step(given.batch, given.share, position.step)
                seconds, exchanged = time.perf_counter() - began, self._exchanges.seconds - exchanged
                self.position = position = position.after(given, seconds)
                self.window.add(given, loss, logits, seconds, exchanged)
                self.total_steps = position.step + self._steps_left(position, stream)
                self.position = position = self._after_step(position, given)
                if given.stop:
                    self._stop(position.merged(self.session.control))
                if self.ended is not None:
                    break
                if stream.batches_left * seconds < PREPARE_AHEAD_S:
                    self._prepare_next(position)
                began, exchanged = time.perf_counter(), self._exchanges.seconds
        if whole_epoch and position.step == first_step:
            names = ", ".join(map(str, data_sets(self.config.data.train)))
            raise TrainError(
                f"no row to train on: of the {self.job.epoch_rows(position.cursor):,} rows of {names} none passed the "
                "filters and could be used; check the filters, or the rows with `rayrec data check`"
            )
        if not self.window.empty:
            self._log(position)
        return position.merged(self.session.control)

    def _ahead(self, steps: Iterator[StepInput]) -> Iterator[StepInput]:
        """The steps' inputs on the device; on a GPU the next ones are on their way while one is trained on."""
        device = self.session.device
        if device.type == "cpu":
            return steps
        return TrainPipeline[StepInput](
            self.learner.model, features=lambda given: given.batch.sparse, move=lambda given: given.on(device)
        ).ahead(steps)

    def _steps_left(self, position: Position, stream: Stream) -> int:
        """To the end of the run, as far as it is known how many rows are left out."""
        per_epoch = self.job.epoch_rows(position.cursor) * stream.share_given / self.config.trainer.batch_size
        return stream.batches_left + (self.last_epoch - position.epoch) * math.ceil(per_epoch)

    def _prepare_next(self, position: Position) -> None:
        """Let reading begin for what comes after this epoch."""
        if self.job.eval is not None:
            self.streams.prepare("eval", self._eval_rows(position))
        if position.epoch < self.last_epoch:
            self.streams.prepare("train", position.next_epoch(self.job.periods).cursor)

    def _eval_rows(self, position: Position) -> Cursor:
        """What the model is evaluated on in this epoch."""
        periods, at = self.job.periods, position.cursor.only
        only = None if periods is None or at is None else periods.evaluated_after(at)
        return Cursor.start(position.epoch, only)

    def _after_step(self, position: Position, given: StepInput) -> Position:
        if (written := self._profile.after_step(position.step)) is not None:
            self.report_event("profile", written)
        if self._lines.is_due(position.step, given.clock):
            self._log(position, **self._tables(given))
        if self.job.eval is not None and self._evaluations.is_due(position.step, given.clock):
            if self.config.storage.keep_best is not None:
                self._save(position.merged(self.session.control), to_score=self.config.trainer.eval_rows is None)
            position = self._evaluate(position, self.config.trainer.eval_rows, within_epoch=True)
            self._evaluations.restart()
        if self.saver.every.is_due(position.step, given.clock):
            self._save(position.merged(self.session.control))
            self._report_skipped()
        self.saver.report_ended()
        self._report_progress(position)
        return position

    def _learning_rates(self, step: int) -> tuple[float, float]:
        """Those of the dense parameters and of the tables in a step, counted from 0."""
        dense, sparse = self.config.optimizers.dense, self.config.optimizers.sparse
        part = 0.5**self.position.halvings
        return part * dense.lr * dense.schedule.factor(step), part * sparse.lr * sparse.schedule.factor(step)

    def _stop(self, position: Position) -> NoReturn:
        """End between two steps, with a checkpoint of the position of all ranks.

        Raises:
            StopRequested: the run is over for now.
            RankError: the workers are to be started again.
        """
        self._save_last(position)
        sink, rank = self.session.sink, self.session.rank
        if (reason := self.session.control.gather(sink.restart_reason() if rank == 0 else None)[0]) is not None:
            raise RankError(f"stopped at step {position.step} to start again: {reason}", retry=True)
        raise StopRequested(f"stopped at step {position.step}, whose checkpoint is complete")

    @contextmanager
    def _stopping(self, position: Position, within_epoch: bool = False) -> Iterator[None]:
        """A stop that is requested in the body ends the run at this position; raises as `_stop`."""
        try:
            yield
        except StopRequested:
            self._stop(position.merged(self.session.control) if within_epoch else position)

    def _tables(self, given: StepInput) -> dict[str, Any]:
        """What rank 0's batch looks up in each table, once a minute: a record of many tables is long."""
        if self.session.rank or time.monotonic() - self._tables_told_at < TABLES_EVERY_S:
            return {}
        self._tables_told_at = time.monotonic()
        return {"tables": touched(given.batch.sparse, ((table.name, table.features) for table in self.config.tables))}

    def _log(self, position: Position, **more: Any) -> None:
        self.figures = self.window.close(position.step)
        dense, sparse = self._learning_rates(position.step - 1)
        norm = self.learner.gradient_norm()
        more |= {"stall_fraction": self._stalls.close(), "gradient_norm": norm}
        self._report("train", position, **self.figures, lr={"dense": dense, "sparse": sparse}, **more)
        self.guards.check(position.step, self.figures)

    def _evaluate(self, position: Position, most_rows: int | None = None, *, within_epoch: bool = False) -> Position:
        """Score, report, and return the position with what became the best.

        Args:
            within_epoch: the position is this rank's, not that of all ranks.
        """
        stream = self.streams.take("eval", self._eval_rows(position))
        with (
            self._stopping(position, within_epoch),
            self._watched(stream, "evaluation"),
            self._stalls.measured(),
        ):
            scores = evaluate(self.learner, stream, self.config, self.session, most_rows, self.item_counts())
            if self.config.data.eval_sets and most_rows is None:
                scores["sets"] = {name: self._score_set(name) for name in self.config.data.eval_sets}
        self._report("eval", position, **scores, **({} if most_rows is None else {"partial": True}))
        self.scores = scores
        if most_rows is None:
            self.scored_step = position.step
            self.saver.note_scores(position, scores)
        early = self.config.trainer.early_stopping
        if early is not None and self.ended is None and self.config.trainer.counts_early(most_rows):
            best = position.best.after(scores, position.step, early, self.config.trainer.own_metrics)
            position = replace(position, best=best)
            self.ended = position.best.end(early)
            if self.ended is not None:
                self._report("event", position, event="ended", message=f"ends at step {position.step}: {self.ended}")
        return position

    def _score_set(self, name: str) -> dict[str, Any]:
        """Figures on another set than `data.eval`.

        Raises:
            StopRequested: in the middle of it.
        """
        stream = self.streams.take(name, EVAL_ROWS)
        with self._watched(stream, "evaluation"):
            return evaluate(self.learner, stream, self.config, self.session, counts_I=self.item_counts())

    def item_counts(self) -> torch.Tensor | None:
        """Of a retriever's items in the training rows, read once."""
        retriever = self.learner.model.module
        if self._counts_I is None and self.job.popular and isinstance(retriever, Retriever):
            stream = self.streams.take("popular", EVAL_ROWS)
            self._counts_I = item_counts(retriever, stream, self.empty, self.session)
        return self._counts_I

    def _test(self, position: Position) -> None:
        """The evaluation of the trained model on `data.test`."""
        if self.config.data.test is None:
            return
        with self._stopping(position):
            self.test = self._score_set(TEST)
        figures = ((name, self.test.get(name)) for name in ("auc", "ne", "logloss", "rmse", "r2"))
        text = ", ".join(f"{name} {value:.4f}" for name, value in figures if value is not None)
        self._report("event", position, event="test", message=f"test set: {text} on {self.test['samples']:,} rows")

    def _save(self, position: Position, to_score: bool = False) -> None:
        """Begin a checkpoint; `position` is that of all ranks.

        Args:
            to_score: an evaluation of it comes next.

        Raises:
            RankError: the loss or a dense parameter is not finite any more; nothing is written.
        """
        with self._stalls.measured(), self._as_saved(position) as kept:
            self.saver.save(position, self.learner, kept, to_score)

    def _save_last(self, position: Position) -> None:
        """A checkpoint of the position of all ranks, complete when this returns, unless its step has one.

        Raises:
            RankError: as `_save`.
        """
        if self.saved is None or self.saved.step != position.step:
            with self._as_saved(position) as kept:
                self.saved = self.saver.save_last(position, self.learner, kept)

    @contextmanager
    def _as_saved(self, position: Position) -> Iterator[dict[str, torch.Tensor]]:
        """The model as checkpoints hold it, while the body runs; gives what they hold beside it and its optimizers.

        Raises:
            RankError: the loss or a dense parameter is not finite any more.
        """
        self.window.check(position.step, self.learner.is_finite())
        kept = {**self.window.state(), **self.learner.dense.state()}
        with self.learner.dense.averaged():
            yield kept

    def _report_checkpoint(self, step: int, event: str, message: str) -> None:
        self._report("event", replace(self.position, step=step), event=event, message=message)

    def report_event(self, event: str, message: str) -> None:
        """Report an event at the current position."""
        self._report("event", self.position, event=event, message=message)

    @contextmanager
    def _watched(self, stream: Stream, what: str) -> Iterator[None]:
        """Report rows that a stream skips: at its end, and when too many of them stop the run."""
        outer, self.skipped = self.skipped, SkippedRows(stream, self.session.control, what)
        try:
            yield
        except RankError:
            self._report_skipped()
            raise
        finally:
            inner, self.skipped = self.skipped, outer
        self._report_skipped(inner)

    def _report_skipped(self, skipped: SkippedRows | None = None) -> None:
        skipped = skipped or self.skipped
        event = None if skipped is None else skipped.event(self.position.epoch)
        if event is not None:
            self._report("event", self.position, **event)

    def _report_start(self) -> None:
        resumed = self.saver.resumed
        step = None if resumed is None else resumed.step
        if self.session.rank == 0:
            nodes = sorted({machine.node for machine in self.session.machines})
            begin = {"kind": "begin", "resumed_step": step, "world_size": self.session.world_size, "nodes": nodes}
            self.session.sink.put(begin)
            dense = sum(p.numel() for p in self.learner.model.other_parameters().values())
            decision = self.learner.decision
            memory = build.plan_memory(decision.plan, self.config, decision.layout.group_size, dense)
            planned = planned_for(decision.plan, self.session.machines, self.job.calibration, decision.layout)
            more = {"memory": memory, "time": build.plan_time(decision.estimate), "planned_for": planned}
            more |= decision.plan_entry(self.config.sharding.sync_every)
            self.session.sink.put({"kind": "plan", "plan": {**decision.plan.to_dict(), **more}})
        self.saver.report_start()
        if self.job.periods is not None and self.position.cursor.only is not None:
            text = self.job.periods.report(self.position.cursor.only, self.position.trained)
            named = resumed is None or "only" in resumed.extra["position"]["cursor"]
            self.report_event("periods", text if named else f"{text} (by its number: an earlier rayrec's checkpoint)")

    def _report_progress(self, position: Position) -> None:
        if time.monotonic() - self._reported_at >= PROGRESS_EVERY_S:
            self._reported_at = time.monotonic()
            self._report("progress", position, epochs=self.config.trainer.epochs, total_steps=self.total_steps)

    def _report(self, kind: str, position: Position, **values: Any) -> None:
        """Sends a record to the driver, on rank 0."""
        if self.session.rank == 0:
            at = {"step": position.step, "epoch": position.epoch}
            if kind == "train":
                at["samples"] = position.samples
            self.session.sink.put({"kind": kind, "time": time.time(), **at, **values})

    def _outcome(self, position: Position) -> dict[str, Any]:
        return {
            "eval": self.scores,
            "test": self.test,
            "train": {
                "loss": self.figures.get("loss"),
                **{name: self.figures.get(name) for name in self.figures.keys() & {"rmse", "r2"}},
                "ne": self.figures.get("ne"),
                "auc": self.figures.get("auc"),
                "samples": position.samples,
                "skipped": position.skipped,
                "seconds": round(position.seconds, 3),
                "data_wait_fraction": position.wait_s / max(position.seconds, 1e-9),
            },
            "world_size": self.session.world_size,
            "epochs": position.epoch + 1,
            "ended": self.ended,
            "steps": position.step,
            "samples_per_second": position.samples / max(position.seconds, 1e-9),
            "checkpoint": None if self.saved is None else self.saved.path,
        }


def fit(job: Job, session: Session) -> dict[str, Any]:
    """Train to the last epoch.

    Raises:
        NotFiniteError: the loss is not finite, and the learning rates have been halved as often as they may.
    """
    halvings = 0
    while True:
        with Streams(job, session) as streams:
            loop = Loop(job, session, streams, halvings)
            try:
                return loop.run()
            except NotFiniteError as error:
                halvings = loop.position.halvings + 1
                if halvings > job.config.trainer.guards.halvings:
                    raise
                message = f"{error}; going back to the last checkpoint with learning rates times {0.5**halvings:g}"
                loop.report_event("halved", message)
        del loop
        gc.collect()  # the model is part of reference cycles, and there is no room for two


def score_checkpoint(job: Job, session: Session) -> dict[str, Any]:
    """Figures of a checkpoint, the job's or the newest one, on the evaluation rows."""
    with Streams(job, session) as streams:
        loop = Loop(job, session, streams)
        learner = loop.learner = loop.load()
        resumed = loop.saver.resumed
        if resumed is None:  # the driver has found one
            raise ValueError(f"{job.checkpoints}: the checkpoint was removed meanwhile; run the command again")
        counts_I, stream = loop.item_counts(), streams.take("eval", EVAL_ROWS)
        scores = evaluate(learner, stream, job.config, session, counts_I=counts_I)
    at = {"step": resumed.step, "checkpoint": resumed.path, "data": str(job.config.data.eval)}
    return {**scores, **at}
