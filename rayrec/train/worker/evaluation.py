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
from rayrec.data.mapping.vocabulary import ids_in
from rayrec.distributed import comm
from rayrec.metrics import BucketedMetrics, GroupedAuc, LabelMetrics
from rayrec.metrics.ranking import Jagged, RankingMetrics, popularity_ranks, target_ranks
from rayrec.models import Batch, Retriever
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
        self._slices = Slices(slices, schema)
        self._bucket = "day" if schema.timestamp is None else schema.timestamp.bucket
        self._first_s = MONDAY_S if self._bucket == "week" else 0

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
            bucket = (batch.time - self._first_s) // BUCKET_S[self._bucket]
            self._times.update(bucket, logits, batch.label, batch.weight)

    def compute(self) -> dict[str, Any]:
        """Metrics over all ranks. A collective.

        Returns:
            The metrics of `LabelMetrics`; `gauc` and `groups` if rows have groups; `by_time`, a list with metrics and
            `start` of each bucket, if rows have times; `by_value` if there are slices.
        """
        metrics = self._all.compute(self._session.group)
        metrics |= self._own.compute(self._session.control)
        control = self._session.control.group
        if self._groups is not None:
            metrics = _merged(metrics, self._groups.compute(control))
        if self._times is not None:
            by_time = self._times.compute(control).items()
            metrics["by_time"] = [{"start": self._start(bucket), **values} for bucket, values in by_time]
        if by_value := self._slices.compute(control):
            metrics["by_value"] = by_value
        return metrics

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

    Computes the vectors of all items once, on every rank. The constructor and `add` are collectives.

    Args:
        counts_I: occurrences of each item in the training rows, for the comparison with a ranking by popularity.
    """

    def __init__(self, retriever: Retriever, session: Session, counts_I: torch.Tensor | None) -> None:
        self._retriever, self._group, self._counts_I = retriever, session.group, counts_I
        with torch.no_grad():
            self._items_ID = retriever.items(torch.arange(retriever.num_items, device=session.device))
        self._sums: dict[str, RankingMetrics] = {}

    @torch.no_grad()
    def add(self, batch: Batch) -> None:
        """Add a batch of this rank."""
        question = self._retriever.question(batch)
        seen = None if question.seen is None else Jagged(*question.seen)
        ranks = {"": target_ranks(question.query, self._items_ID, question.target, seen)}
        if self._counts_I is not None:
            ranks["popularity"] = popularity_ranks(self._counts_I, question.target, seen)
        for name, ranks_B in ranks.items():
            metrics = RankingMetrics.of(ranks_B, filtered=seen is not None)
            self._sums[name] = self._sums[name] + metrics if name in self._sums else metrics

    def compute(self) -> dict[str, Any]:
        """Metrics over all ranks. A collective.

        Adds `recall@10` and `ndcg@10` as aliases for `trainer.early_stopping`, and `num_items`. `popularity` has the
        same metrics for a ranking by popularity.
        """
        result = {}
        for name, sums in self._sums.items():
            total = sums.over(self._group)
            metrics = total.metrics()
            aliases = {key.removesuffix("/unseen").replace("hr@", "recall@"): value for key, value in metrics.items()}
            result[name] = {**metrics, **aliases, "samples": int(total.sums[-1])}
        return {**result.pop("", {}), "num_items": self._retriever.num_items, **result}


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
        (the metrics of `Scores`, and `skipped`, the number of skipped rows; rows read over all ranks)

    Raises:
        RankError: rows cannot be read on some rank.
        StopRequested: the run stops.
    """
    scores = Scores(config.data_schema, session, config.trainer.metrics, config.trainer.slices)
    model = learner.model
    training, rows = model.training, 0
    model.eval()
    try:
        with stream, learner.dense.averaged():
            empty, purpose = empty_batch(config.data_schema), Purpose.EVALUATION_STEP
            module = model.module
            ranking = Ranking(module, session, counts_I) if isinstance(module, Retriever) else None
            for step in in_step(stream, empty, session.control, purpose=purpose):
                if step.stop:
                    raise StopRequested
                batch = step.on(session.device).batch
                if ranking is not None:
                    ranking.add(batch)
                else:
                    scores.add(batch, learner.score(batch))
                rows += step.rows
                if max_rows is not None and rows >= max_rows:
                    break
    finally:
        model.train(training)
    (skipped,) = session.control.sums([stream.skipped.count])
    metrics = scores.compute() if ranking is None else {**scores.compute(), **ranking.compute()}
    return {**metrics, "skipped": int(skipped)}, rows


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
            ids = batch.sparse[name]
            rows_B = ids.lengths().new_full((batch.rows,), -1, dtype=torch.int64)
            rows_B[ids.lengths() > 0] = ids.values().long()
            metrics.update(rows_B, logits, batch.label, batch.weight)

    def compute(self, group: dist.ProcessGroup | None) -> dict[str, list[dict[str, Any]]]:
        """For each feature, the metrics of every observed value, the most frequent value first. A collective."""
        result = {}
        for feature in self._features:
            by_row = self._by_row[feature.name].compute(group)
            names = _names(feature)
            lines = [{"value": _value(row, names), **metrics} for row, metrics in by_row.items()]
            result[feature.name] = sorted(lines, key=lambda line: (-line["samples"], line["value"]))
        return result


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
