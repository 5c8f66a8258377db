"""Callbacks: code of a user's own that a run calls in its driver. What trackers do with it lives in `trackers.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayrec.train.config.train_config import TrainConfig
    from rayrec.train.run.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The run that a callback belongs to.

    Args:
        name: of the run; `folder`: where it is kept.
        config: as it is trained.
    """

    name: str
    folder: Path
    config: TrainConfig


class Callback:
    """Base class of callbacks: override what you need; `Trainer(config, callbacks=[...])` calls it.

    All methods run in the driver, in the order of what they report, and workers do not wait for them (but for
    `num_workers: 0`, where worker and driver are one process). An exception is shown and kept in the run's warnings; it
    never ends the run. Records are plain dicts, as in `metrics.jsonl`.
    """

    def on_start(self, run: RunInfo) -> None:
        """Before any worker starts, also where the run goes on from a checkpoint."""

    def on_step(self, record: Mapping[str, Any]) -> None:
        """Figures of the steps since the last call, as often as `trainer.log_every` says: `step`, `epoch`, `loss`, …"""

    def on_evaluation(self, record: Mapping[str, Any]) -> None:
        """After an evaluation: `step`, `epoch`, `auc`, …; `partial` where it did not read all rows."""

    def on_checkpoint(self, record: Mapping[str, Any]) -> None:
        """A checkpoint is complete: `step`, `message`."""

    def on_end(self, result: Result | None, error: Exception | None) -> None:
        """The run has ended: with its result, written to `result.json`, or with the error that it raises next."""


class Callbacks:
    """Calls every callback, and reports those that fail, once for each method.

    Args:
        warn: shows a line.
    """

    def __init__(self, callbacks: Sequence[Callback], warn: Callable[[str], object]) -> None:
        wrong = [type(one).__name__ for one in callbacks if not isinstance(one, Callback)]
        if wrong:
            raise TypeError(f"callbacks: {wrong[0]} is not a rayrec.train.Callback; make it a subclass")
        self._callbacks, self._warn = list(callbacks), warn
        self._failed: dict[str, str] = {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What has failed so far, a line each."""
        return tuple(self._failed.values())

    def hear(self, record: Mapping[str, Any]) -> None:
        """A record of the run."""
        match record["kind"]:
            case "train":
                self.call("on_step", record)
            case "eval":
                self.call("on_evaluation", record)
            case "event" if record["event"] == "checkpoint":
                self.call("on_checkpoint", record)

    def call(self, method: str, *given: Any) -> None:
        """A method of every callback."""
        for callback in self._callbacks:
            try:
                getattr(callback, method)(*given)
            except (Exception, SystemExit) as error:
                name = f"{type(callback).__name__}.{method}"
                if name not in self._failed:
                    self._failed[name] = f"callback {name} failed ({type(error).__name__}: {error}); the run went on"
                    self._warn(self._failed[name])
