"""What a search says: a line for each trial that has ended, and the table of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from rayrec.train.driver.console import Display, format_metric
from rayrec.train.driver.terminal import plain, table


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How a trial ended.

    Args:
        name: of the trial and of its run folder.
        values: what was drawn.
        score: the best value of the metric; None where there was no evaluation.
        evaluations: how many it had.
        error: why it failed, if it did.
    """

    name: str
    values: Mapping[str, Any]
    score: float | None
    evaluations: int
    error: str | None = None


def progress_of(metric: str, mode: str, count: int, display: Display | None = None) -> Any:
    """A callback of Ray Tune's, which keeps it for a search that goes on: then with a display of its own.

    Args:
        metric: that decides; `mode`: "min" or "max".
        count: of trials.
    """
    from ray.tune import Callback

    shown, better = display or Display(), min if mode == "min" else max

    class Progress(Callback):
        def __init__(self) -> None:
            self.ended, self.best = 0, None

        def __reduce__(self) -> Any:
            return progress_of, (metric, mode, count)

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            last = trial.last_result or {}
            value, times = last.get(metric), last.get("evaluations", 0)
            self.best = better((one for one in (self.best, value) if one is not None), default=None)
            self._say(f"{trial}: {metric} {format_metric(value)} after {times} evaluation{'' if times == 1 else 's'}")

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            self._say(f"{trial} failed")

        def _say(self, text: str) -> None:
            self.ended += 1
            shown.say(f"{text} ({self.ended} of {count} trials, best {format_metric(self.best)})")

    return Progress()


def trials_table(trials: Sequence[Trial], metric: str) -> Table:
    """A row a trial, the best first: score, evaluations, and what was drawn."""
    fields = list(trials[0].values) if trials else []
    shown = table("trial", *(f"{plain(head)}>" for head in (metric, "evaluations", *fields)))
    for trial in trials:
        score = plain(f"failed: {trial.error}") if trial.error else format_metric(trial.score)
        values = [plain(_short(trial.values[field])) for field in fields]
        shown.add_row(trial.name, score, str(trial.evaluations), *values)
    return shown


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
