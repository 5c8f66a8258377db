"""The training loop of one rank: epochs of steps, with logging, checkpoints and evaluations. Every rank runs it in
lockstep."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch

from rayrec.checkpoint import Checkpoint
from rayrec.data import data_sets, empty_batch
from rayrec.distributed import TrainPipeline
from rayrec.distributed.comm.trace import listen
from rayrec.models import Retriever
from rayrec.train.errors import TrainError
from rayrec.train.run.log import Record
from rayrec.train.worker.background import BackgroundEvaluations
from rayrec.train.worker.evaluator import Evaluator
from rayrec.train.worker.follow import Following
from rayrec.train.worker.guards import Guards
from rayrec.train.worker.learner import Learner, make_learner
from rayrec.train.worker.limits import Limit, planned_steps, reached, reason
from rayrec.train.worker.lockstep import Every, Load, NotFiniteError, RankError, StepInput, StopRequested, in_step
from rayrec.train.worker.memory import is_out_of_memory, out_of_memory
from rayrec.train.worker.position import START, Position
from rayrec.train.worker.profiling import ExchangeClock, Profile, Stalls
from rayrec.train.worker.reporter import Reporter
from rayrec.train.worker.saver import Saver
from rayrec.train.worker.session import Job, Session
from rayrec.train.worker.step_hooks import StepHooks
from rayrec.train.worker.streams import Stream, Streams
from rayrec.train.worker.window import Window, touched, uneven_lookups

PREPARE_AHEAD_S = 5.0
TABLES_EVERY_S = 60.0


def fit(job: Job, session: Session) -> dict[str, Any]:
    """Train to the last epoch, and return the outcome for the driver.

    Raises:
        NotFiniteError: the loss is not finite, and the learning rates were already halved as often as allowed.
        OutOfMemory: the memory of this rank's device or host ran out.
    """
    halvings = 0
    while True:
        with Streams(job, session) as streams:
            reporter = Reporter(job, session)
            try:
                return _fit_from_checkpoint(job, session, streams, reporter, halvings)
            except NotFiniteError as error:
                halvings = reporter.position.halvings + 1
                if halvings > job.config.trainer.guards.halvings:
                    raise
                factor = 0.5**halvings
                message = f"{error}; returning to the last checkpoint with learning rates times {factor:g}"
                reporter.event("halved", message)
        # The model is in reference cycles, and memory may not suffice for a second model.
        gc.collect()


def _fit_from_checkpoint(
    job: Job, session: Session, streams: Streams, reporter: Reporter, halvings: int
) -> dict[str, Any]:
    """Train from the newest undamaged checkpoint.

    Args:
        halvings: minimum number of halvings of the learning rates; the checkpoint may have more.
    """
    learner: Learner | None = None
    ended: Exception | None = None
    saver = Saver(job, session, reporter.event)
    try:
        reporter.position = position = _resumed_position(job, saver, halvings)
        follows = job.config.data.follow is not None
        if not follows:
            streams.prepare("train", position.cursor)
        learner, tensors = _load(job, session, saver)
        loaded = _resumed_position(job, saver, halvings)
        if loaded != position:  # the newest checkpoint was damaged
            reporter.position = loaded
            if not follows:
                streams.close()
                streams.prepare("train", loaded.cursor)
        return Loop(job, session, streams, saver, learner, tensors, reporter).run()
    except Exception as error:
        ended = error
        if is_out_of_memory(error):
            raise out_of_memory(error, learner, session.device, session.rank) from error
        raise
    finally:
        saver.close(ended)


def _resumed_position(job: Job, saver: Saver, halvings: int) -> Position:
    position = START if saver.resumed is None else Position.from_dict(saver.resumed.extra["position"])
    position = position.among(job.periods)
    if job.config.data.follow is not None and position.cursor.over:  # the files of the chunk may be gone
        position = position.next_epoch()
    return replace(position, halvings=max(position.halvings, halvings))


def _load(job: Job, session: Session, saver: Saver) -> tuple[Learner, Mapping[str, torch.Tensor]]:
    """The sharded model from the newest undamaged checkpoint, and its additional tensors. A collective."""
    learner, tensors = saver.load(make_learner(job, session))
    learner.dense.load_state(tensors)
    return learner, tensors


def score_checkpoint(job: Job, session: Session) -> dict[str, Any]:
    """Metrics of the job's checkpoint (default: the newest one) on the evaluation rows."""
    with _evaluator_of(job, session) as (evaluator, checkpoint):
        scores = evaluator.score_all()
    return {**scores, "step": checkpoint.step, "checkpoint": checkpoint.path, "data": str(job.config.data.eval)}


