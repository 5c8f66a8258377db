"""Lists and compares the runs in a folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from rayrec.storage.errors import first_line
from rayrec.storage.folder import open_folder
from rayrec.storage.locations import inside
from rayrec.storage.parallel import in_threads
from rayrec.train.errors import StorageError
from rayrec.train.report.compare import FIGURES, compare_page, differing, last_figures
from rayrec.train.report.run import RunRecord, number, read_run
from rayrec.train.run.folder import write_atomically
from rayrec.train.run.mirror import holds, run_here
from rayrec.train.terminal import format_metric, notice, table

MOST_FIELDS = 30


def find_runs(folder: str | Path) -> list[RunRecord]:
    """The runs in a folder, newest start first.

    Args:
        folder: path or URI.

    Raises:
        ValueError: the folder does not exist.
        StorageError: the folder cannot be read.
    """
    location = str(folder)
    if "://" in location:
        runs = _remote_runs(location)
    else:
        if not Path(folder).is_dir():
            raise ValueError(f"{folder}: not a folder; give a run's storage.path")
        runs = [read_run(path, brief=True) for path in Path(folder).iterdir() if (path / "config.yaml").is_file()]
    return sorted(runs, key=lambda run: run.first_time or 0.0, reverse=True)


def _remote_runs(uri: str) -> list[RunRecord]:
    def read(name: str) -> RunRecord | None:
        run_uri = inside(uri, name)
        if not holds(run_uri, "config.yaml"):
            return None
        with run_here(run_uri, notice, files=("config.yaml", "plan.json", "result.json")) as run:
            return read_run(run, brief=True)

    try:
        names = open_folder(uri).names()
    except OSError as error:
        raise StorageError(f"{uri} cannot be read: {first_line(error)}") from error
    return [run for run in in_threads(read, names) if run is not None]


LISTED = ("auc", "ne", "rmse", "mrr", "hr@10", "ndcg@10")


def list_table(runs: Sequence[RunRecord]) -> Table:
    """One row per run: status, and the metrics that some run has."""
    figures = [last_figures(run) for run in runs]
    metrics = [name for name in LISTED if any(number(scores, name) is not None for scores in figures)]
    heads = [f"{name.upper()}>" for name in metrics]
    listing = table("run", "status", "began", "minutes>", "steps>", "workers>", "samples/s>", *heads)
    for run, scores in zip(runs, figures, strict=True):
        result = run.result or {}
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
            *(format_metric(number(scores, name)) for name in metrics),
        )
    return listing


def compare_table(runs: Sequence[RunRecord]) -> Table:
    """One column per run: final metrics, and config fields that differ."""
    comparison = table("", *(f"{run.name}>" for run in runs))
    scores = [last_figures(run) for run in runs]
    comparison.add_row("status", *(run.status for run in runs))
    comparison.add_row("steps", *(f"{run.steps:,}" for run in runs))
    for name in FIGURES:
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
