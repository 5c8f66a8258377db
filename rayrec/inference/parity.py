"""Compares the scores of an export and the trained model: row by row, and by metric; of a retriever, its queries."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, StrictUndefined

from rayrec.inference.graph import Inputs
from rayrec.inference.topk import recall_of, top_k
from rayrec.metrics import LabelMetrics
from rayrec.models import Batch
from rayrec.quant import TableFormat

Score = Callable[[Batch], torch.Tensor]
SAMPLE_ROWS = 100_000
# The best items that queries find are compared among so many random items.
PARITY_ITEMS, OVERLAP_QUERIES, OVERLAP_K = 20_000, 2048, 10
METRICS = ("auc", "ne", "logloss", "calibration", "rmse", "mae", "r2")  # the last three for numbers


_OVERLAP = {TableFormat.FP32: 0.99, TableFormat.INT8: 0.8, TableFormat.INT4: 0.5}  # others: 0.95


@dataclass(frozen=True, slots=True)
class ParityLimits:
    """Limits of the differences between an export and the trained model.

    Args:
        logit: Maximum difference of a logit, relative to the largest logit (at least 1); None: unlimited.
        auc: Maximum difference of the AUC of a label; for a number, of its RMSE, relative to it.
        time: Maximum time of a batch, relative to the trained model; None: unlimited.
        overlap: For queries, the smallest share of the trained model's best items that they find; None: for scores.
    """

    logit: float | None
    auc: float
    time: float | None = None
    overlap: float | None = None

    @classmethod
    def of(cls, formats: Iterable[TableFormat], dense: str, queries: bool = False) -> ParityLimits:
        """Limits for these number formats; of a retriever, with `queries`."""
        table_formats = set(formats)
        if queries:
            exact = dense == "fp32" and table_formats == {TableFormat.FP32}
            overlap = min(_OVERLAP.get(format, 0.95) for format in table_formats)
            time = None if dense == "fp32" else 1.0
            return cls(logit=1e-5 if exact else None, auc=0.0, time=time, overlap=min(overlap, 1.0 if exact else 0.95))
        if dense != "fp32":  # narrow tables save memory, but narrow layers only time
            return cls(logit=None, auc=5e-4, time=1.0)
        if TableFormat.INT4 in table_formats:
            return cls(logit=None, auc=5e-4)
        if table_formats != {TableFormat.FP32}:
            return cls(logit=None, auc=1e-4)
        return cls(logit=1e-6, auc=1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """The result of a comparison.

    Args:
        rows: Number of scored rows.
        sampled: Whether they are a sample of the evaluation rows.
        logit_max, logit_mean, probability_max: Maximum and mean differences; of queries, the first two, of their
            numbers.
        trained, exported: Metrics of both on these rows.
        recorded: Metrics that the trainer recorded for this checkpoint and these rows; None if it did not.
        bytes: Bytes of the tables, in the export and as fp32.
        ms_per_1000_rows: Times of both, in this process.
        quantiles: Quantiles of the exported probabilities, 0 % to 100 % in steps of 10 %, by label; a service measures
            drift against them.
        slow: A message if the export exceeds its time limit, else None.
        problems: A message for each exceeded limit of the scores.
        overlap: For queries, the share of the trained model's `OVERLAP_K` best items that they find.
        calibration: For a calibrated export, log loss and calibration error before and after, by label. All other
            metrics and differences are of calibrated scores of both.
    """

    rows: int
    sampled: bool
    logit_max: float
    logit_mean: float
    probability_max: float
    trained: dict[str, Any]
    exported: dict[str, Any]
    recorded: dict[str, Any] | None
    bytes: dict[str, int]
    ms_per_1000_rows: dict[str, float]
    quantiles: dict[str, list[float]]
    limits: ParityLimits
    slow: str | None = None
    problems: list[str] = field(default_factory=list)
    overlap: float | None = None
    calibration: dict[str, dict[str, float | None]] | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"within_limits": not self.problems, **asdict(self)}

    def compared(self) -> Iterable[tuple[str, float | None, float | None, float]]:
        """`quality` of both."""
        return quality(self.trained, self.exported)


class _Measured:
    """Scores with one model, and measures its metrics and time."""

    def __init__(self, score: Score, inputs: Inputs) -> None:
        self._score, self.seconds = score, list[float]()
        self.metrics = LabelMetrics(inputs.kinds, names=inputs.labels)

    def __call__(self, batch: Batch) -> torch.Tensor:
        start = time.perf_counter()
        logits = self._score(batch)
        self.seconds.append(time.perf_counter() - start)
        self.metrics.update(logits, batch.label, batch.weight)
        return logits


class _Sample:
    """A uniform sample of the added rows: those with the smallest random keys.

    A key depends only on the position of a row, so that the sample is reproducible.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows, self._random = max_rows, np.random.default_rng(0)
        self._keys, self._rows = torch.empty(0, dtype=torch.float64), torch.empty(0)

    def add(self, rows: torch.Tensor) -> None:
        keys = torch.from_numpy(self._random.random(len(rows)))
        self._keys = torch.cat([self._keys, keys])
        self._rows = torch.cat([self._rows, rows]) if len(self._rows) else rows
        if len(self._keys) > 2 * self._max_rows:
            self._cut()

    @property
    def rows(self) -> torch.Tensor:
        """The sample, `[n, T]`."""
        self._cut()
        return self._rows

    def _cut(self) -> None:
        if len(self._keys) > self._max_rows:
            self._keys, indices = self._keys.topk(self._max_rows, largest=False)
            self._rows = self._rows[indices]


