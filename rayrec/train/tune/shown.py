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

    def score_of(trial: Any) -> float | None:
        """The best evaluation of a trial, as in the table at the end."""
        score: float | None = trial.metric_analysis.get(metric, {}).get(mode)
        return score

    class Progress(Callback):
        def __reduce__(self) -> Any:
            return progress_of, (metric, mode, count)

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            times = (trial.last_result or {}).get("evaluations", 0)
            score = f"{metric} {format_metric(score_of(trial))}"
            text = f"{score}, the best of {times} evaluation{'' if times == 1 else 's'}"
            self._say(f"{trial}: {text}", trials, trial)

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            self._say(f"{trial} failed", trials, trial)

        def _say(self, text: str, trials: list[Any], trial: Any) -> None:
            # From all trials, because a resumed search has trials that ended before.
            ended = 1 + sum(other.is_finished() for other in trials if other is not trial)
            best = better((score for score in map(score_of, trials) if score is not None), default=None)
            output.say(f"{text} ({ended} of {count} trials, best {format_metric(best)})")

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
