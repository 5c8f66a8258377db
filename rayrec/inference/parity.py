"""The proof of an export: its scores beside those of the trained model, row by row and in the figures."""

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
from rayrec.metrics import LabelMetrics
from rayrec.models import Batch
from rayrec.quant import TableFormat

Score = Callable[[Batch], torch.Tensor]
SAMPLE_ROWS = 100_000
FIGURES = ("auc", "ne", "logloss", "calibration", "rmse", "mae", "r2")  # the last three of numbers


@dataclass(frozen=True, slots=True)
class Limits:
    """How far an export may be from the trained model.

    Args:
        logit: greatest difference of a logit, for each unit of the greatest logit; None: not limited.
        auc: greatest difference of the area under the curve, of any label; of the RMSE of a number, as its share.
        time: greatest time of a batch, in those of the trained model; None: not limited.
    """

    logit: float | None
    auc: float
    time: float | None = None

    @classmethod
    def of(cls, formats: Iterable[TableFormat], dense: str) -> Limits:
        """What may be expected of these number formats."""
        found = set(formats)
        if dense != "fp32":  # narrow tables save memory, narrow layers nothing but time
            return cls(logit=None, auc=5e-4, time=1.0)
        if TableFormat.INT4 in found:
            return cls(logit=None, auc=5e-4)
        if found != {TableFormat.FP32}:
            return cls(logit=None, auc=1e-4)
        return cls(logit=1e-6, auc=1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What was found.

    Args:
        rows: that both scored.
        sampled: whether they were drawn from more evaluation rows.
        logit_max, logit_mean, probability_max: greatest and mean difference.
        trained, exported: figures of both on these rows.
        recorded: what the trainer wrote down for this checkpoint and these rows; None where it did not.
        bytes: of the export's tables, and of them as fp32.
        ms_per_1000_rows: of both, in this process.
        quantiles: of the exported probabilities, 0 % to 100 %, of rows drawn from all these rows; a service
            compares what it sees with them.
        slow: that it takes longer than its limit; None: it does not.
        problems: why its scores are not within their limits; empty: they are.
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
    limits: Limits
    slow: str | None = None
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"within_limits": not self.problems, **asdict(self)}

    def compared(self) -> Iterable[tuple[str, float | None, float | None, float]]:
        """`quality` of the figures of both."""
        return quality(self.trained, self.exported)


class _Side:
    """One model's scores and its time."""

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
    """Rows drawn from all that are added, each with the same chance: those of the least random numbers. The numbers
    depend on a row's place alone, so that equal rows give an equal sample.
    """

    def __init__(self, most: int) -> None:
        self._most, self._random = most, np.random.default_rng(0)
        self._keys, self._rows = torch.empty(0, dtype=torch.float64), torch.empty(0)

    def add(self, rows: torch.Tensor) -> None:
        keys = torch.from_numpy(self._random.random(len(rows)))
        self._keys = torch.cat([self._keys, keys])
        self._rows = torch.cat([self._rows, rows]) if len(self._rows) else rows
        if len(self._keys) > 2 * self._most:
            self._cut()

    @property
    def rows(self) -> torch.Tensor:
        """At most so many `[n, T]`."""
        self._cut()
        return self._rows

    def _cut(self) -> None:
        if len(self._keys) > self._most:
            self._keys, places = self._keys.topk(self._most, largest=False)
            self._rows = self._rows[places]


