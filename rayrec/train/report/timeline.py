"""A timeline of a few steps by rank as SVG, and mean times per phase against the plan's prediction."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from rayrec.train.report.run import Line, number
from rayrec.train.report.svg import ticks
from rayrec.train.report.templates import Column, render, table

WIDTH, LABEL = 1100, 70
LANES = (  # name, height and kinds of spans; enclosing spans come first
    ("step", 18, ("rows", "forward", "backward", "update")),
    ("tables", 14, ("route", "ids", "lookup", "vectors")),
    ("exchange", 6, ("exchange",)),
)
NAMES = {
    "rows": "waiting for rows",
    "forward": "forward",
    "backward": "backward",
    "update": "dense update",
    "route": "routing ids",
    "ids": "receiving ids",
    "lookup": "lookups",
    "vectors": "receiving vectors",
    "exchange": "waiting in exchanges",
}
COLUMNS = [
    Column("rank"),
    *(Column(NAMES.get(name, name), "num") for name in ("step", "rows", "exchange", "lookup")),
    Column("lookups, of the mean", "num"),
    Column("as planned", "num"),
]


@dataclass(frozen=True, slots=True)
class Span:
    """A span of one rank; `start` and `ms` (its length) are in milliseconds."""

    name: str
    start: float
    ms: float


def timeline_section(line: Line, times: Sequence[Mapping[str, Any]]) -> Markup:
    """The timeline of `line`, a record of metrics.jsonl; empty if it has no spans.

    Args:
        times: predicted seconds per rank, from plan.json.
    """
    ranks = _spans(line.get("ranks"))
    if not any(ranks):
        return Markup("")
    first_step, height = line.get("first_step"), sum(height for _, height, _ in LANES) + 10
    tops = [6 + rank * height for rank in range(len(ranks))]
    end = max(span.start + span.ms for spans in ranks for span in spans) or 1.0
    scale = (WIDTH - LABEL - 10) / end
    return render(
        "timeline",
        kinds=[
            kind for _, _, names in LANES for kind in names if any(s.name == kind for spans in ranks for s in spans)
        ],
        names=NAMES,
        first=first_step if isinstance(first_step, int) else None,
        width=WIDTH,
        bottom=tops[-1] + height,
        ranks=list(enumerate(tops)),
        spans=[placed for spans, top in zip(ranks, tops, strict=True) for placed in _placed(spans, top, scale)],
        marks=[(LABEL + value * scale, value) for value in ticks(0.0, end, about=8)],
        means=table(COLUMNS, _means(ranks, times)),
    )


def _placed(spans: Sequence[Span], top: int, scale: float) -> Iterator[tuple[Span, float, int, float, int]]:
    """(span, x, y, width, height) of each drawn span, in pixels."""
    for _, height, kinds in LANES:
        for span in spans:
            if span.name in kinds:
                yield span, LABEL + span.start * scale, top, max(0.6, span.ms * scale), height - 1
        top += height


def _spans(ranks: object) -> list[list[Span]]:
    """The valid spans of each rank."""
    return [[span for entry in entries if (span := _span(entry)) is not None] for entries in _lists(ranks)]


def _span(entry: object) -> Span | None:
    if not isinstance(entry, list | tuple) or len(entry) != 3 or entry[0] not in NAMES:
        return None
    name, start, ms = entry
    valid = all(isinstance(x, int | float) and math.isfinite(x) and x >= 0 for x in (start, ms))
    return Span(name, start, ms) if valid else None


def _lists(value: object) -> list[list[Any]]:
    return [item for item in value if isinstance(item, list)] if isinstance(value, list) else []


def _means(ranks: Sequence[Sequence[Span]], times: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    """A table row per rank: mean times over the steps, and measured and planned lookups relative to their means."""
    steps = [max(1, sum(span.name == "update" for span in spans)) for spans in ranks]
    means = [
        {kind: sum(span.ms for span in spans if span.name == kind) / count for kind in NAMES}
        for spans, count in zip(ranks, steps, strict=True)
    ]
    measured = _balance([mean["lookup"] for mean in means])
    lookups = [number(rank_times, "lookup_s") or 0.0 for rank_times in times]
    planned = _balance([lookups[rank] if rank < len(lookups) else 0.0 for rank in range(len(ranks))])
    totals = [(sum(mean[kind] for kind in LANES[0][2]), mean) for mean in means]
    texts = [[f"{ms:.2f} ms" for ms in (step, mean["rows"], mean["exchange"], mean["lookup"])] for step, mean in totals]
    return [[rank, *texts[rank], measured[rank], planned[rank]] for rank in range(len(ranks))]


def _balance(values: Sequence[float]) -> list[str]:
    """Each value divided by the mean of all."""
    mean = sum(values) / len(values)
    return [f"{value / mean:.2f} ×" if mean else "–" for value in values]