def score_as_training(job: Job, session: Session, max_rows: int | None) -> dict[str, Any]:
    """Metrics of the job's checkpoint, evaluated and reported as training does at the checkpoint's position.

    Args:
        max_rows: approximate number of rows to read; None: all, and those of `data.eval_sets`.
    """
    with _evaluator_of(job, session) as (evaluator, checkpoint):
        return evaluator.evaluate(Position.from_dict(checkpoint.extra["position"]), max_rows)


@contextmanager
def _evaluator_of(job: Job, session: Session) -> Iterator[tuple[Evaluator, Checkpoint]]:
    """An evaluator with the weights of the job's checkpoint (default: the newest one), and this checkpoint."""
    with Streams(job, session) as streams:
        reporter = Reporter(job, session)
        saver = Saver(job, session, reporter.event)
        learner, _ = _load(job, session, saver)
        if saver.resumed is None:  # the driver has listed it
            raise ValueError(f"{job.checkpoints}: the checkpoint was removed meanwhile; run the command again")
        reporter.position = Position.from_dict(saver.resumed.extra["position"])
        yield Evaluator(job, session, streams, learner, reporter), saver.resumed


class Loop:
    """One rank's training, from a checkpoint to the last epoch.

    Args:
        learner: restored from the checkpoint that `saver` resumes from.
        tensors: additional tensors of that checkpoint.
        reporter: holds the position; initially the checkpoint's position.
    """

    def __init__(
        self,
        job: Job,
        session: Session,
        streams: Streams,
        saver: Saver,
        learner: Learner,
        tensors: Mapping[str, torch.Tensor],
        reporter: Reporter,
    ) -> None:
        self.job, self.session, self.streams, self.config = job, session, streams, job.config
        self.saver, self.learner, self.reporter = saver, learner, reporter
        self.evaluator = Evaluator(job, session, streams, learner, reporter)
        self.background: BackgroundEvaluations | None = None  # evaluations that training does not wait for
        if job.eval is not None and self.config.trainer.evaluate == "background":
            self.background = BackgroundEvaluations(session, saver, reporter, self.config.trainer.hang_s)
        self.following: Following | None = None
        if self.config.data.follow is not None:
            self.following = Following(job, session, lambda text: reporter.event("waiting", text))
        self.last_epoch = self._last_epoch(reporter.position)
        self.saved: Checkpoint | None = None  # the last complete one
        schema, trainer = self.config.data_schema, self.config.trainer
        self.scores_rows = not isinstance(learner.model.module, Retriever)  # a retriever has no metrics of labels
        kinds = schema.label_kinds if self.scores_rows else None
        self.window = Window(session.device, session.control, session.group, schema.task_names, kinds)
        self.window.load_state(tensors)
        self.empty = empty_batch(self.config.training_schema)
        self.metrics: dict[str, Any] = {}  # of the last logging line
        self._said_uneven = False
        self.total_steps = 0
        self.hooks = session.control.together(
            lambda: StepHooks(trainer, schema, session.control, session.device, self.scores_rows)
        )
        self.guards = Guards(trainer.guards)
        self.test: dict[str, Any] | None = None
        self.ended: str | None = None  # why training ends before the last epoch
        self.limit: Limit | None = None  # that ends it
        self._planned_steps = planned_steps(trainer, job.train.rows)
        if self.following is not None:  # without an end, except by max_steps
            self._planned_steps = trainer.max_steps or 0
        self._began = 0.0  # rank 0's clock at `elapsed_s` 0
        self._lines = Every(trainer.log_every)
        self._evaluations = Every(trainer.eval_every)
        self._exchanges = ExchangeClock()
        self._stalls = Stalls()
        self._profile = Profile(job.checkpoints, trainer.profile if session.rank == 0 else None, session.device)
        self._tables_at = -math.inf

    def run(self) -> dict[str, Any]:
        """Train; returns the outcome for the driver."""
        try:
            with listen(self._exchanges):
                return self._run(self.reporter.position)
        finally:
            self._profile.close()
            if self.following is not None:
                self.following.close()

    def _run(self, position: Position) -> dict[str, Any]:
        self.reporter.begin(self.saver.resumed, self.learner)
        self.saver.report_start()
        self.reporter.periods(self.saver.resumed)
        if self.job.eval is not None:
            self.evaluator.check(position)
        self.evaluator.count_candidates(position)
        position = self._evaluate_resumed(position)
        self._began = self.session.control.gather(time.monotonic())[0] - position.elapsed_s
        # The last launch may have ended between its last checkpoint and its result.
        self._end_at_limit(position)
        self._end_early(position)
        while True:
            if self.following is not None and self.ended is None:
                position = self._follow(self.following, position)
            if self.ended is None:
                position = self._epoch(position)
            last = position.epoch >= self.last_epoch or self.ended is not None
            # A chunk of a followed folder may be small: only `trainer.eval_every` evaluates in between.
            ends_period = self.following is None and not (position.epoch + 1) % self.config.data.eval_every
            evaluated = self.job.eval is not None and (last or ends_period)
            if last:
                self._save_last(position)
            elif self.config.storage.keep_best is not None and evaluated and self.background is None:
                self._save(position)
            if evaluated and self.evaluator.is_missing(position, last):
                position = self._evaluate(position) if self.background is None else self._request(position)
            if last and self.background is not None:
                position = self._await_evaluations(position)
            if last or self.ended is not None:
                self._save_last(position)
                if self.config.data.test is not None:
                    self.test = self._test(position)
                return self._outcome(position)
            position = position.next_epoch(self.job.periods)

    def _last_epoch(self, position: Position) -> int:
        periods, period = self.job.periods, position.cursor.only
        if self.following is not None:
            return sys.maxsize
        if periods is None or period is None:
            return self.config.trainer.epochs - 1
        return position.epoch + len(periods.remaining(period[1]))

    def _follow(self, following: Following, position: Position) -> Position:
        """Wait for the rows of the position's epoch; ends the run if no more are wanted."""
        at, every = position, self.config.trainer.checkpoint_every

        def while_waiting(load: Load) -> bool:
            nonlocal at
            at = self.reporter.position = replace(at, elapsed_s=load.clock - self._began)
            if load.stop:
                self._stop(at)
            if load.evaluated and self.background is not None:
                at = self._use(at, self.background.take())
            seconds = None if every is None else every.seconds
            if seconds is not None and self.saver.is_behind(at.step) and self.saver.every.is_due(at.step, load.clock):
                self._save(at)
            self.saver.report_ended()
            self._end_at_limit(at)
            return self.ended is None

        chunk = following.take(position.epoch, while_waiting)
        if chunk is not None:
            self.streams.train = chunk.manifest
        elif following.ended is not None:
            self._end(at, following.ended)
        return at

    def _epoch(self, position: Position) -> Position:
        """Train on the rest of the position's epoch."""
        start, exchange_s = time.perf_counter(), self._exchanges.seconds
        stream = self.streams.take("train", position.cursor)
        first_step, is_whole = position.step, not position.cursor.rows_done
        with stream, self.reporter.watching(stream, "training"):
            for step in self._on_device(in_step(stream, self.empty, self.session.control, since=start)):
                self._profile.before_step(position.step + 1)
                self.learner.rates.set(position.step, self.learner.optimizer, *self._learning_rates(position))
                loss, logits = self.learner.step(step.batch, step.share, position.step)
                seconds, exchange_s = time.perf_counter() - start, self._exchanges.seconds - exchange_s
                self.reporter.position = position = position.after(step, seconds, step.clock - self._began)
                self.window.add(step, loss, logits, seconds, exchange_s)
                self.hooks.after_step(position.step, step.batch, logits, loss)
                self.total_steps = position.step + self._steps_left(position, stream)
                self.reporter.position = position = self._after_step(position, step)
                self._end_at_limit(position)
                if step.stop:
                    self._stop(position.merged(self.session.control))
                if self.ended is not None:
                    break
                if stream.batches_left * seconds < PREPARE_AHEAD_S:
                    self._prepare_next(position)
                start, exchange_s = time.perf_counter(), self._exchanges.seconds
        may_be_empty = self.following is not None or (
            self.job.periods is not None and self.job.periods.spans is not None
        )
        if is_whole and position.step == first_step and not may_be_empty:
            names = ", ".join(map(str, data_sets(self.config.data.train)))
            raise TrainError(
                f"No training rows: all {self.job.epoch_rows(position.cursor):,} rows of {names} were filtered out or "
                "invalid. Check the filters, or the rows with `rayrec data check`."
            )
        if not self.window.empty:
            self._log(position)
        return position.merged(self.session.control)

    def _on_device(self, steps: Iterator[StepInput]) -> Iterator[StepInput]:
        """The inputs of steps on the device. On a GPU, the next input is copied during a step, unless tables have
        dynamic ids: then a step's rows are known, and reset, when the step before is done."""
        device, model, dynamic = self.session.device, self.learner.model.module, self.learner.dynamic
        if dynamic is not None:
            steps = dynamic.trained(steps, lambda: self.reporter.position.step)
        if isinstance(model, Retriever):
            numbered = enumerate(steps, model.loss.step)
            hosts = self.session.control.group
            steps = (replace(step, batch=model.prepare(step.batch, number, hosts)) for number, step in numbered)
        if dynamic is not None:
            return (step.on(device) for step in steps)
        if device.type == "cpu":
            return iter(steps)
        return TrainPipeline[StepInput](
            self.learner.model, features=lambda step: step.batch.looked_up, move=lambda step: step.on(device)
        ).ahead(steps)

    def _steps_left(self, position: Position, stream: Stream) -> int:
        """Expected steps to the end of the run; estimates the number of rows that filters drop."""
        trainer = self.config.trainer
        if self.following is not None:  # what comes is not known
            return stream.batches_left if trainer.max_steps is None else trainer.max_steps - position.step
        per_epoch = self.job.epoch_rows(position.cursor) * stream.share_given / trainer.batch_size
        steps = stream.batches_left + (self.last_epoch - position.epoch) * math.ceil(per_epoch)
        return steps if trainer.max_steps is None else min(steps, trainer.max_steps - position.step)

    def _prepare_next(self, position: Position) -> None:
        """Start to read the rows after this epoch: of the evaluation and of the next epoch."""
        if self.job.eval is not None and self.background is None and self.following is None:
            self.streams.prepare("eval", self.evaluator.rows(position))
        if position.epoch < self.last_epoch and self.following is None:
            self.streams.prepare("train", position.next_epoch(self.job.periods).cursor)

    def _after_step(self, position: Position, step: StepInput) -> Position:
        """Log, evaluate and save after a step, if each is due."""
        if (message := self._profile.after_step(position.step)) is not None:
            self.reporter.event("profile", message)
        due = self._lines.is_due(position.step, step.clock)
        if due or self._lines.is_early(position.step):
            self._log(position, guarded=due, **self._tables(step))
        if step.evaluated and self.background is not None:
            position = self._use(position, self.background.take())
        if self.job.eval is not None and self._evaluations.is_due(position.step, step.clock):
            max_rows = self.config.trainer.eval_rows
            if self.background is not None:
                self._request(position.merged(self.session.control), max_rows)
            elif self.config.storage.keep_best is not None and max_rows is None:
                self._save(position.merged(self.session.control), to_score=True)
            if self.background is None:
                position = self._evaluate(position, max_rows, within_epoch=True)
            self._evaluations.restart()
        if self.saver.every.is_due(position.step, step.clock):
            self._save(position.merged(self.session.control))
            self.reporter.skipped_rows()
        elif self.saver.increments.is_due(position.step, step.clock):
            with self._stalls.measured():
                merged = position.merged(self.session.control)
                with self._as_saved(merged) as tensors:
                    self.saver.save_increment(merged, self.learner, tensors)
        self.saver.report_ended()
        self.reporter.position = position
        self.reporter.progress(self.total_steps)
        return position

    def _end_at_limit(self, position: Position) -> None:
        """End the run if it has reached a limit."""
        limit = reached(self.config.trainer, position.step, position.elapsed_s)
        if limit is not None and self.ended is None:
            self.limit = limit
            self._end(position, reason(limit))

    def _end(self, position: Position, why: str) -> None:
        """End the run before its last epoch, at a position: with a checkpoint, an evaluation and a result."""
        self.ended = why
        self.reporter.record("event", position, event="ended", message=f"ends at step {position.step}: {why}")

    def _learning_rates(self, position: Position) -> tuple[float, float]:
        """Learning rates of the dense parameters and of the tables in the step after a position."""
        dense, sparse = self.config.optimizers.dense, self.config.optimizers.sparse
        factor = 0.5**position.halvings * position.plateau.factor(self.config.optimizers.plateau)
        at = position.step, self._planned_steps
        return factor * dense.lr * dense.schedule.factor(*at), factor * sparse.lr * sparse.schedule.factor(*at)

    def _log(self, position: Position, *, guarded: bool = True, **values: Any) -> None:
        self.metrics = self.window.close(position.step) | self.hooks.take_metrics()
        dense, sparse = self._learning_rates(replace(position, step=position.step - 1))
        values |= {"stall_fraction": self._stalls.close(), "gradient_norm": self.learner.gradient_norm()}
        values |= self._lookups(position)
        values |= {} if self.following is None else self.following.values()
        if self.learner.dynamic is not None:
            values["dynamic_ids"] = self.learner.dynamic.take_statistics(self.session.control)
        self.reporter.record("train", position, **self.metrics, lr={"dense": dense, "sparse": sparse}, **values)
        if guarded:
            self.guards.check(position.step, self.metrics)

    def _lookups(self, position: Position) -> dict[str, Any]:
        """Where the ids of rank 0's batches were looked up since the last line: a fair sample, without an exchange."""
        counts = self.learner.take_sent_ids()
        if self.session.rank or len(counts) < 2 or not sum(counts):
            return {}
        text = uneven_lookups(counts)
        if text is not None and not self._said_uneven:
            self._said_uneven = True
            self.reporter.record("event", position, event="uneven", message=text)
        return {"lookups_by_rank": counts}

    def _tables(self, step: StepInput) -> dict[str, Any]:
        """Lookups of rank 0's batch in each table. At most once a minute, as the record is long for many tables."""
        if self.session.rank or time.monotonic() - self._tables_at < TABLES_EVERY_S:
            return {}
        self._tables_at = time.monotonic()
        tables = ((table.name, table.features) for table in self.config.tables)
        return {"tables": touched(step.batch.looked_up, tables)}

    def _evaluate(self, position: Position, max_rows: int | None = None, *, within_epoch: bool = False) -> Position:
        """Evaluate; returns the position with the best evaluation so far.

        Args:
            within_epoch: the position is this rank's, not yet merged over all ranks.
        """
        interrupted = replace(position, interrupted=self._counts(max_rows))
        with self._saving_at_stop(interrupted, within_epoch), self._stalls.measured():
            scores = self.evaluator.evaluate(position, max_rows)
        if max_rows is None:
            self.saver.note_scores(position.step, scores)
        position = self._counted(position, scores, max_rows, position.step)
        self._end_early(position)
        return position

    def _request(self, position: Position, max_rows: int | None = None) -> Position:
        """Save a checkpoint of the merged position and request its evaluation, for which training does not wait.

        Returns:
            The position.
        """
        assert self.background is not None
        self._save(position, to_score=True, score_rows=max_rows)
        self.background.request(position, max_rows)
        if max_rows is None:
            self.evaluator.scored_step = position.step
        return position

    def _use(self, position: Position, outcomes: Sequence[Record]) -> Position:
        """Use outcomes of background evaluations; returns the position with the best evaluation so far."""
        assert self.background is not None
        for outcome in outcomes:
            step, scores, name = outcome["step"], outcome.get("scores"), outcome["checkpoint"]
            # The run may have returned to a checkpoint before this one, and will not reach the same weights.
            if scores is not None and step <= position.step:
                if outcome["max_rows"] is None:
                    self.saver.note_scores(step, scores, name)
                self.evaluator.scores = scores
                position = self._counted(position, scores, outcome["max_rows"], step)
                self._end_early(position, step)
            self.background.release(name)
        return position

    def _await_evaluations(self, position: Position) -> Position:
        """Wait for the pending background evaluations at the end of the run, and use them."""
        assert self.background is not None
        with self._saving_at_stop(position), self._stalls.measured():
            for outcomes in self.background.remaining():
                position = self._use(position, outcomes)
        return position

    def _counts(self, max_rows: int | None) -> bool:
        """Whether early stopping or a plateau counts an evaluation of so many rows."""
        trainer = self.config.trainer
        watched = trainer.early_stopping is not None or self.config.optimizers.plateau is not None
        return watched and trainer.counts_early(max_rows)

    def _evaluate_resumed(self, position: Position) -> Position:
        """Repeat the evaluation of the checkpoint to resume from, if it was interrupted or is not in the position, and
        those in the background that were pending when it was saved."""
        resumed, trainer = self.saver.resumed, self.config.trainer
        if self.background is not None:
            if resumed is not None:
                self.background.resume(resumed.extra.get("evaluations", ()))
            if resumed is not None and (resumed.extra.get("to_score") or position.interrupted):
                rows = resumed.extra.get("score_rows")
                if self.saver.unscored or rows is not None or self.evaluator.is_missing(position, last=False):
                    self.background.request(position, rows)  # the driver does not repeat an evaluation of this launch
            return position
        if self.saver.unscored:
            return self._evaluate(position)
        if resumed is None or self.job.eval is None or position.counted >= position.step:
            return position
        if position.interrupted:
            return self._evaluate(position, trainer.eval_rows if trainer.eval_every is not None else None)
        if resumed.extra.get("to_score") and self._counts(None):
            return self._evaluate(position)
        return position

    def _counted(self, position: Position, scores: Mapping[str, Any], max_rows: int | None, step: int) -> Position:
        """The position with an evaluation in the state of early stopping and of the plateau. Counts a step once.

        Args:
            step: the evaluated step.
        """
        trainer, plateau = self.config.trainer, self.config.optimizers.plateau
        if self.ended is not None or not self._counts(max_rows) or position.counted >= step:
            return position
        own = trainer.own_metrics
        position = replace(position, counted=step)
        if trainer.early_stopping is not None:
            position = replace(position, best=position.best.after(scores, step, trainer.early_stopping, own))
        if plateau is not None:
            after = position.plateau.after(scores, step, plateau, own)
            if after.reductions > position.plateau.reductions:
                text = (
                    f"learning rates times {after.factor(plateau):g} after step {position.step}: {plateau.metric} has "
                    f"not improved in {plateau.patience} evaluations{_up_to(step, position)} (optimizers.plateau)"
                )
                self.reporter.record("event", position, event="plateau", message=text)
            position = replace(position, plateau=after)
        return position

    def _end_early(self, position: Position, step: int | None = None) -> None:
        """End the run if `trainer.early_stopping` says so.

        Args:
            step: the evaluated step; default: the position's.
        """
        early = self.config.trainer.early_stopping
        if early is not None and self.ended is None and (why := position.best.end(early)) is not None:
            self._end(position, why + ("" if step is None else _up_to(step, position)))

    def _test(self, position: Position) -> dict[str, Any]:
        """Evaluate the best checkpoint, or without `storage.keep_best` the last one, on `data.test`.

        Call it at the end of the run: it replaces the weights.
        """
        assert self.saved is not None, "the final checkpoint is saved before"
        learner, checkpoint, is_best = self.saver.load_best(self.learner, self.saved)
        best = self.config.storage.keep_best
        which = f"the best by {best.metric}" if best is not None and is_best else "the last one"
        with self._saving_at_stop(position):
            return self.evaluator.test(position, learner, checkpoint, which)

    @contextmanager
    def _saving_at_stop(self, position: Position, within_epoch: bool = False) -> Iterator[None]:
        """If a stop is requested in the body, end the run with a checkpoint of this position; raises like `_stop`."""
        try:
            yield
        except StopRequested:
            self._stop(position.merged(self.session.control) if within_epoch else position)

    def _stop(self, position: Position) -> NoReturn:
        """End between two steps, with a checkpoint of the position of all ranks.

        Raises:
            StopRequested: the run stops.
            RankError: the workers restart.
        """
        self._save_last(position)
        sink, rank = self.session.sink, self.session.rank
        reason = self.session.control.gather(sink.restart_reason() if rank == 0 else None)[0]
        if reason is not None:
            raise RankError(f"stopped at step {position.step} to restart: {reason}", retry=True)
        raise StopRequested(f"stopped at step {position.step} with a complete checkpoint")

    def _save(self, position: Position, to_score: bool = False, score_rows: int | None = None) -> None:
        """Start a checkpoint of the merged position of all ranks.

        Args:
            to_score: an evaluation of the checkpoint follows.
            score_rows: approximate number of its rows; None: all.

        Raises:
            NotFiniteError: the loss or a dense parameter is not finite; nothing is written.
        """
        with self._stalls.measured(), self._as_saved(position) as tensors:
            self.saver.save(position, self.learner, tensors, to_score, score_rows)

    def _save_last(self, position: Position) -> None:
        """Save the merged position of all ranks, unless its step has a checkpoint. Waits until it is complete.

        Raises:
            NotFiniteError: like `_save`.
        """
        if self.saved is None or self.saved.step != position.step:
            with self._as_saved(position) as tensors:
                self.saved = self.saver.save_last(position, self.learner, tensors)

    @contextmanager
    def _as_saved(self, position: Position) -> Iterator[dict[str, torch.Tensor]]:
        """Use the weights that checkpoints store, the averaged ones, in the model while the body runs.

        Yields:
            Tensors that a checkpoint stores besides the model and its optimizers.

        Raises:
            NotFiniteError: the loss or a dense parameter is not finite.
        """
        tensors = self.window.state(position.step, self.learner.is_finite()) | self.learner.dense.state()
        with self.learner.dense.averaged():
            yield tensors

    def _outcome(self, position: Position) -> dict[str, Any]:
        return {
            "eval": self.evaluator.scores,
            "test": self.test,
            "train": {
                "loss": self.metrics.get("loss"),
                **{name: self.metrics.get(name) for name in self.metrics.keys() & {"rmse", "r2"}},
                **{name: self.metrics.get(name) for name in (("ne", "auc") if self.scores_rows else ())},
                "samples": position.samples,
                "skipped": position.skipped,
                "seconds": round(position.seconds, 3),
                "data_wait_fraction": position.wait_s / max(position.seconds, 1e-9),
            },
            "world_size": self.session.world_size,
            "epochs": position.epoch + 1,
            "ended": self.ended,
            "limit": self.limit,
            "steps": position.step,
            "samples_per_second": position.samples / max(position.seconds, 1e-9),
            "checkpoint": None if self.saved is None else self.saved.path,
        }


def _up_to(step: int, position: Position) -> str:
    """For messages: the last evaluated step, if the run has gone on since."""
    return "" if step == position.step else f", the last of them in the background, of step {step}"
