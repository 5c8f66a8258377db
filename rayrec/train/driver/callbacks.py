"""Callbacks: user code that a run calls in its driver. `trackers.py` implements callbacks for MLflow, W&B and Comet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrec.train.tolerance import Tolerance

if TYPE_CHECKING:
    from rayrec.train.config.train_config import TrainConfig
    from rayrec.train.run.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The run that calls a callback.

    Args:
        name: name of the run.
        folder: run folder.
        config: config of the run.
    """

    name: str
    folder: Path
    config: TrainConfig


class Callback:
    """Base class of callbacks: override what you need; `Trainer(config, callbacks=[...])` calls it.

    All methods run in the driver, in the order of the events. Workers do not wait for them, except with
    `num_workers: 0`, where worker and driver are one process. An exception is shown and listed in the warnings of the
    result; it never ends the run. Records are plain dicts, as in `metrics.jsonl`.
    """

    def on_start(self, run: RunInfo) -> None:
        """Before the workers start, also when the run resumes."""

    def on_step(self, record: Mapping[str, Any]) -> None:
        """Metrics of the steps since the last call, as often as `trainer.log_every` says: `step`, `epoch`, `loss`, …"""

    def on_evaluation(self, record: Mapping[str, Any]) -> None:
        """After an evaluation: `step`, `epoch`, `auc`, …; `partial` is set if the evaluation did not read all rows."""

    def on_checkpoint(self, record: Mapping[str, Any]) -> None:
        """A checkpoint is complete: `step`, `message`."""

    def on_end(self, result: Result | None, error: Exception | None) -> None:
        """The run has ended: with a result (as in `result.json`), or with an error, which the run then raises."""


class Callbacks:
    """Calls every callback, and reports the first error of each method.

    Args:
        warn: prints a line.
    """

    def __init__(self, callbacks: Sequence[Callback], warn: Callable[[str], object]) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                name = type(callback).__name__
                raise TypeError(f"callbacks: {name} is not a rayrec.train.Callback; make it a subclass")
        self._callbacks = list(callbacks)
        self._tolerance = Tolerance(warn)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line for each method that has failed so far."""
        return self._tolerance.reports

    def handle(self, record: Mapping[str, Any]) -> None:
        """Call the method for a record of the run."""
        match record["kind"]:
            case "train":
                self.call("on_step", record)
            case "eval":
                self.call("on_evaluation", record)
            case "event" if record["event"] == "checkpoint":
                self.call("on_checkpoint", record)

    def call(self, method: str, *args: Any) -> None:
        """Call a method of every callback."""
        for callback in self._callbacks:
            with self._tolerance.drop_errors(f"Callback {type(callback).__name__}.{method} failed", exits=True):
                getattr(callback, method)(*args)