def compare(
    trained: Score,
    exported: Score,
    batches: Iterable[Batch],
    inputs: Inputs,
    limits: Limits,
    bytes_: Mapping[str, int],
    recorded: Mapping[str, Any] | None = None,
    sampled: bool = False,
) -> Parity:
    """Scores every batch with both.

    Raises:
        ValueError: there are no rows.
    """
    one, other = _Side(trained, inputs), _Side(exported, inputs)
    rows, total, greatest, greatest_p, largest = 0, 0.0, 0.0, 0.0, 1.0
    sample = _Sample(SAMPLE_ROWS)
    for batch in batches:
        if not batch.rows:
            continue
        if not rows:
            trained(batch), exported(batch)  # the first call of each takes longer
        a, b = one(batch).double(), other(batch).double()
        difference = (a - b).abs()
        rows, total = rows + batch.rows, total + float(difference.mean()) * batch.rows
        greatest = max(greatest, _number(difference.max()))
        answers = inputs.answers(b)
        greatest_p = max(greatest_p, _number((inputs.answers(a) - answers).abs().max()))
        largest = max(largest, _number(a.abs().max()))
        sample.add(answers)
    if not rows:
        raise ValueError("there are no rows to compare scores on; give evaluation rows")
    names = inputs.labels or ("label",)
    steps = torch.linspace(0, 1, 11, dtype=torch.float64)
    quantiles = torch.quantile(sample.rows, steps, dim=0).t().tolist()
    figures = one.metrics.compute(), other.metrics.compute()
    ms = {"trained": sum(one.seconds) / rows * 1e6, "exported": sum(other.seconds) / rows * 1e6}
    times = statistics.median(b / a for a, b in zip(one.seconds, other.seconds, strict=True))
    return Parity(
        rows=rows,
        sampled=sampled,
        logit_max=greatest,
        logit_mean=total / rows,
        probability_max=greatest_p,
        trained=figures[0],
        exported=figures[1],
        recorded=None if recorded is None else dict(recorded),
        bytes=dict(bytes_),
        ms_per_1000_rows=ms,
        quantiles=dict(zip(names, quantiles, strict=True)),
        limits=limits,
        slow=None if limits.time is None or times <= limits.time else f"slower than as trained: {times:.2g} times",
        problems=_problems(figures, recorded, limits, greatest / largest),
    )


def _number(value: torch.Tensor) -> float:
    """A NaN is the greatest difference of all."""
    found = float(value)
    return found if found == found else float("inf")


def _problems(
    figures: tuple[Mapping[str, Any], Mapping[str, Any]],
    recorded: Mapping[str, Any] | None,
    limits: Limits,
    logit: float,
) -> list[str]:
    trained, exported = figures
    found = []
    if limits.logit is not None and logit > limits.logit:
        found.append(f"a logit differs by {logit:.2g} of the greatest one; the limit is {limits.logit:g}")
    for name, a, b, unit in quality(trained, exported):
        if a is not None and (b is None or abs(a - b) > limits.auc * unit):
            found.append(f"{name}: {a:.6f} as trained, {_shown(b)} exported; the limit is {limits.auc * unit:.3g}")
    for name, a, b, unit in quality(recorded or {}, trained):
        if a is not None and (b is None or abs(a - b) > 1e-5 * unit):
            found.append(f"{name}: the trainer wrote {a:.6f} down for these rows, they give {_shown(b)} here")
    return found


def _shown(auc: float | None) -> str:
    return "none" if auc is None else f"{auc:.6f}"


def quality(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> Iterable[tuple[str, float | None, float | None, float]]:
    """Of each label ("AUC of click", the first's, the second's, 1), or of a number ("RMSE of …", …, the first's)."""
    other = by_label(second)
    for name, figures in by_label(first).items():
        for figure in ("auc", "rmse"):
            if figure in figures:
                value = figures[figure]
                unit = 1.0 if figure == "auc" or value is None else value
                yield f"{figure.upper()} of {name}", value, other.get(name, {}).get(figure), unit


def by_label(figures: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of each label; of the only one as "label"."""
    return figures.get("tasks") or {"label": figures}


def parity_page(parity: Parity, index: Mapping[str, Any]) -> str:
    """One HTML file without links, `parity.html` here filled in."""
    sides = {"as trained": parity.trained, "exported": parity.exported}
    if parity.recorded is not None:
        sides["written down by the trainer"] = parity.recorded
    shown = [figure for figure in FIGURES if any(figure in of for of in by_label(parity.trained).values())]
    rows = []
    for name in by_label(parity.trained):
        for side, figures in sides.items():
            values = [by_label(figures).get(name, {}).get(figure) for figure in shown]
            rows.append([f"{name}, {side}", *("–" if value is None else f"{value:.6f}" for value in values)])
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    page = environment.from_string(Path(__file__).with_name("parity.html").read_text("utf-8"))
    return page.render(parity=parity, index=index, shown=shown, figures=rows)
