"""One pass over the evaluation rows: metrics of all rows and of slices. Reads each row exactly once on any number of
ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch

from rayrec.data import Schema, empty_batch
from rayrec.data.mapping.rules import Vocabulary
from rayrec.data.mapping.schema import SparseFeature
from rayrec.data.mapping.vocabulary import ids_in, load_vocabulary
from rayrec.distributed import comm
from rayrec.metrics import BucketedMetrics, GroupedAuc, LabelMetrics
from rayrec.metrics.ranking import KS, BucketedRanks, Jagged, RankingMetrics, popularity_ranks, target_ranks
from rayrec.models import Batch, Retriever
from rayrec.models.retriever import EvalQueries
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.config.trainer import MetricConfig
from rayrec.train.worker.learner import Learner
from rayrec.train.worker.lockstep import Purpose, StopRequested, in_step
from rayrec.train.worker.own_metrics import OwnMetrics
from rayrec.train.worker.session import Session
from rayrec.train.worker.streams import Stream

BUCKET_S = {"hour": 3600, "day": 86_400, "week": 7 * 86_400}
POPULAR_ROWS = 1 << 20  # number of shuffled training rows in which items are counted
MONDAY_S = 4 * 86_400  # the first Monday: 1970-01-01 was a Thursday


class Scores:
    """Metrics over the evaluation rows.

    Args:
        schema: defines the labels, and whether rows have groups and times.
        own: custom metrics of the user (`trainer.metrics`).
        slices: names of features; `by_value` has the metrics of each of their values.
    """

    def __init__(
        self, schema: Schema, session: Session, own: Sequence[MetricConfig] = (), slices: Sequence[str] = ()
    ) -> None:
        self._session, self._names = session, schema.task_names
        self._all = LabelMetrics(schema.label_kinds, session.device, self._names)
        self._own = session.control.together(lambda: OwnMetrics(own, schema, session.device))
        self._groups = None if schema.group is None else GroupedAuc(self._names)
        self._times = None if schema.timestamp is None else BucketedMetrics(self._names, schema.label_kinds)
        self._slices, self._periods = Slices(slices, schema), Periods(schema)

    def add(self, batch: Batch, logits: torch.Tensor) -> None:
        """Add a batch of this rank."""
        self._all.update(logits, batch.label, batch.weight)
        self._own.update(logits, batch.label)
        self._slices.update(batch, logits)
        if self._groups is not None:
            assert batch.group is not None
            self._groups.update(batch.group, logits, batch.label, batch.weight)
        if self._times is not None:
            assert batch.time is not None
            self._times.update(self._periods.of(batch.time), logits, batch.label, batch.weight)

    def compute(self) -> dict[str, Any]:
        """Metrics over all ranks. A collective.

        Returns:
            The metrics of `LabelMetrics`; `reliability` of binary labels; `gauc` and `groups` if rows have groups;
            `by_time`, a list with metrics and `start` of each bucket, if rows have times; `by_value` if there are
            slices.
        """
        state = self._all.state(self._session.group)
        metrics = self._all.metrics_of(state)
        if bands := self._all.reliability_of(state):
            metrics["reliability"] = bands
        metrics |= self._own.compute(self._session.control)
        control = self._session.control.group
        if self._groups is not None:
            metrics = _merged(metrics, self._groups.compute(control))
        if self._times is not None:
            metrics["by_time"] = self._periods.lines(self._times.compute(control))
        if by_value := self._slices.compute(control):
            metrics["by_value"] = by_value
        return metrics


class Periods:
    """The hours, days or weeks of `by_time`."""

    def __init__(self, schema: Schema) -> None:
        self._bucket = "day" if schema.timestamp is None else schema.timestamp.bucket
        self._first_s = MONDAY_S if self._bucket == "week" else 0

    def of(self, time_B: torch.Tensor) -> torch.Tensor:
        """Number of the period of each time in seconds."""
        return (time_B - self._first_s) // BUCKET_S[self._bucket]

    def lines(self, by_period: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The metrics of each period, with its `start`."""
        return [{"start": self._start(period), **metrics} for period, metrics in by_period.items()]

    def _start(self, bucket: int) -> str:
        start = datetime.fromtimestamp(bucket * BUCKET_S[self._bucket] + self._first_s, UTC)
        return start.strftime("%Y-%m-%d %H:00" if self._bucket == "hour" else "%Y-%m-%d")


