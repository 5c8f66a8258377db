"""Charts over steps as inline SVG. Colours are CSS classes of `report.css`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from markupsafe import Markup

from rayrec.train.report.templates import render

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 18, 28
MAX_POINTS = 600  # a longer curve is averaged down to this many points
MAX_DOTS = 300
SMOOTHED_FROM = 40  # points; a shorter curve is not smoothed

EDGES = {
    "width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM
}  # fmt: skip

T = TypeVar("T")
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event at a step, drawn as a dashed line with a tooltip. `kind` is its CSS class."""

    step: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A training curve, its undone points, and evaluation dots.

    Args:
        unit: formats a value, for example `"{:.4f}".format`.
        smooth: draw the curve faint and its moving average bold.
        reference: a value and its label; drawn only near the data.
        low, high: ends of the value axis; default: from the data.
        bars: step, low and high end of error bars.
    """

    title: str
    curve: Points
    undone: Points = ()
    dots: Points = ()
    marks: Sequence[Mark] = ()
    unit: Callable[[float], str] = "{:.4g}".format
    smooth: bool = False
    reference: tuple[float, str] | None = None
    low: float | None = None
    high: float | None = None
    colour: str = "train"
    bars: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps data to pixels."""

    steps: tuple[float, float]
    values: tuple[float, float]

    def x(self, step: float) -> float:
        low, high = self.steps
        return round(LEFT + (step - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self.values
        share = min(max((value - low) / (high - low), -1), 2)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def path(self, points: Points) -> str:
        return "M" + "L".join(f"{self.x(step)} {self.y(value)}" for step, value in points)


def svg_chart(chart: Chart, last_step: float) -> Markup:
    """The chart as an HTML `figure`, with steps from 0 to `last_step`; an empty chart says that it has no data."""
    curve = thin(chart.curve, MAX_POINTS)
    chart = replace(chart, curve=curve, dots=evenly(chart.dots, MAX_DOTS))
    smoothed = chart.smooth and len(curve) > SMOOTHED_FROM
    trend = moving_average(curve) if smoothed else curve
    latest = chart.dots[-1][1] if chart.dots else trend[-1][1] if trend else None
    if latest is None:
        return render("chart", chart=chart, latest=None, scale=None)
    scale = _Scale((0, max(last_step, 1)), _value_range(chart, curve, trend))
    percent = chart.unit(1).endswith("%")
    return render(
        "chart",
        chart=chart,
        trend=trend,
        undone=thin(chart.undone, MAX_POINTS),
        smoothed=smoothed,
        latest=latest,
        scale=scale,
        value_ticks=[(scale.y(value), _tick(value, percent)) for value in ticks(*scale.values)],
        step_ticks=[(scale.x(step), _tick(step)) for step in ticks(*scale.steps, about=6) if step == int(step)],
        reference=_reference(scale, chart.reference, [*chart.dots] or trend),
        hover=json.dumps({"curve": _hover(trend), "dots": _hover(chart.dots)}),
        **EDGES,
    )


def reliability_diagrams(bands: Sequence[Mapping[str, Any]]) -> Markup:
    """A diagram for each label: share of positives over predicted probability; empty without bands.

    Args:
        bands: the points, as of `LabelMetrics.reliability_of`.
    """
    most = max((max(band["predicted"], band["observed"]) for band in bands), default=0.0)
    if not most:
        return Markup("")
    scale = _Scale((0, most * 1.05), (0, most * 1.05))
    by_label: dict[str, list[tuple[object, ...]]] = {}
    for band in bands:
        point = (band["predicted"], band["observed"])
        texts = (f"{point[0]:.4g}", f"{point[1]:.4g}", f"{band['weight']:,.0f}")
        by_label.setdefault(str(band["label"] or "Reliability"), []).append(
            (scale.x(point[0]), scale.y(point[1]), *texts)
        )
    return render(
        "reliability",
        diagrams=list(by_label.items()),
        value_ticks=[(scale.y(value), _tick(value)) for value in ticks(*scale.values)],
        share_ticks=[(scale.x(value), _tick(value)) for value in ticks(*scale.steps)],
        **EDGES,
    )


def thin(points: Points, most: int) -> list[tuple[float, float]]:
    """At most `most` points; each has the mean value and the last step of a group of neighbours."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return list(points)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def evenly(items: Sequence[T], most: int) -> Sequence[T]:
    """At most `most` evenly spaced items, including the last."""
    stride = -(-len(items) // most) or 1
    return items[::-stride][::-1]


def moving_average(points: Points, share: float = 0.08) -> list[tuple[float, float]]:
    """Moving average over a window of `share` of all points; narrower at the start, one-sided at the end."""
    half = max(1, int(len(points) * share / 2))
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    smoothed = []
    for i, (step, _) in enumerate(points):
        left, right = min(half, i), min(half, i, len(points) - 1 - i)
        smoothed.append((step, (sums[i + right + 1] - sums[i - left]) / (left + right + 1)))
    return smoothed


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between `low` and `high`."""
    raw = (high - low) / about
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    start = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(start, math.floor(high / step + 1e-9) + 1)]


def _value_range(chart: Chart, curve: Points, trend: Points) -> tuple[float, float]:
    """The value axis: covers the trend after its start, all dots, and most of the noise."""
    noise = sorted(value for _, value in [*curve, *chart.undone])
    cut = len(noise) // 50
    seen = [*noise[cut : len(noise) - cut], *(v for _, v in trend[len(trend) // 50 :]), *(v for _, v in chart.dots)]
    seen += [value for _, *ends in chart.bars for value in ends]
    low, high = min(seen), max(seen)
    if chart.reference and low - (high - low) / 2 <= chart.reference[0] <= high + (high - low) / 2:
        low, high = min(low, chart.reference[0]), max(high, chart.reference[0])
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    low = low - margin if chart.low is None else chart.low
    high = high + margin if chart.high is None else chart.high
    return low, high if high > low else low + 1.0


def _tick(value: float, percent: bool = False) -> str:
    if percent:
        return f"{value * 100:.6g}%"
    if abs(value) >= 10_000:
        for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= factor:
                return f"{value / factor:g}{letter}"
    return f"{value:.6g}"


def _reference(scale: _Scale, reference: tuple[float, str] | None, beside: Points) -> dict[str, Any] | None:
    """The dotted reference line, labelled at the end with more distance to the points; None if it is not drawn."""
    if not reference or not scale.values[0] <= reference[0] <= scale.values[1]:
        return None
    at_end = abs(beside[-1][1] - reference[0]) >= abs(beside[0][1] - reference[0]) and len(beside) > 1
    return {"y": scale.y(reference[0]), "at_end": at_end, "text": reference[1]}


def _hover(points: Points) -> list[list[float]]:
    return [[step, float(f"{value:.6g}")] for step, value in points]
