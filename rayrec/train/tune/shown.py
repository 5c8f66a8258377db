"""Console output of a search: a line per finished trial, and a table of all trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from rayrec.train.driver.console import Display
from rayrec.train.terminal import format_metric, plain, table


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of a trial.

    Args:
        name: name of the trial and of its run folder.
        values: sampled values, by config field.
        score: best value of the metric; None without an evaluation.
        evaluations: number of evaluations.
        error: why it failed; None if it did not.
    """

    name: str
    values: Mapping[str, Any]
    score: float | None
    evaluations: int
    error: str | None = None


def progress_of(metric: str, mode: str, count: int, display: Display | None = None) -> Any:
    """A Ray Tune callback that prints finished trials. An unpickled copy, as in a resumed search, has a new display.

    Args:
        metric: the metric to optimize.
        mode: "min" or "max".
        count: number of trials.
    """
    from ray.tune import Callback

    output, better = display or Display(), min if mode == "min" else max

    class Progress(Callback):
        def __init__(self) -> None:
            self.ended, self.best = 0, None

        def __reduce__(self) -> Any:
            return progress_of, (metric, mode, count)

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            last = trial.last_result or {}
            value, times = last.get(metric), last.get("evaluations", 0)
            self.best = better((score for score in (self.best, value) if score is not None), default=None)
            self._say(f"{trial}: {metric} {format_metric(value)} after {times} evaluation{'' if times == 1 else 's'}")

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            self._say(f"{trial} failed")

        def _say(self, text: str) -> None:
            self.ended += 1
            output.say(f"{text} ({self.ended} of {count} trials, best {format_metric(self.best)})")

    return Progress()


def trials_table(trials: Sequence[Trial], metric: str) -> Table:
    """One row per trial, in the given order: score, evaluations, sampled values."""
    fields = list(trials[0].values) if trials else []
    listing = table("trial", *(f"{plain(head)}>" for head in (metric, "evaluations", *fields)))
    for trial in trials:
        score = plain(f"failed: {trial.error}") if trial.error else format_metric(trial.score)
        values = [plain(_short(trial.values[field])) for field in fields]
        listing.add_row(trial.name, score, str(trial.evaluations), *values)
    return listing


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
