"""The page of `rayrec worth`: NE of variants, and their differences over the windows with error bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from rayrec.train.report.svg import Chart, svg_chart
from rayrec.train.report.templates import Column, render, table

BARS = 1.96  # standard errors of an error bar: 95 %


def worth_page(name: str, figures: Sequence[dict[str, Any]]) -> str:
    """The complete HTML document, without external resources.

    Args:
        figures: as `compare` returns them.
    """
    charts = []
    for one in figures[1:]:
        points = [(number, line["difference"]) for number, line in enumerate(one["windows"], 1)]
        bars = [
            (number, line["difference"] - BARS * line["error"], line["difference"] + BARS * line["error"])
            for number, line in enumerate(one["windows"], 1)
            if line["error"] is not None
        ]
        title = f"NE of {one['name']} minus {figures[0]['name']}, by window"
        zero = (0.0, "no difference")
        chart = Chart(title=title, curve=(), dots=points, bars=bars, unit="{:+.4f}".format, reference=zero)
        charts.append(svg_chart(chart, len(points)))
    windows = [line["window"] for line in figures[0]["windows"]]
    return render(
        "worth",
        title=name,
        rows=table([Column(column) for column in COLUMNS], worth_rows(figures)),
        windows=f"{len(windows)} windows, from {windows[0]} to {windows[-1]}",
        charts=Markup("").join(charts),
    )


COLUMNS = ("variant", "NE", "difference", "in the later half", "time")


def worth_rows(figures: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Cells of a row for each variant."""
    first = figures[0]["seconds"]
    rows = []
    for one in figures:
        pairs = [(one.get(f"{part}difference"), one.get(f"{part}error")) for part in ("", "late_")]
        times = "" if one is figures[0] or not first else f"{one['seconds'] / first:.2f}"
        rows.append([one["name"], f"{one['ne']:.4f}", *(_with_error(*pair) for pair in pairs), times])
    return rows


def _with_error(difference: float | None, error: float | None) -> str:
    if difference is None:
        return "–"
    return f"{difference:+.4f}" + ("" if error is None else f" ± {BARS * error:.4f}")
