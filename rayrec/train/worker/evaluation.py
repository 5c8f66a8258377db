"""One pass over the evaluation rows: metrics of all rows and of slices. Reads each row exactly once on any number of
ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rayrec.data import Schema, empty_batch
from rayrec.data.mapping.rules import Vocabulary
from rayrec.data.mapping.schema import SparseFeature
from rayrec.data.mapping.spread import vocabulary_rows
from rayrec.data.mapping.vocabulary import ids_in
from rayrec.distributed import comm
from rayrec.metrics import BucketedMetrics, GroupedAuc, LabelMetrics
from rayrec.metrics.ranking import (
    BucketedRanks,
    Jagged,
    RankingMetrics,
    TopItems,
    metrics_of_groups,
    part_of,
    popularity_ranks,
    target_ranks,
)
from rayrec.models import Batch, Retriever
from rayrec.models.corpus import Corpus, ListedCorpus
from rayrec.models.retriever import EvalQueries
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.config.trainer import MetricConfig
from rayrec.train.setup import build
from rayrec.train.worker.learner import Learner
from rayrec.train.worker.lockstep import Purpose, StopRequested, in_step
from rayrec.train.worker.own_metrics import OwnMetrics
from rayrec.train.worker.seen_items import SeenItems
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

    Each rank computes and keeps the vectors of its part of the items. The constructor and `add` are collectives.

    Args:
        config: its `trainer.ranking` says what is ranked, and its schema defines the items.
        counts_I: occurrences of each item in the training rows, for the comparison with a ranking by popularity.
        seen: items to leave out by user; None: those of the rows alone.
        items: the rows that are items; default: those of the schema.
    """

    def __init__(
        self,
        retriever: Retriever,
        session: Session,
        config: TrainConfig,
        counts_I: torch.Tensor | None,
        seen: SeenItems | None = None,
        items: Corpus | ListedCorpus | None = None,
    ) -> None:
        schema, self._config = config.data_schema, config.trainer.ranking
        self._retriever, self._session = retriever, session
        self._items = build.items_of(retriever, schema) if items is None else items
        self._counts_I = None if counts_I is None else counts_I[self._items.all_rows(session.device)]
        own = part_of(len(self._items), session.rank, session.world_size)
        with torch.no_grad():
            ids = torch.arange(own.start, own.stop, device=session.device)
            self._items_ID = retriever.items(self._items.rows(ids))
        k = self._config.coverage
        self._top = None if k is None else TopItems(k, len(self._items), session.device)
        self._seen, self._ks = seen, tuple(self._config.ks)
        self._unknown, self._samples = 0, 0
        self._filtered = seen is not None or bool(self._config.seen)
        self._periods = Periods(schema)
        slices = [feature for feature in schema.sparse if feature.name in config.trainer.slices]
        self._slices = {feature.name: feature for feature in slices}
        self._has_times = schema.timestamp is not None
        # By kind of ranking ("", "popularity"): over all rows, by period, and by value of each feature.
        self._sums: dict[str, _RowSums | _GroupSums] = {}

    @torch.no_grad()
    def add(self, batch: Batch) -> None:
        """Add a batch of this rank.

        Raises:
            ValueError: sums by row are needed, and the retriever does not say which row a query is of.
        """
        question = self._retriever.question(batch)
        target_Q = self._items.items(question.target)
        known_Q = target_Q >= 0
        target, query = target_Q[known_Q], question.query[known_Q]
        self._unknown += len(known_Q) - len(target)
        self._filtered |= question.seen is not None
        by_group, config = self._config.targets == "group", self._config
        by_row = self._has_times or batch.weight is not None or bool(self._slices) or by_group
        by_row |= self._seen is not None or bool(config.seen)
        rows = _rows_of(question, batch)[known_Q] if by_row else None
        seen = self._seen_by(question, batch, known_Q, rows)
        ranks = {"": target_ranks(query, self._items_ID, target, seen, group=self._session.group, top=self._top)}
        if self._counts_I is not None:
            ranks["popularity"] = popularity_ranks(self._counts_I, target, seen)
        weights = None if batch.weight is None or rows is None else batch.weight[rows]
        buckets: dict[str, torch.Tensor] = {}
        if self._has_times and rows is not None:
            assert batch.time is not None
            buckets["by_time"] = self._periods.of(batch.time[rows])
        if rows is not None:
            buckets |= {name: _table_rows(batch, name)[rows] for name in self._slices}
        for name, ranks_Q in ranks.items():
            if name not in self._sums:
                self._sums[name] = _GroupSums(self._ks) if by_group else _RowSums(self._ks)
            groups = None if batch.group is None or rows is None else batch.group[rows]
            self._sums[name].add(ranks_Q, weights, buckets if not name else {}, target, groups)

    def _seen_by(
        self, question: EvalQueries, batch: Batch, known_Q: torch.Tensor, rows: torch.Tensor | None
    ) -> Jagged | None:
        """The items that each query's ranking leaves out."""
        parts, known = [], torch.ones_like(known_Q[known_Q])
        if question.seen is not None:
            parts.append(self._of_items(Jagged(*question.seen), known_Q))
        if rows is not None:
            for name in self._config.seen:
                lists = Jagged(batch.sparse[name].values().long(), batch.sparse[name].offsets().long())
                parts.append(self._of_items(lists.taken(rows), known))
            if self._seen is not None and self._config.seen_file is not None:
                users = _table_rows(batch, self._config.seen_file.user)[rows]
                parts.append(self._of_items(self._seen.of(users), known))
        return Jagged.joined(parts) if parts else None

    def _of_items(self, table_rows: Jagged, kept_B: torch.Tensor) -> Jagged:
        """The items of those rows that are kept, from their table rows."""
        return Jagged(self._items.items(table_rows.ids.long()), table_rows.offsets).selected(kept_B)

    def compute(self) -> dict[str, Any]:
        """Metrics over all ranks. A collective.

        Adds the metrics with seen items excluded under their names without "/unseen", for `trainer.early_stopping`, and
        `num_items`. `popularity` has the same metrics for a ranking by popularity.

        Returns:
            The metrics; None without rows. `by_time` and `by_value` as for `Scores`.
        """
        control, result = self._session.control, dict[str, Any]()
        by_bucket: dict[str, dict[int, dict[str, Any]]] = {}
        for name, sums in self._sums.items():
            result[name], found = sums.compute(control.group, self._filtered)
            by_bucket |= found
        (unknown,) = control.sums([self._unknown])
        metrics = {**result.pop("", {}), "num_items": len(self._items), **result}
        if self._top is not None:
            metrics[f"coverage@{self._top.k}"] = self._top.coverage
        if unknown:
            metrics["unknown_targets"] = int(unknown)
        if self._has_times:
            metrics["by_time"] = self._periods.lines(by_bucket.get("by_time", {}))
        if self._slices:
            metrics["by_value"] = {
                name: _by_value(feature, by_bucket.get(name, {})) for name, feature in self._slices.items()
            }
        return metrics