def compare(
    trained: Score,
    exported: Score,
    batches: Iterable[Batch],
    inputs: Inputs,
    limits: ParityLimits,
    bytes_: Mapping[str, int],
    recorded: Mapping[str, Any] | None = None,
    sampled: bool = False,
) -> Parity:
    """Scores every batch with both models.

    Raises:
        ValueError: `batches` has no rows.
    """
    trained_side, exported_side = _Measured(trained, inputs), _Measured(exported, inputs)
    rows, total, logit_max, probability_max, largest_logit = 0, 0.0, 0.0, 0.0, 1.0
    sample = _Sample(SAMPLE_ROWS)
    for batch in batches:
        if not batch.rows:
            continue
        if not rows:
            trained(batch), exported(batch)  # the first call of each is slower
        expected, logits = trained_side(batch).double(), exported_side(batch).double()
        difference = (expected - logits).abs()
        rows, total = rows + batch.rows, total + float(difference.mean()) * batch.rows
        logit_max = max(logit_max, _nan_to_inf(difference.max()))
        answers = inputs.answers(logits)
        probability_max = max(probability_max, _nan_to_inf((inputs.answers(expected) - answers).abs().max()))
        largest_logit = max(largest_logit, _nan_to_inf(expected.abs().max()))
        sample.add(answers)
    if not rows:
        raise ValueError("the evaluation data has no rows to compare scores on")
    names = inputs.labels or ("label",)
    steps = torch.linspace(0, 1, 11, dtype=torch.float64)
    quantiles = torch.quantile(sample.rows, steps, dim=0).t().tolist()
    metrics = trained_side.metrics.compute(), exported_side.metrics.compute()
    seconds = trained_side.seconds, exported_side.seconds
    ms = {"trained": sum(seconds[0]) / rows * 1e6, "exported": sum(seconds[1]) / rows * 1e6}
    return Parity(
        rows=rows,
        sampled=sampled,
        logit_max=logit_max,
        logit_mean=total / rows,
        probability_max=probability_max,
        trained=metrics[0],
        exported=metrics[1],
        recorded=None if recorded is None else dict(recorded),
        bytes=dict(bytes_),
        ms_per_1000_rows=ms,
        quantiles=dict(zip(names, quantiles, strict=True)),
        limits=limits,
        slow=_slow(limits, seconds),
        problems=_problems(metrics, recorded, limits, logit_max / largest_logit),
    )


def compare_queries(
    trained: Score,
    exported: Score,
    batches: Iterable[Batch],
    items_ID: torch.Tensor,
    limits: ParityLimits,
    bytes_: Mapping[str, int],
    sampled: bool = False,
) -> Parity:
    """Compares the queries of every batch, and the best items of both.

    Rows whose query is zero, as of an empty history, have no best items.

    Args:
        trained, exported: Return queries `[B, D]`.
        items_ID: Vectors of items to find.

    Raises:
        ValueError: `batches` has no rows.
    """
    k = min(OVERLAP_K, len(items_ID))
    rows, total, apart, largest = 0, 0.0, 0.0, 1.0
    asked, shared = 0, 0.0
    seconds: tuple[list[float], list[float]] = [], []

    def timed(score: Score, batch: Batch, durations: list[float]) -> torch.Tensor:
        begin = time.perf_counter()
        queries = score(batch)
        durations.append(time.perf_counter() - begin)
        return queries

    for batch in batches:
        if not batch.rows:
            continue
        if not rows:
            trained(batch), exported(batch)  # the first call of each is slower
        expected, queries = timed(trained, batch, seconds[0]), timed(exported, batch, seconds[1])
        difference = (expected.double() - queries.double()).abs()
        rows, total = rows + batch.rows, total + float(difference.mean()) * batch.rows
        apart = max(apart, _nan_to_inf(difference.max()))
        largest = max(largest, _nan_to_inf(expected.abs().max()))
        is_asked = expected.any(1)
        if asked < OVERLAP_QUERIES and bool(is_asked.any()):
            found, best = (top_k(vectors[is_asked], items_ID, k)[1] for vectors in (queries, expected))
            asked, shared = asked + int(is_asked.sum()), shared + recall_of(found, best) * int(is_asked.sum())
    if not rows:
        raise ValueError("the evaluation data has no rows to compare queries on")
    overlap = shared / asked if asked else 1.0
    problems = []
    if not apart < float("inf"):
        problems.append("a query is not finite; check the training")
    if limits.logit is not None and apart / largest > limits.logit:
        limit = f"the limit is {limits.logit:g}"
        problems.append(f"a query differs by {apart / largest:.2g} of the largest number; {limit}")
    if limits.overlap is not None and not overlap >= limits.overlap:
        problems.append(
            f"{overlap:.1%} of the {k} best items are those of the trained model; the limit is {limits.overlap:.0%}"
        )
    return Parity(
        rows=rows,
        sampled=sampled,
        logit_max=apart,
        logit_mean=total / rows,
        probability_max=0.0,
        trained={},
        exported={},
        recorded=None,
        bytes=dict(bytes_),
        ms_per_1000_rows={"trained": sum(seconds[0]) / rows * 1e6, "exported": sum(seconds[1]) / rows * 1e6},
        quantiles={},
        limits=limits,
        slow=_slow(limits, seconds),
        problems=problems,
        overlap=round(overlap, 5),
    )


