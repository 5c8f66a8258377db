"""The trials of a search as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from rayrec.train.driver.console import figure
from rayrec.train.driver.terminal import plain
from rayrec.train.tune.search import Trial


def trials_table(trials: Sequence[Trial], metric: str) -> Table:
    """A row a trial, the best first: score, evaluations, and what was drawn."""
    table = Table()
    fields = list(trials[0].values) if trials else []
    for head in ("trial", metric, "evaluations", *fields):
        table.add_column(plain(head), justify="left" if head == "trial" else "right")
    for trial in trials:
        score = plain(f"failed: {trial.error}") if trial.error else figure(trial.score)
        values = [plain(_short(trial.values[field])) for field in fields]
        table.add_row(trial.name, score, str(trial.evaluations), *values)
    return table


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