class _RowSums:
    """Metrics of rows with one target each."""

    def __init__(self, ks: tuple[int, ...]) -> None:
        self._ks, self._all = ks, BucketedRanks(ks)
        self._buckets: defaultdict[str, BucketedRanks] = defaultdict(lambda: BucketedRanks(ks))

    def add(
        self,
        ranks_Q: torch.Tensor,
        weights: torch.Tensor | None,
        buckets: Mapping[str, torch.Tensor],
        targets: torch.Tensor,
        groups: torch.Tensor | None,
    ) -> None:
        """Add queries of this rank, with the bucket of each query by name of the bucketing."""
        self._all.update(torch.zeros_like(ranks_Q), ranks_Q, weights)
        for name, buckets_Q in buckets.items():
            self._buckets[name].update(buckets_Q, ranks_Q, weights)

    def compute(self, group: comm.Group, filtered: bool) -> tuple[dict[str, Any], dict[str, dict[int, dict[str, Any]]]]:
        """Metrics over the ranks of a gloo group: of all rows, and by bucket. A collective."""

        def metrics(total: torch.Tensor) -> dict[str, Any]:
            found = RankingMetrics(self._ks, filtered, total)
            named = found.metrics()
            recall = {name.replace("hr@", "recall@"): value for name, value in named.items() if name[:3] == "hr@"}
            plain = {name.removesuffix("/unseen"): value for name, value in {**named, **recall}.items()}
            return {**named, **plain, "samples": found.rows}

        nothing = torch.zeros(2 * len(self._ks) + 3, dtype=torch.float64)
        total = self._all.compute(group).get(0, nothing)
        by_bucket = {
            name: {bucket: metrics(sums) for bucket, sums in buckets.compute(group).items()}
            for name, buckets in self._buckets.items()
        }
        return metrics(total), by_bucket


