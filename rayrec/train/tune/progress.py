"""What a search says while it runs: a line for each trial that has ended."""

from __future__ import annotations

from typing import Any

from rayrec.train.driver.console import Display, figure


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
            self._say(f"{trial}: {metric} {figure(value)} after {times} evaluation{'' if times == 1 else 's'}")

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            self._say(f"{trial} failed")

        def _say(self, text: str) -> None:
            self.ended += 1
            shown.say(f"{text} ({self.ended} of {count} trials, best {figure(self.best)})")

    return Progress()
