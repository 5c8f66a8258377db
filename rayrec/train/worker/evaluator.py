"""The evaluations of a run: on all evaluation rows or the first ones, on `data.eval_sets`, and on the test set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rayrec.checkpoint import Checkpoint
from rayrec.data import Cursor, empty_batch
from rayrec.models import Retriever
from rayrec.train.worker.evaluation import evaluate, item_counts
from rayrec.train.worker.learner import Learner
from rayrec.train.worker.lockstep import RankError
from rayrec.train.worker.position import Position
from rayrec.train.worker.reporter import Reporter
from rayrec.train.worker.seen_items import SeenItems
from rayrec.train.worker.session import TEST, Job, Session
from rayrec.train.worker.streams import Streams

EVAL_ROWS = Cursor.start(0)


class Evaluator:
    """Evaluates the model of a run. All methods are collectives.

    Attributes:
        scores: metrics of the last evaluation.
        scored_step: step of the last evaluation of all rows.
    """

    def __init__(self, job: Job, session: Session, streams: Streams, learner: Learner, reporter: Reporter) -> None:
        self._job, self._session, self._streams = job, session, streams
        self._learner, self._reporter = learner, reporter
        self.scores: dict[str, Any] | None = None
        self.scored_step: int | None = None
        # Steps after the resumed checkpoint are trained again, and their checkpoints need new scores.
        self._evaluated = {step for step in job.evaluated_steps if step <= reporter.position.step}
        self._counts_I: torch.Tensor | None = None
        self._seen_items: SeenItems | None = None

    def check(self, position: Position) -> None:
        """Read and score one batch of each evaluation set, so that a broken set ends the run before its first step.

        Changes nothing that training depends on: neither weights nor random states.

        Raises:
            RankError: on every rank: the rows of a set cannot be read or scored, or `data.eval` or
                `data.test` has none.
        """
        config, control = self._job.config, self._session.control
        # A stop request is answered at the first step, where a checkpoint of the position can be saved.
        session = replace(self._session, control=replace(control, stop_requested=lambda: False))
        for name in ("eval", *self._job.sets):
            option = {"eval": "data.eval", TEST: "data.test"}.get(name, f"data.eval_sets.{name}")
            stream = self._streams.take(name, self.rows(position) if name == "eval" else EVAL_ROWS)
            try:
                with _same_random_states(session.device):
                    _, rows = evaluate(self._learner, stream, config, session, max_rows=1, seen=self._seen())
            except RankError as error:
                raise RankError(f"{option} cannot be evaluated: {error}", error.retry) from error
            if not rows and name in ("eval", TEST):  # a named set may be empty, for example of a new country
                raise RankError(
                    f"{option} cannot be evaluated: it has no usable rows. Check its path and filters, or the rows "
                    "with `rayrec data check`."
                )

    def evaluate(self, position: Position, max_rows: int | None = None) -> dict[str, Any]:
        """Evaluate at a position and report the metrics; includes `data.eval_sets` if all rows are read.

        Args:
            max_rows: approximate number of rows to read; None: all.

        Raises:
            StopRequested: the run stops.
        """
        config, rows = self._job.config, self.rows(position)
        share = 1.0 if config.data.windows is None else config.data.windows.eval_share
        some_rows = math.ceil(share * self._job.epoch_rows(rows)) if share < 1 and rows.only is not None else None
        scores = self._score("eval", rows, some_rows if max_rows is None else max_rows) | self._job.window(rows)
        if config.data.eval_sets and max_rows is None:
            scores["sets"] = {name: self._score(name, EVAL_ROWS) for name in config.data.eval_sets}
        self._reporter.record("eval", position, **scores, **({} if max_rows is None else {"partial": True}))
        self.scores = scores
        if max_rows is None:
            self.scored_step = position.step
        return scores

    def is_missing(self, position: Position, last: bool) -> bool:
        """Whether the evaluation of all rows at the end of an epoch is missing.

        Args:
            last: the run ends with this epoch, so its result needs the metrics.
        """
        # Early stopping and a plateau count every evaluation, so evaluations of an earlier launch are repeated.
        config = self._job.config
        counted = config.trainer.early_stopping is not None or config.optimizers.plateau is not None
        reported = position.step in self._evaluated and not counted
        return self.scored_step != position.step and (last or not reported)

    def test(self, position: Position, learner: Learner, checkpoint: Checkpoint, which: str) -> dict[str, Any]:
        """Evaluate a checkpoint on `data.test` and report the metrics.

        Args:
            learner: has the weights of the checkpoint.
            which: why this checkpoint was chosen, for the message.

        Returns:
            The metrics, with `step` and `checkpoint`.

        Raises:
            StopRequested: the run stops.
        """
        metrics = self._score(TEST, EVAL_ROWS, learner=learner)
        names: tuple[str, ...] = ("auc", "ne", "logloss", "rmse", "r2")
        if "mrr" in metrics:
            suffix = "/unseen" if "mrr/unseen" in metrics else ""
            names = tuple(f"{name}{suffix}" for name in ("hr@10", "ndcg@10", "mrr"))
        values = ((name, metrics.get(name)) for name in names)
        text = ", ".join(f"{name} {value:.4f}" for name, value in values if value is not None)
        message = f"test set: {text} on {metrics['samples']:,} rows (checkpoint of step {checkpoint.step}, {which})"
        self._reporter.record("event", position, event="test", message=message)
        return {**metrics, "step": checkpoint.step, "checkpoint": checkpoint.path}

    def score_all(self) -> dict[str, Any]:
        """Evaluate on all evaluation rows without reporting the metrics."""
        counts_I, stream = self._item_counts(), self._streams.take("eval", EVAL_ROWS)
        self._learner.synchronise()
        return evaluate(self._learner, stream, self._job.config, self._session, counts_I=counts_I, seen=self._seen())[0]

    def rows(self, position: Position) -> Cursor:
        """The rows to evaluate on in the epoch of a position."""
        periods, period = self._job.periods, position.cursor.only
        only = None if periods is None or period is None else periods.evaluated_after(period)
        return Cursor.start(position.epoch, only)

    def _score(
        self, name: str, rows: Cursor, max_rows: int | None = None, learner: Learner | None = None
    ) -> dict[str, Any]:
        stream = self._streams.take(name, rows)
        config, learner = self._job.config, learner or self._learner
        with self._reporter.watching(stream, "evaluation"):
            learner.synchronise()
            return evaluate(learner, stream, config, self._session, max_rows, self._item_counts(), self._seen())[0]

    def _seen(self) -> SeenItems | None:
        """The items of `trainer.ranking.seen_file`, read once. A collective."""
        retriever = self._learner.model.module
        if self._seen_items is None and isinstance(retriever, Retriever):
            config, session = self._job.config, self._session
            read = partial(SeenItems.read, config, retriever.item, session.device)
            self._seen_items = session.control.together(read)
        return self._seen_items

    def _item_counts(self) -> torch.Tensor | None:
        """Occurrences of each item of a retriever in the training rows; counted once."""
        retriever = self._learner.model.module
        if self._counts_I is None and self._job.popular and isinstance(retriever, Retriever):
            stream = self._streams.take("popular", EVAL_ROWS)
            empty = empty_batch(self._job.config.training_schema)
            self._counts_I = item_counts(retriever, stream, empty, self._session)
        return self._counts_I

    def count_candidates(self, position: Position) -> None:
        """Count items in the training rows, for a loss with `counts: data` that has no counts yet. A collective.

        Raises:
            StopRequested: the run stops.
        """
        retriever = self._learner.model.module
        if not isinstance(retriever, Retriever) or not retriever.loss.lacks_counts:
            return
        stream = self._streams.take("popular", Cursor.start(0, position.cursor.only))
        empty = empty_batch(self._job.config.training_schema)
        counts_I = item_counts(retriever, stream, empty, self._session, candidates=True)
        self._session.control.together(lambda: retriever.loss.set_counts(counts_I))
        if not retriever.loss.hard_negatives and self._job.popular:
            self._counts_I = counts_I


@contextmanager
def _same_random_states(device: torch.device) -> Iterator[None]:
    """Restore torch's random states of the CPU and of `device` after the body."""
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
        yield
