"""A few steps by rank, as an SVG, and what they were spent on beside what the plan expected."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rayrec.train.report.run import Line
from rayrec.train.report.svg import ticks

WIDTH, LABEL = 1100, 70
LANES = (  # name, height and kinds of spans: what holds others is above them
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


@dataclass(frozen=True, slots=True)
class Span:
    """Of one rank: its name, and its start and length in ms."""

    name: str
    start: float
    ms: float


def timeline_section(line: Line, times: Sequence[Mapping[str, Any]]) -> str:
    """The spans of `line`, a record of metrics.jsonl; nothing where it has none.

    Args:
        times: what the plan expects of each rank.
    """
    ranks = _spans(line.get("ranks"))
    if not any(ranks):
        return ""
    first = line.get("first_step")
    kinds = [kind for _, _, of in LANES for kind in of if any(span.name == kind for spans in ranks for span in spans)]
    legend = "".join(f"<span class='key span-{kind}'>{NAMES[kind]}</span>" for kind in kinds)
    note = f"<span class='note'>from step {escape(f'{first:,}')} on</span>" if isinstance(first, int) else ""
    explanation = (
        "<p class='note'>as each worker's host sees it, from a common start; on a GPU work goes on behind it. Lookups "
        "are compared with the mean of the workers shown.</p>"
    )
    return (
        f"<div class='legend'>{legend}{note}</div><div class='wide'>{_picture(ranks)}</div>"
        f"<div class='wide'>{_table(ranks, times)}</div>{explanation}"
    )


def _spans(ranks: object) -> list[list[Span]]:
    """What can be read of each rank's spans."""
    return [[span for entry in of if (span := _span(entry)) is not None] for of in _lists(ranks)]


def _span(entry: object) -> Span | None:
    if not isinstance(entry, list | tuple) or len(entry) != 3 or entry[0] not in NAMES:
        return None
    name, start, ms = entry
    whole = all(isinstance(x, int | float) and math.isfinite(x) and x >= 0 for x in (start, ms))
    return Span(name, start, ms) if whole else None


def _lists(value: object) -> list[list[Any]]:
    return [of for of in value if isinstance(of, list)] if isinstance(value, list) else []


def _picture(ranks: Sequence[Sequence[Span]]) -> str:
    end = max(span.start + span.ms for spans in ranks for span in spans) or 1.0
    scale = (WIDTH - LABEL - 10) / end
    parts, y = [], 6
    for rank, spans in enumerate(ranks):
        parts.append(f"<text class='name' x='0' y='{y + 13}'>rank {rank}</text>")
        for _, height, kinds in LANES:
            for span in spans:
                if span.name in kinds:
                    x, width = LABEL + span.start * scale, max(0.6, span.ms * scale)
                    parts.append(
                        f"<rect class='span span-{span.name}' x='{x:.1f}' y='{y}' width='{width:.1f}' "
                        f"height='{height - 1}'><title>{NAMES[span.name]}: {span.ms:.3f} ms</title></rect>"
                    )
            y += height
        y += 10
    for value in ticks(0.0, end, about=8):
        x = LABEL + value * scale
        parts.append(f"<line class='grid' x1='{x:.1f}' x2='{x:.1f}' y1='0' y2='{y - 4}'/>")
        parts.append(f"<text class='tick' x='{x:.1f}' y='{y + 10}' text-anchor='middle'>{value:g} ms</text>")
    height = y + 18
    return f"<svg class='plan' width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}'>{''.join(parts)}</svg>"


def _table(ranks: Sequence[Sequence[Span]], times: Sequence[Mapping[str, Any]]) -> str:
    """Means over the steps; the planned lookups beside the measured ones, both over their mean."""
    steps = [max(1, sum(span.name == "update" for span in spans)) for spans in ranks]
    means = [
        {kind: sum(span.ms for span in spans if span.name == kind) / count for kind in NAMES}
        for spans, count in zip(ranks, steps, strict=True)
    ]
    measured = _balance([mean["lookup"] for mean in means])
    planned = _balance([_seconds(times[rank]) if rank < len(times) else 0.0 for rank in range(len(ranks))])
    rows = []
    for rank, mean in enumerate(means):
        step = sum(mean[kind] for kind in LANES[0][2])
        cells = [f"{step:.2f} ms", f"{mean['rows']:.2f} ms", f"{mean['exchange']:.2f} ms", f"{mean['lookup']:.2f} ms"]
        cells += [measured[rank], planned[rank]]
        rows.append(f"<tr><td>{rank}</td>{''.join(f'<td class=num>{cell}</td>' for cell in cells)}</tr>")
    heads = ("step", NAMES["rows"], NAMES["exchange"], NAMES["lookup"], "lookups, of the mean", "as planned")
    head = "<th>rank</th>" + "".join(f"<th class=num>{name}</th>" for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _balance(values: Sequence[float]) -> list[str]:
    """Each value as a part of their mean."""
    mean = sum(values) / len(values)
    return [f"{value / mean:.2f} ×" if mean else "–" for value in values]


def _seconds(time: Mapping[str, Any]) -> float:
    value = time.get("lookup_s", 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