class _GroupSums:
    """Metrics of groups with several targets: keeps the rank of each target."""

    def __init__(self, ks: tuple[int, ...]) -> None:
        self._ks, self._parts = ks, list[dict[str, torch.Tensor]]()

    def add(
        self,
        ranks_Q: torch.Tensor,
        weights: torch.Tensor | None,
        buckets: Mapping[str, torch.Tensor],
        targets: torch.Tensor,
        groups: torch.Tensor | None,
    ) -> None:
        """See `_RowSums.add`."""
        assert groups is not None, "the config was checked"
        columns = {"rank": ranks_Q, "target": targets, "group": groups, **buckets}
        columns["weight"] = torch.ones_like(ranks_Q, dtype=torch.float64) if weights is None else weights.double()
        self._parts.append({name: column.cpu() for name, column in columns.items()})

    def compute(self, group: comm.Group, filtered: bool) -> tuple[dict[str, Any], dict[str, dict[int, dict[str, Any]]]]:
        """See `_RowSums.compute`. All ranks have the targets of all."""
        own = {name: torch.cat([part[name] for part in self._parts]) for name in (self._parts or [{}])[0]}
        ranks = [part for part in comm.all_gather_object(own, group) if part]
        rows = {name: torch.cat([part[name] for part in ranks]) for name in (ranks or [{}])[0]}

        def metrics(chosen: torch.Tensor) -> dict[str, Any]:
            groups, targets, places = (rows[name][chosen] for name in ("group", "target", "rank"))
            named = metrics_of_groups(groups, targets, places, self._ks, rows["weight"][chosen], filtered)
            plain = {name.removesuffix("/unseen"): value for name, value in named.items()}
            return {**named, **plain, "samples": len(groups), "groups": len(groups.unique())}

        if not rows:
            return {}, {}
        by_bucket = {
            name: {int(bucket): metrics(column == bucket) for bucket in column.unique().tolist()}
            for name, column in rows.items()
            if name not in ("rank", "target", "group", "weight")
        }
        return metrics(torch.ones_like(rows["rank"], dtype=torch.bool)), by_bucket


def _rows_of(question: EvalQueries, batch: Batch) -> torch.Tensor:
    if question.rows is not None:
        return question.rows
    if len(question.target) != batch.rows:
        raise ValueError(
            f"the retriever asks {len(question.target)} queries for {batch.rows} rows: sample weights, by_time and "
            "slices need EvalQueries.rows, the row of each query"
        )
    return torch.arange(batch.rows, device=question.target.device)


def _items_now(learner: Learner, retriever: Retriever) -> ListedCorpus | None:
    """The rows of an item table with dynamic ids that ids have now; None if it has none. A collective."""
    rows = None if learner.dynamic is None else learner.dynamic.rows_in_use(retriever.item)
    return None if rows is None else ListedCorpus(rows)


@torch.no_grad()
def item_counts(
    retriever: Retriever, stream: Stream, empty: Batch, session: Session, *, candidates: bool = False
) -> torch.Tensor:
    """`[I]`: occurrences of each item in the first `POPULAR_ROWS` rows of the stream. A collective.

    Args:
        candidates: count the candidates of in-batch losses, instead of the positives.

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
            batch = step.on(session.device).batch
            ids = retriever.candidates(batch) if candidates else retriever.positives(batch)
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
    seen: SeenItems | None = None,
) -> tuple[dict[str, Any], int]:
    """Evaluate on the rows of all ranks. A collective. Call `learner.synchronise` before.

    Args:
        max_rows: stop after the batch that reaches this number of rows over all ranks.
        counts_I: result of `item_counts`, for a retriever.
        seen: items to leave out by user, for a retriever.

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
            empty, module = empty_batch(config.evaluation_schema), model.module
            scores = (
                Ranking(module, session, config, counts_I, seen, _items_now(learner, module))
                if isinstance(module, Retriever)
                else Scores(schema, session, config.trainer.metrics, slices)
            )
            steps = in_step(stream, empty, session.control, purpose=Purpose.EVALUATION_STEP)
            for step in steps if learner.dynamic is None else learner.dynamic.found(steps):
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


def _names(feature: SparseFeature) -> dict[int, str] | None:
    """The value of each table row that has an id; None: the value is the row number."""
    rule = feature.mapping
    if not isinstance(rule, Vocabulary):
        return None
    ids = [str(value) for chunk in ids_in(rule.path) for value in chunk.tolist()]
    unknown = dict.fromkeys(range(rule.oov_rows), "(not in the vocabulary)")
    return unknown | dict(zip(vocabulary_rows(np.arange(len(ids)), rule).tolist(), ids, strict=True))


def _value(row: int, names: Mapping[int, str] | None) -> str:
    if row < 0:
        return "(none)"
    return str(row) if names is None else names[row]
