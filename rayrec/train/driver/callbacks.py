"""Callbacks: user code that a run calls in its driver. `trackers.py` implements callbacks for MLflow, W&B and Comet."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrec.train.tolerance import Tolerance

if TYPE_CHECKING:
    from rayrec.train.config.train_config import TrainConfig
    from rayrec.train.run.result import Result

MAX_QUEUED_CALLS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The run that calls a callback.

    Args:
        id: unique id of the run, which a resumed run keeps; `--fresh` starts another run.
        name: name of the run.
        folder: run folder.
        config: config of the run.
        stop: asks the run to save a last checkpoint and stop, as `rayrec stop` does, and returns at once. The run looks
            for the request every few seconds; `Trainer.fit` then raises `Interrupted`, and the run can be resumed.
    """

    id: str
    name: str
    folder: Path
    config: TrainConfig
    stop: Callable[[], object]


class Callback:
    """Base class of callbacks: override what you need; `Trainer(config, callbacks=[...])` calls it.

    All methods run in the driver, in the order of the events, in a thread of the callback's own: the run does not wait
    for them, except for `trainer.grace_s` at its end. An exception is shown and listed in the warnings of the result;
    it never ends the run. Records are plain dicts, as in `metrics.jsonl`.
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
    """Calls every callback in its own thread, and reports the first error of each method.

    Args:
        warn: prints a line.
    """

    def __init__(self, callbacks: Sequence[Callback], warn: Callable[[str], object]) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                name = type(callback).__name__
                raise TypeError(f"callbacks: {name} is not a rayrec.train.Callback; make it a subclass")
        self._tolerance = Tolerance(warn)
        self._callers = [_Caller(callback, self._tolerance) for callback in callbacks]

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
        """Call a method of every callback. Does not wait for it."""
        for caller in self._callers:
            caller.call(method, args)

    def close(self, timeout_s: float) -> None:
        """Wait for all calls so far, at most `timeout_s` in total or until Ctrl-C; then abandon those that remain."""
        deadline = time.monotonic() + timeout_s
        for caller in self._callers:
            caller.end()
        for caller in self._callers:
            try:
                caller.wait(deadline)
            except KeyboardInterrupt:
                deadline = time.monotonic()


class _Caller:
    """Calls one callback from a thread, which starts with the first call."""

    def __init__(self, callback: Callback, tolerance: Tolerance) -> None:
        self._callback, self._tolerance = callback, tolerance
        self._name = type(callback).__name__
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(MAX_QUEUED_CALLS)
        self._thread: threading.Thread | None = None

    def call(self, method: str, args: tuple[Any, ...]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"rayrec-callback-{self._name}", daemon=True)
            self._thread.start()
        self._add((method, args))

    def end(self) -> None:
        """Let the thread end after the calls so far."""
        if self._thread is not None:
            self._add(None)

    def wait(self, deadline: float) -> None:
        """Wait for the end of the thread; abandon it at the deadline."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            error = TimeoutError("it had not returned at the end of the run")
            self._tolerance.report(error, f"Callback {self._name} is too slow")
            self._calls = queue.Queue(MAX_QUEUED_CALLS)

    def _add(self, call: tuple[str, tuple[Any, ...]] | None) -> None:
        while True:
            try:
                return self._calls.put_nowait(call)
            except queue.Full:
                with suppress(queue.Empty):
                    self._calls.get_nowait()
                error = TimeoutError(f"the oldest of {MAX_QUEUED_CALLS:,} waiting calls are left out")
                self._tolerance.report(error, f"Callback {self._name} is too slow")

    def _run(self) -> None:
        calls = self._calls
        while (call := calls.get()) is not None:
            method, args = call
            try:
                getattr(self._callback, method)(*args)
            except BaseException as error:  # SystemExit and KeyboardInterrupt too would end this thread
                self._tolerance.report(error, f"Callback {self._name}.{method} failed")
