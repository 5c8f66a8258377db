"""Curves over steps as inline SVG, from plain numbers. Colours are CSS classes; `report.css` decides them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TypeVar

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 18, 28
MAX_POINTS = 600  # a longer curve is averaged down to this many points
MAX_DOTS = 300
SMOOTHED_FROM = 40  # points; a shorter curve is readable as it is

# Inside, what leaves the plot is cut off.
PLOT = (
    f"<svg x='{LEFT}' y='{TOP - 6}' width='{WIDTH - LEFT - RIGHT + 4}' height='{HEIGHT - TOP - BOTTOM + 6}' "
    f"viewBox='{LEFT} {TOP - 6} {WIDTH - LEFT - RIGHT + 4} {HEIGHT - TOP - BOTTOM + 6}'>"
)

T = TypeVar("T")
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at a step: a dashed line with a tooltip. `kind` is its CSS class."""

    step: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart: a training curve, what was undone of it, and evaluation dots.

    Args:
        unit: how a value is written, such as `"{:.4f}".format`.
        smooth: draws the curve faint, and its moving average bold.
        reference: a value with a meaning, and that meaning; drawn where it is near the data.
        low, high: ends of the value axis; taken from the data where None.
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


@dataclass(frozen=True, slots=True)
class _Scale:
    """From data to pixels."""

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


def svg_chart(chart: Chart, last_step: float) -> str:
    """The chart as an HTML `figure`, its step axis from 0 to `last_step`; says so where there is nothing to draw."""
    curve = thin(chart.curve, MAX_POINTS)
    chart = replace(chart, dots=evenly(chart.dots, MAX_DOTS))
    trend = moving_average(curve) if chart.smooth and len(curve) > SMOOTHED_FROM else curve
    latest = chart.dots[-1][1] if chart.dots else trend[-1][1] if trend else None
    heading = f"<b>{escape(chart.title)}</b>"
    if latest is not None:
        heading += f"<span class='latest {'dot' if chart.dots else chart.colour}'>{escape(chart.unit(latest))}</span>"
    caption = f"<figcaption>{heading}</figcaption>"
    if not curve and not chart.dots:
        return f"<figure class='chart'>{caption}<div class='nothing'>nothing recorded yet</div></figure>"
    scale = _Scale((0, max(last_step, 1)), _value_range(chart, curve, trend))
    parts = [
        *_grid(scale, percent=chart.unit(1).endswith("%")),
        *_reference(scale, chart.reference, [*chart.dots] or trend),
        *_marks(scale, chart.marks),
        PLOT,
        *_curves(scale, chart, curve, trend),
        "</svg>",
        *_dots(scale, chart),
    ]
    hover = escape(json.dumps({"curve": _hover(trend), "dots": _hover(chart.dots)}), quote=True)
    return (
        f"<figure class='chart'>{caption}<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' data-last='{scale.steps[1]:g}' "
        f"aria-label='{escape(chart.title, quote=True)} over steps' data-hover='{hover}'>"
        f"{''.join(parts)}</svg></figure>"
    )


