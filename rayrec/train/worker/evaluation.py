"""One pass over the evaluation rows: each exactly once, by however many ranks; figures of all, and of slices."""

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
POPULAR_ROWS = 1 << 20  # training rows, from anywhere, whose items are counted
MONDAY_S = 4 * 86_400  # 1970 began on a Thursday


class Scores:
    """What is measured over the evaluation rows.

    Args:
        schema: names of several labels; whether rows have groups and times.
        own: further figures.
        slices: features by whose values figures are given.
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
        """One batch of this rank."""
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

    def figures(self) -> dict[str, Any]:
        """Those of all ranks: what `LabelMetrics` gives, `gauc` and `groups` where rows have groups, and `by_time`
        where they have times: the same figures for each stretch, with its `start`; `by_value` where there are slices.
        A collective.
        """
        figures = self._all.compute(self._session.group)
        figures |= self._own.compute(self._session.control)
        control = self._session.control.group
        if self._groups is not None:
            figures = _joined(figures, self._groups.compute(control))
        if self._times is not None:
            by_time = self._times.compute(control).items()
            figures["by_time"] = [{"start": self._start(bucket), **of_bucket} for bucket, of_bucket in by_time]
        if by_value := self._slices.compute(control):
            figures["by_value"] = by_value
        return figures

    def _start(self, bucket: int) -> str:
        start = datetime.fromtimestamp(bucket * BUCKET_S[self._bucket] + self._first_s, UTC)
        return start.strftime("%Y-%m-%d %H:00" if self._bucket == "hour" else "%Y-%m-%d")


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of both, also of each of several labels."""
    joined = {**first, **second}
    if "tasks" in first:
        joined["tasks"] = {name: {**of, **second["tasks"][name]} for name, of in first["tasks"].items()}
    return joined


class Ranking:
    """Of a retriever: every row's target ranked among all items. Items' vectors are made once, on every rank.

    A collective, as each call of `add`.

    Args:
        counts_I: of each item in the training rows, for the figures of a model that goes by them.
    """

    def __init__(self, retriever: Retriever, session: Session, counts_I: torch.Tensor | None) -> None:
        self._retriever, self._group, self._counts_I = retriever, session.group, counts_I
        with torch.no_grad():
            self._items_ID = retriever.items(torch.arange(retriever.num_items, device=session.device))
        self._sums: dict[str, RankingMetrics] = {}

    @torch.no_grad()
    def add(self, batch: Batch) -> None:
        """One batch of this rank."""
        asked = self._retriever.question(batch)
        seen = None if asked.seen is None else Jagged(*asked.seen)
        ranks = {"": target_ranks(asked.query, self._items_ID, asked.target, seen)}
        if self._counts_I is not None:
            ranks["popularity"] = popularity_ranks(self._counts_I, asked.target, seen)
        for name, of in ranks.items():
            more = RankingMetrics.of(of, filtered=seen is not None)
            self._sums[name] = self._sums[name] + more if name in self._sums else more

    def figures(self) -> dict[str, Any]:
        """Of all ranks; `recall@10` and `ndcg@10` also by these names, for `trainer.early_stopping`; `popularity`, the
        same of the most frequent items. A collective."""
        found = {}
        for name, sums in self._sums.items():
            total = sums.over(self._group)
            figures = total.metrics()
            short = {key.removesuffix("/unseen").replace("hr@", "recall@"): value for key, value in figures.items()}
            found[name] = {**figures, **short, "samples": int(total.sums[-1])}
        return {**found.pop("", {}), **found}