def _merged(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of both dicts, merged for each label if there are several."""
    merged = {**a, **b}
    if "tasks" in a:
        merged["tasks"] = {name: {**metrics, **b["tasks"][name]} for name, metrics in a["tasks"].items()}
    return merged


class Ranking:
    """Ranking metrics of a retriever: ranks each row's target among all items.

    Rows of the item table without an item are no candidates: those of ids outside a vocabulary, and those after its
    last id. A row with such a target is not ranked; `unknown_targets` counts them.

    Computes the vectors of all items once, on every rank. The constructor and `add` are collectives.

    Args:
        schema: defines the items, and whether rows have times.
        counts_I: occurrences of each item in the training rows, for the comparison with a ranking by popularity.
        slices: as for `Scores`.
    """

    def __init__(
        self,
        retriever: Retriever,
        session: Session,
        schema: Schema,
        counts_I: torch.Tensor | None,
        slices: Sequence[str] = (),
    ) -> None:
        self._retriever, self._session, self._items = retriever, session, items_of(retriever, schema)
        self._counts_I = None if counts_I is None else counts_I[self._items.start : self._items.stop]
        with torch.no_grad():
            ids = torch.arange(self._items.start, self._items.stop, device=session.device)
            self._items_ID = retriever.items(ids)
        self._sums: dict[str, RankingMetrics] = {}
        self._unknown, self._filtered = 0, False
        self._times, self._periods = None if schema.timestamp is None else BucketedRanks(), Periods(schema)
        self._slices = {feature.name: (feature, BucketedRanks()) for feature in schema.sparse if feature.name in slices}

    @torch.no_grad()
    def add(self, batch: Batch) -> None:
        """Add a batch of this rank.

        Raises:
            ValueError: sums by row are needed, and the retriever does not say which row a query is of.
        """
        question = self._retriever.question(batch)
        known_Q = (question.target >= self._items.start) & (question.target < self._items.stop)
        target, query = question.target[known_Q] - self._items.start, question.query[known_Q]
        self._unknown += len(known_Q) - len(target)
        self._filtered = question.seen is not None
        seen = None if question.seen is None else Jagged(*question.seen).selected(known_Q, self._items)
        ranks = {"": target_ranks(query, self._items_ID, target, seen)}
        if self._counts_I is not None:
            ranks["popularity"] = popularity_ranks(self._counts_I, target, seen)
        by_row = batch.weight is not None or self._times is not None or bool(self._slices)
        rows = _rows_of(question, batch)[known_Q] if by_row else None
        weights = None if batch.weight is None or rows is None else batch.weight[rows]
        for name, ranks_Q in ranks.items():
            metrics = RankingMetrics.of(ranks_Q, filtered=self._filtered, weights_B=weights)
            self._sums[name] = self._sums[name] + metrics if name in self._sums else metrics
        if self._times is not None and rows is not None:
            assert batch.time is not None
            self._times.update(self._periods.of(batch.time[rows]), ranks[""], weights)
        for name, (_, sums) in self._slices.items():
            if rows is not None:
                sums.update(_table_rows(batch, name)[rows], ranks[""], weights)

    def compute(self) -> dict[str, Any]:
        """Metrics over all ranks. A collective.

        Adds `recall@k`, `ndcg@k` and `mrr` as names without "/unseen", for `trainer.early_stopping`, and `num_items`.
        `popularity` has the same metrics for a ranking by popularity.

        Returns:
            The metrics; None without rows. `by_time` and `by_value` as for `Scores`.
        """
        result: dict[str, Any] = {}
        for name, sums in self._sums.items():
            result[name] = _with_aliases(sums.over(self._session.group))
        control = self._session.control
        (unknown,) = control.sums([self._unknown])
        metrics = {**result.pop("", {}), "num_items": len(self._items), **result}
        if unknown:
            metrics["unknown_targets"] = int(unknown)
        if self._times is not None:
            metrics["by_time"] = self._periods.lines(self._by_bucket(self._times))
        if self._slices:
            by_value = {name: (feature, self._by_bucket(sums)) for name, (feature, sums) in self._slices.items()}
            metrics["by_value"] = {name: _by_value(feature, by_row) for name, (feature, by_row) in by_value.items()}
        return metrics

    def _by_bucket(self, sums: BucketedRanks) -> dict[int, dict[str, Any]]:
        totals = sums.compute(self._session.control.group)
        return {bucket: _with_aliases(RankingMetrics(KS, self._filtered, total)) for bucket, total in totals.items()}


def items_of(retriever: Retriever, schema: Schema) -> range:
    """The rows of the item table that are items: with a vocabulary, those of its ids; else all."""
    rule = next((feature.mapping for feature in schema.sparse if feature.name == retriever.item), None)
    if not isinstance(rule, Vocabulary):
        return range(retriever.num_items)
    return range(rule.oov_rows, rule.oov_rows + load_vocabulary(rule.path).size)


def _rows_of(question: EvalQueries, batch: Batch) -> torch.Tensor:
    if question.rows is not None:
        return question.rows
    if len(question.target) != batch.rows:
        raise ValueError(
            f"the retriever asks {len(question.target)} queries for {batch.rows} rows: sample weights, by_time and "
            "slices need EvalQueries.rows, the row of each query"
        )
    return torch.arange(batch.rows, device=question.target.device)


def _with_aliases(total: RankingMetrics) -> dict[str, Any]:
    metrics = total.metrics()
    aliases = {key.removesuffix("/unseen").replace("hr@", "recall@"): value for key, value in metrics.items()}
    return {**metrics, **aliases, "samples": total.rows}


@torch.no_grad()
def item_counts(retriever: Retriever, stream: Stream, empty: Batch, session: Session) -> torch.Tensor:
    """`[I]`: occurrences of each item in the first `POPULAR_ROWS` rows of the stream. A collective.

    Raises:
        RankError: rows cannot be read on some rank.
        StopRequested: the run stops.
    """
    counts_I = torch.zeros(retriever.num_items, dtype=torch.int64, device=session.device)
    rows = 0
    with stream:
        for step in in_step(stream, empty, session.control, purpose=Purpose.EVALUATION_STEP):
            if step.stop:
                raise StopRequested
            ids = retriever.positives(step.on(session.device).batch)
            counts_I += torch.bincount(ids, minlength=retriever.num_items)
            rows += step.rows
            if rows >= POPULAR_ROWS:
                break
    return comm.all_reduce(counts_I, session.group)


def evaluate(
    learner: Learner,
    stream: Stream,
    config: TrainConfig,
    session: Session,
    max_rows: int | None = None,
    counts_I: torch.Tensor | None = None,
) -> tuple[dict[str, Any], int]:
    """Evaluate on the rows of all ranks. A collective. Call `learner.synchronise` before.

    Args:
        max_rows: stop after the batch that reaches this number of rows over all ranks.
        counts_I: result of `item_counts`, for a retriever.

    Returns:
        (the metrics of `Scores`, or for a retriever of `Ranking`, and `skipped`, the number of skipped rows; rows read
        over all ranks)

    Raises:
        RankError: rows cannot be read on some rank.
        StopRequested: the run stops.
    """
    schema, slices, model = config.data_schema, config.trainer.slices, learner.model
    training, rows = model.training, 0
    model.eval()
    try:
        with stream, learner.dense.averaged():
            empty, purpose, module = empty_batch(schema), Purpose.EVALUATION_STEP, model.module
            scores = (
                Ranking(module, session, schema, counts_I, slices)
                if isinstance(module, Retriever)
                else Scores(schema, session, config.trainer.metrics, slices)
            )
            for step in in_step(stream, empty, session.control, purpose=purpose):
                if step.stop:
                    raise StopRequested
                batch = step.on(session.device).batch
                if isinstance(scores, Ranking):
                    scores.add(batch)
                else:
                    scores.add(batch, learner.score(batch))
                rows += step.rows
                if max_rows is not None and rows >= max_rows:
                    break
    finally:
        model.train(training)
    (skipped,) = session.control.sums([stream.skipped.count])
    return {**scores.compute(), "skipped": int(skipped)}, rows


if TYPE_CHECKING:
    import torch.distributed as dist


class Slices:
    """Metrics for each value of some features, for example for each country.

    Args:
        features: names of features with one id per row (`trainer.slices`).
    """

    def __init__(self, features: Sequence[str], schema: Schema) -> None:
        by_name = {feature.name: feature for feature in schema.sparse}
        self._features = [by_name[name] for name in features]
        self._by_row = {name: BucketedMetrics(schema.task_names, schema.label_kinds) for name in features}

    def update(self, batch: Batch, logits: torch.Tensor) -> None:
        """Add a batch of this rank."""
        for name, metrics in self._by_row.items():
            metrics.update(_table_rows(batch, name), logits, batch.label, batch.weight)

    def compute(self, group: dist.ProcessGroup | None) -> dict[str, list[dict[str, Any]]]:
        """For each feature, the metrics of every observed value, the most frequent value first. A collective."""
        return {
            feature.name: _by_value(feature, self._by_row[feature.name].compute(group)) for feature in self._features
        }


def _table_rows(batch: Batch, feature: str) -> torch.Tensor:
    """The table row of each example's id, `[B]`; -1 without one."""
    ids = batch.sparse[feature]
    rows_B = ids.lengths().new_full((batch.rows,), -1, dtype=torch.int64)
    rows_B[ids.lengths() > 0] = ids.values().long()
    return rows_B


def _by_value(feature: SparseFeature, by_row: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = _names(feature)
    lines = [{"value": _value(row, names), **metrics} for row, metrics in by_row.items()]
    return sorted(lines, key=lambda line: (-line["samples"], line["value"]))


def _names(feature: SparseFeature) -> list[str] | None:
    """The value of each table row; None: the value is the row number."""
    rule = feature.mapping
    if not isinstance(rule, Vocabulary):
        return None
    ids = [str(value) for chunk in ids_in(rule.path) for value in chunk.tolist()]
    return ["(not in the vocabulary)"] * rule.oov_rows + ids


def _value(row: int, names: list[str] | None) -> str:
    if row < 0:
        return "(none)"
    return str(row) if names is None else names[row]