def _slow(limits: ParityLimits, seconds: tuple[list[float], list[float]]) -> str | None:
    """A message if an export exceeds its time limit.

    Args:
        seconds: Durations of the batches, of the trained model and of the export.
    """
    slowdown = statistics.median(exported_s / trained_s for trained_s, exported_s in zip(*seconds, strict=True))
    slow = limits.time is not None and slowdown > limits.time
    return f"slower than as trained: {slowdown:.2g} times" if slow else None


def _nan_to_inf(value: torch.Tensor) -> float:
    """NaN counts as the largest possible difference."""
    number = float(value)
    return number if number == number else float("inf")


def _problems(
    metrics: tuple[Mapping[str, Any], Mapping[str, Any]],
    recorded: Mapping[str, Any] | None,
    limits: ParityLimits,
    logit: float,
) -> list[str]:
    trained, exported = metrics
    problems = []
    if limits.logit is not None and logit > limits.logit:
        problems.append(f"a logit differs by {logit:.2g} of the largest one; the limit is {limits.logit:g}")
    for name, a, b, unit in quality(trained, exported):
        if a is not None and (b is None or abs(a - b) > limits.auc * unit):
            problems.append(f"{name}: {a:.6f} as trained, {_text(b)} exported; the limit is {limits.auc * unit:.3g}")
    for name, a, b, unit in quality(recorded or {}, trained):
        if a is not None and (b is None or abs(a - b) > 1e-5 * unit):
            problems.append(f"{name}: the trainer recorded {a:.6f} for these rows, here it is {_text(b)}")
    return problems


def _text(auc: float | None) -> str:
    return "none" if auc is None else f"{auc:.6f}"


def quality(
    reference: Mapping[str, Any], metrics: Mapping[str, Any]
) -> Iterable[tuple[str, float | None, float | None, float]]:
    """(name, reference value, value, unit) by label: ("AUC of click", …, 1), or ("RMSE of stars", …, the RMSE)."""
    values = by_label(metrics)
    for label, label_metrics in by_label(reference).items():
        for metric in ("auc", "rmse"):
            if metric in label_metrics:
                value = label_metrics[metric]
                unit = 1.0 if metric == "auc" or value is None else value
                yield f"{metric.upper()} of {label}", value, values.get(label, {}).get(metric), unit


def by_label(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """Metrics by label; a single label is called "label"."""
    return metrics.get("tasks") or {"label": metrics}


def parity_page(parity: Parity, index: Mapping[str, Any]) -> str:
    """Renders `parity.html`, a self-contained page."""
    sides = {"as trained": parity.trained, "exported": parity.exported}
    if parity.recorded is not None:
        sides["recorded by the trainer"] = parity.recorded
    by_name = by_label(parity.trained)
    columns = [metric for metric in METRICS if any(metric in metrics for metrics in by_name.values())]
    rows = []
    for name in by_name:
        for side, metrics in sides.items():
            values = [by_label(metrics).get(name, {}).get(metric) for metric in columns]
            rows.append([f"{name}, {side}", *("–" if value is None else f"{value:.6f}" for value in values)])
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    page = environment.from_string(Path(__file__).with_name("parity.html").read_text("utf-8"))
    return page.render(parity=parity, index=index, columns=columns, metrics=rows)
