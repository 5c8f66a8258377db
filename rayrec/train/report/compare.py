"""Several runs on one HTML page: their last figures, what their configs do not share, their curves side by side."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rayrec.train.config.difference import differing as config_differences
from rayrec.train.report.run import Line, RunRecord, history, number
from rayrec.train.report.svg import Chart, Points, svg_chart

FIGURES = ("auc", "gauc", "ne", "logloss", "calibration", "auprc", "ndcg@10", "recall@10")
CURVES = (
    ("logloss", "loss", "Log loss", "train"),
    ("ne", "ne", "Normalized entropy", "train"),
    ("auc", "auc", "AUC", "train"),
    (None, "samples_per_second", "Samples / s", "speed"),
)
SAME_EVERYWHERE = ("name", "storage.path")


def last_figures(run: RunRecord) -> Line:
    """The last evaluation that stands, or the last one that was made."""
    evals, _ = history(run.evals)
    return evals[-1] if evals else (run.result or {}).get("eval") or {}


def differing(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """The config fields in which the runs differ, with each run's value, None where it has none."""
    found = config_differences([run.config for run in runs])
    return {name: values for name, values in found.items() if name not in SAME_EVERYWHERE}


def compare_page(runs: Sequence[RunRecord]) -> str:
    """The whole HTML document; it needs no network."""
    style = Path(__file__).with_name("report.css").read_text("utf-8")
    script = Path(__file__).with_name("report.js").read_text("utf-8")
    title = escape(" · ".join(run.name for run in runs))
    body = f"<h1>{title}</h1>{_figures(runs)}{_differences(runs)}{_curves(runs)}"
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<title>{title} · rayrec</title><link rel='icon' href='data:,'>\n<style>{style}</style></head>\n"
        f"<body><main>{body}</main>\n<script>{script}</script></body></html>\n"
    )


def _figures(runs: Sequence[RunRecord]) -> str:
    found = [last_figures(run) for run in runs]
    shown = [name for name in FIGURES if any(number(line, name) is not None for line in found)]
    rows = []
    for run, line in zip(runs, found, strict=True):
        values = [number(line, name) for name in shown]
        texts = ["–" if value is None else f"{value:.4f}" for value in values]
        rows.append([run.name, run.status, f"{run.steps:,}", *texts])
    return f"<h2>Last evaluation</h2>{_table(['run', 'status', 'steps', *shown], rows)}"


def _differences(runs: Sequence[RunRecord]) -> str:
    fields = differing(runs)
    rows = [[name, *("–" if value is None else str(value) for value in values)] for name, values in fields.items()]
    table = _table(["field", *(run.name for run in runs)], rows) if rows else "<p>The configs are alike.</p>"
    return f"<h2>What differs in the configs</h2>{table}"


def _curves(runs: Sequence[RunRecord]) -> str:
    """One row a figure, one column a run, all of a row on the same axes."""
    last_step = max((run.steps for run in runs), default=0)
    sections = []
    for dots, key, title, colour in CURVES:
        series = [(_points(history(run.train)[0], key), _points(history(run.evals)[0], dots)) for run in runs]
        values = [value for curve, scored in series for _, value in [*curve[len(curve) // 20 :], *scored]]
        low, high = (min(values), max(values)) if values else (None, None)
        charts = [
            Chart(
                title=f"{title}, {run.name}", curve=curve, dots=scored, low=low, high=high, smooth=True, colour=colour
            )
            for run, (curve, scored) in zip(runs, series, strict=True)
        ]
        drawn = "".join(svg_chart(chart, last_step) for chart in charts)
        sections.append(f"<div class='charts'>{drawn}</div>")
    return f"<h2>Over steps</h2>{''.join(sections)}"


def _points(lines: Sequence[Line], key: str | None) -> Points:
    if key is None:
        return ()
    pairs = [(number(line, "step"), number(line, key)) for line in lines]
    return [(step, value) for step, value in pairs if step is not None and value is not None]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