def thin(points: Points, most: int) -> list[tuple[float, float]]:
    """At most `most` points, each the mean of as many neighbours."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return list(points)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def evenly(items: Sequence[T], most: int) -> Sequence[T]:
    """At most `most` of them, evenly chosen, the last one among them."""
    stride = -(-len(items) // most) or 1
    return items[::-stride][::-1]


def moving_average(points: Points, share: float = 0.08) -> list[tuple[float, float]]:
    """Each value as the mean of its neighbours, `share` of them all wide; narrow at the start, one-sided at the end."""
    half = max(1, int(len(points) * share / 2))
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    smoothed = []
    for i, (step, _) in enumerate(points):
        before, after = min(half, i), min(half, i, len(points) - 1 - i)
        smoothed.append((step, (sums[i + after + 1] - sums[i - before]) / (before + after + 1)))
    return smoothed


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between `low` and `high`."""
    raw = (high - low) / about
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _value_range(chart: Chart, curve: Points, trend: Points) -> tuple[float, float]:
    """The values shown: all of the trend after its start, all dots, and the bulk of the noise."""
    noise = sorted(value for _, value in [*curve, *chart.undone])
    cut = len(noise) // 50
    seen = [*noise[cut : len(noise) - cut], *(v for _, v in trend[len(trend) // 50 :]), *(v for _, v in chart.dots)]
    low, high = min(seen), max(seen)
    if chart.reference and low - (high - low) / 2 <= chart.reference[0] <= high + (high - low) / 2:
        low, high = min(low, chart.reference[0]), max(high, chart.reference[0])
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    low = low - margin if chart.low is None else chart.low
    high = high + margin if chart.high is None else chart.high
    return low, high if high > low else low + 1.0


def _grid(scale: _Scale, percent: bool) -> list[str]:
    parts = []
    for value in ticks(*scale.values):
        y = scale.y(value)
        parts.append(f"<line class='grid' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y}' y2='{y}'/>")
        parts.append(
            f"<text class='tick' x='{LEFT - 8}' y='{y + 3.5}' text-anchor='end'>{_tick(value, percent)}</text>"
        )
    for step in ticks(*scale.steps, about=6):
        if step == int(step):
            x, y = scale.x(step), HEIGHT - BOTTOM + 17
            parts.append(f"<text class='tick' x='{x}' y='{y}' text-anchor='middle'>{_tick(step)}</text>")
    y = HEIGHT - BOTTOM
    return [*parts, f"<line class='axis' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y}' y2='{y}'/>"]


def _tick(value: float, percent: bool = False) -> str:
    if percent:
        return f"{value * 100:.6g}%"
    if abs(value) >= 10_000:
        for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= factor:
                return f"{value / factor:g}{letter}"
    return f"{value:.6g}"


def _reference(scale: _Scale, reference: tuple[float, str] | None, beside: Points) -> list[str]:
    """A dotted line, its name at the end where the points are farther away."""
    if not reference or not scale.values[0] <= reference[0] <= scale.values[1]:
        return []
    y = scale.y(reference[0])
    at_end = abs(beside[-1][1] - reference[0]) >= abs(beside[0][1] - reference[0]) and len(beside) > 1
    x, anchor = (WIDTH - RIGHT, "end") if at_end else (LEFT + 4, "start")
    return [
        f"<line class='reference' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y}' y2='{y}'/>",
        f"<text class='tick' x='{x}' y='{y - 5}' text-anchor='{anchor}'>{escape(reference[1])}</text>",
    ]


def _marks(scale: _Scale, marks: Sequence[Mark]) -> list[str]:
    parts = []
    for mark in marks:
        x, bottom = scale.x(mark.step), HEIGHT - BOTTOM
        title = f"<title>{escape(mark.text)}</title>"
        if mark.kind == "checkpoint":
            shape = f"<path d='M{x} {bottom - 6}l4 6h-8z'/>"
        else:
            shape = f"<line x1='{x}' x2='{x}' y1='{TOP}' y2='{bottom}'/><circle cx='{x}' cy='{TOP}' r='4'/>"
        parts.append(f"<g class='mark {escape(mark.kind, quote=True)}'>{title}{shape}</g>")
    return parts


def _curves(scale: _Scale, chart: Chart, curve: Points, trend: Points) -> list[str]:
    parts = []
    if len(chart.undone) > 1:
        parts.append(f"<path class='line undone' d='{scale.path(thin(chart.undone, MAX_POINTS))}'/>")
    if len(trend) == 1:
        (step, value) = trend[0]
        return [*parts, f"<circle class='only {chart.colour}' cx='{scale.x(step)}' cy='{scale.y(value)}' r='3'/>"]
    if trend is not curve:
        parts.append(f"<path class='line faint {chart.colour}' d='{scale.path(curve)}'/>")
    if trend:
        parts.append(f"<path class='line {chart.colour}' d='{scale.path(trend)}'/>")
    return parts


def _dots(scale: _Scale, chart: Chart) -> list[str]:
    if not chart.dots:
        return []
    parts = [f"<path class='line dots' d='{scale.path(chart.dots)}'/>"]
    for step, value in chart.dots:
        title = f"<title>evaluation at step {step:,.0f}: {escape(chart.unit(value))}</title>"
        parts.append(f"<circle class='dot' cx='{scale.x(step)}' cy='{scale.y(value)}' r='4.5'>{title}</circle>")
    return parts


def _hover(points: Points) -> list[list[float]]:
    return [[step, float(f"{value:.6g}")] for step, value in points]
