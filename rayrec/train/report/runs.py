"""Lists and compares the runs in a folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from rayrec.train.errors import StorageError
from rayrec.train.report.compare import compare_page, differing, last_figures
from rayrec.train.report.run import RunRecord, number, read_run
from rayrec.train.run.folder import write_atomically
from rayrec.train.terminal import format_metric, table

MOST_FIELDS = 30


def find_runs(folder: Path) -> list[RunRecord]:
    """The runs in a folder, newest start first.

    Raises:
        ValueError: the folder does not exist.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: not a folder; give a run's storage.path")
    runs = [read_run(path, brief=True) for path in folder.iterdir() if (path / "config.yaml").is_file()]
    return sorted(runs, key=lambda run: run.first_time or 0.0, reverse=True)


def list_table(runs: Sequence[RunRecord]) -> Table:
    """One row per run: status and metrics."""
    listing = table("run", "status", "began", "minutes>", "steps>", "workers>", "samples/s>", "AUC>", "NE>")
    for run in runs:
        scores, result = last_figures(run), run.result or {}
        began = "–" if run.first_time is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(run.first_time))
        lasted = None if run.first_time is None or run.last_time is None else (run.last_time - run.first_time) / 60
        world = number(result, "world_size") or (run.plan.min_world_size if run.plan else None)
        speed = number(result, "samples_per_second")
        listing.add_row(
            run.name,
            run.status,
            began,
            format_metric(lasted, 1),
            f"{run.steps:,}",
            format_metric(world, 0),
            "–" if speed is None else f"{speed:,.0f}",
            format_metric(number(scores, "auc")),
            format_metric(number(scores, "ne")),
        )
    return listing


def compare_table(runs: Sequence[RunRecord]) -> Table:
    """One column per run: final metrics, and config fields that differ."""
    comparison = table("", *(f"{run.name}>" for run in runs))
    scores = [last_figures(run) for run in runs]
    comparison.add_row("status", *(run.status for run in runs))
    comparison.add_row("steps", *(f"{run.steps:,}" for run in runs))
    for name in ("auc", "gauc", "ne", "logloss", "calibration", "auprc"):
        if any(number(line, name) is not None for line in scores):
            comparison.add_row(name, *(format_metric(number(line, name)) for line in scores))
    comparison.add_section()
    fields = differing(runs)
    for name, values in list(fields.items())[:MOST_FIELDS]:
        comparison.add_row(name, *("–" if value is None else str(value) for value in values))
    if len(fields) > MOST_FIELDS:
        comparison.caption = f"and {len(fields) - MOST_FIELDS} more fields; see the page"
    return comparison


def write_comparison(runs: Sequence[RunRecord], path: Path) -> None:
    """Write the page of `compare_page`.

    Raises:
        StorageError: the file cannot be written.
    """
    try:
        write_atomically(path, compare_page(runs))
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror or error})") from None