@torch.no_grad()
def item_counts(retriever: Retriever, stream: Stream, empty: Batch, session: Session) -> torch.Tensor:
    """`[I]`: how often each item comes in the rows of the stream, or in `POPULAR_ROWS` of very many; a collective.

    Raises:
        RankError: rows that cannot be read, on any rank.
        StopRequested: the run is to stop.
    """
    counts_I = torch.zeros(retriever.num_items, dtype=torch.int64, device=session.device)
    rows = 0
    with stream:
        for given in in_step(stream, empty, session.control, purpose=Purpose.EVALUATION_STEP):
            if given.stop:
                raise StopRequested
            ids = retriever.positives(given.on(session.device).batch)
            counts_I += torch.bincount(ids, minlength=retriever.num_items)
            rows += given.rows
            if rows >= POPULAR_ROWS:
                break
    return comm.all_reduce(counts_I, session.group)


def evaluate(
    learner: Learner,
    stream: Stream,
    config: TrainConfig,
    session: Session,
    most_rows: int | None = None,
    counts_I: torch.Tensor | None = None,
) -> dict[str, Any]:
    """What `Scores` measures, over the rows of all ranks, and how many rows were `skipped`; a collective.

    Args:
        most_rows: no batch is read after so many rows of all ranks together.
        counts_I: of `item_counts`, for a retriever.

    Raises:
        RankError: rows that cannot be read, on any rank.
        StopRequested: the run is to stop.
    """
    scores = Scores(config.data_schema, session, config.trainer.metrics, config.trainer.slices)
    learner.synchronise()
    model = learner.model
    training = model.training
    model.eval()
    try:
        with stream, learner.dense.averaged():
            seen, empty, purpose = 0, empty_batch(config.data_schema), Purpose.EVALUATION_STEP
            found = model.module
            ranking = Ranking(found, session, counts_I) if isinstance(found, Retriever) else None
            for given in in_step(stream, empty, session.control, purpose=purpose):
                if given.stop:
                    raise StopRequested
                batch = given.on(session.device).batch
                if ranking is not None:
                    ranking.add(batch)
                else:
                    scores.add(batch, learner.score(batch))
                seen += given.rows
                if most_rows is not None and seen >= most_rows:
                    break
    finally:
        model.train(training)
    (skipped,) = session.control.sums([stream.skipped.count])
    figures = scores.figures() if ranking is None else {**scores.figures(), **ranking.figures()}
    return {**figures, "skipped": int(skipped)}


if TYPE_CHECKING:
    import torch.distributed as dist


class Slices:
    """The figures of the rows of each value of some features, such as each country's.

    Args:
        features: names of features with one id a row; `trainer.slices`, which is checked with the config.
    """

    def __init__(self, features: Sequence[str], schema: Schema) -> None:
        by_name = {feature.name: feature for feature in schema.sparse}
        self._features = [by_name[name] for name in features]
        self._by_row = {name: BucketedMetrics(schema.task_names, schema.label_kinds) for name in features}

    def update(self, batch: Batch, logits: torch.Tensor) -> None:
        """One batch of this rank."""
        for name, metrics in self._by_row.items():
            ids = batch.sparse[name]
            rows_B = ids.lengths().new_full((batch.rows,), -1, dtype=torch.int64)
            rows_B[ids.lengths() > 0] = ids.values().long()
            metrics.update(rows_B, logits, batch.label, batch.weight)

    def compute(self, group: dist.ProcessGroup | None) -> dict[str, list[dict[str, Any]]]:
        """For each feature, the figures of every value that was seen, those of most rows first. A collective."""
        found = {}
        for feature in self._features:
            figures = self._by_row[feature.name].compute(group)
            names = _names(feature)
            lines = [{"value": _value(row, names), **of} for row, of in figures.items()]
            found[feature.name] = sorted(lines, key=lambda line: (-line["samples"], line["value"]))
        return found


def _names(feature: SparseFeature) -> list[str] | None:
    """The value of each table row; None where it is the row's number."""
    rule = feature.mapping
    if not isinstance(rule, Vocabulary):
        return None
    ids = [str(one) for part in ids_in(rule.path) for one in part.tolist()]
    return ["(not in the vocabulary)"] * rule.oov_rows + ids


def _value(row: int, names: list[str] | None) -> str:
    if row < 0:
        return "(none)"
    return str(row) if names is None else names[row]
