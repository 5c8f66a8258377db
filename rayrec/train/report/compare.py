"""Several runs on one HTML page: final metrics, config differences, and curves side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

from rayrec.train.config import difference
from rayrec.train.report.run import Line, RunRecord, history, number, points_of
from rayrec.train.report.svg import Chart, svg_chart
from rayrec.train.report.tables import figure_text
from rayrec.train.report.templates import Column, render, table

FIGURES = ("auc", "gauc", "ne", "logloss", "calibration", "auprc", "ndcg@10", "recall@10", "recall@50", "mrr")
CURVES = (
    ("logloss", "loss", "Log loss", "train"),
    ("ne", "ne", "Normalized entropy", "train"),
    ("auc", "auc", "AUC", "train"),
    (None, "samples_per_second", "Samples / s", "speed"),
)
OF_EACH_RUN = ("name", "storage.path")


def last_figures(run: RunRecord) -> Line:
    """Metrics of the last valid evaluation, or those in the result if no evaluation was read."""
    evals, _ = history(run.evals)
    return evals[-1] if evals else (run.result or {}).get("eval") or {}


def differing(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Config fields that differ → the value of each run; None if it has none. Without name and storage path."""
    fields = difference.differing([run.config for run in runs])
    return {name: values for name, values in fields.items() if name not in OF_EACH_RUN}


def compare_page(runs: Sequence[RunRecord]) -> str:
    """The complete HTML document, without external resources."""
    title = " · ".join(run.name for run in runs)
    return render(
        "compared", title=title, figures=_figures(runs), differences=_differences(runs), curves=list(_curves(runs))
    )


def _figures(runs: Sequence[RunRecord]) -> Markup:
    lines = [last_figures(run) for run in runs]
    names = [name for name in FIGURES if any(number(line, name) is not None for line in lines)]
    rows = [
        [run.name, run.status, f"{run.steps:,}", *(figure_text(line, name) for name in names)]
        for run, line in zip(runs, lines, strict=True)
    ]
    return table([Column(name) for name in ("run", "status", "steps", *names)], rows)


def _differences(runs: Sequence[RunRecord]) -> Markup:
    fields = differing(runs)
    rows = [[name, *("–" if value is None else value for value in values)] for name, values in fields.items()]
    return table([Column(name) for name in ("field", *(run.name for run in runs))], rows)


def _curves(runs: Sequence[RunRecord]) -> Iterator[Markup]:
    """One row per metric and one column per run; the charts of a row share their axes."""
    last_step = max((run.steps for run in runs), default=0)
    for dots, key, title, colour in CURVES:
        series = [(points_of(history(run.train)[0], key), points_of(history(run.evals)[0], dots)) for run in runs]
        values = [value for curve, scored in series for _, value in [*curve[len(curve) // 20 :], *scored]]
        low, high = (min(values), max(values)) if values else (None, None)
        charts = [
            Chart(
                title=f"{title}, {run.name}", curve=curve, dots=scored, low=low, high=high, smooth=True, colour=colour
            )
            for run, (curve, scored) in zip(runs, series, strict=True)
        ]
        yield Markup("").join(svg_chart(chart, last_step) for chart in charts)
