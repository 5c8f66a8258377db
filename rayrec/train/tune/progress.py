"""What a search says while it runs: a line for each trial that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayrec.train.driver.console import Display, figure

if TYPE_CHECKING:
    from rayrec.train.tune.search import Search


def progress_of(search: Search, display: Display) -> Any:
    """A callback of Ray Tune's."""
    from ray.tune import Callback

    better = min if search.mode == "min" else max

    class Progress(Callback):
        def __init__(self) -> None:
            self.ended, self.best = 0, None

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            last = trial.last_result or {}
            value, count = last.get(search.metric), last.get("evaluations", 0)
            self.best = better((one for one in (self.best, value) if one is not None), default=None)
            self._say(f"{trial}: {search.metric} {figure(value)} after {count} evaluation{'' if count == 1 else 's'}")

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            self._say(f"{trial} failed")

        def _say(self, text: str) -> None:
            self.ended += 1
            display.say(f"{text} ({self.ended} of {search.trials} trials, best {figure(self.best)})")

    return Progress()
