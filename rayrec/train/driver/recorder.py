"""Handles the records of a run in the driver: writes them to files, shows them, and tracks the state of the run."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rayrec.storage.secrets import redacted
from rayrec.train.driver.console import Display
from rayrec.train.run.folder import RunFolder, write_json
from rayrec.train.run.log import Record, RunState, metrics_of

PERSISTED = ("train", "eval", "event")
MAX_QUEUED_LINES = 100_000


class Lines:
    """Appends lines to a file. Reports a failure once, and keeps the lines in memory for the next attempt."""

    def __init__(self, path: Path, display: Display) -> None:
        self._path, self._display = path, display
        self._queue: deque[str] = deque(maxlen=MAX_QUEUED_LINES)
        self._is_failing = False

    def add(self, line: str) -> None:
        self._queue.append(line)
        self._write()

    def close(self) -> None:
        if self._queue:
            self._write()
        if self._queue:
            count = f"{len(self._queue):,} line{'' if len(self._queue) == 1 else 's'}"
            self._display.say(f"{self._path}: {count} could not be written", style="yellow")

    def _write(self) -> None:
        try:
            _append(self._path, "".join(f"{line}\n" for line in self._queue).encode())
        except OSError as error:
            if not self._is_failing:
                reason = error.strerror or error
                self._display.say(f"Could not write {self._path} ({reason}). The run continues.", style="yellow")
            self._is_failing = True
            return
        self._queue.clear()
        self._is_failing = False


def _append(path: Path, lines: bytes) -> None:
    """Append all lines, or none if the disk is full. First completes an unfinished line of a killed driver.

    Raises:
        OSError: the lines cannot be written.
    """
    with open(path, "ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            lines = b"\n" + lines
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(end)
            raise


class Recorder:
    """Handles every record of a run, in order: updates the state of the run, then stores and shows the record.

    An error with one record does not affect the next one.

    Args:
        folder: receives `metrics.jsonl`, `plan.json` and TensorBoard events.
        display: shows the records.
        on_checkpoint: called when a checkpoint is complete.
        on_record: called with each record after it is stored and shown.
    """

    def __init__(
        self,
        folder: RunFolder,
        display: Display,
        on_checkpoint: Callable[[], object] = lambda: None,
        on_record: Callable[[Record], object] = lambda _: None,
    ) -> None:
        self._folder, self._display, self._on_checkpoint, self._on_record = folder, display, on_checkpoint, on_record
        self._metrics = Lines(folder.metrics, display)
        self._board: Any = None
        self._restart: str | None = None
        self.failures: list[str] = []  # of worker groups, since the last start
        self.recoveries = 0
        self.state = RunState()

    def __call__(self, record: Record) -> None:
        # An error of a storage or database client may quote its URI with a password.
        record = redacted(record)
        match record["kind"]:
            case "begin":
                self._begin(record)
            case "restart":
                self._restart = record["reason"]
            case "failure":
                self.failures.append(record["reason"])
        self.state.update(record)
        with self._display.tolerance.drop_errors():
            if record["kind"] in PERSISTED:
                self._metrics.add(json.dumps(record))
        with self._display.tolerance.drop_errors():
            self._show(record)
        self._on_record(record)

    def _show(self, record: Record) -> None:
        match record["kind"]:
            case "begin":
                self._display.begin(record)
            case "plan":
                with self._display.writing(self._folder.plan):
                    write_json(self._folder.plan, record["plan"])
                self._display.plan(record["plan"])
            case "progress":
                self._display.progress(record)
            case "train" | "eval" as kind:
                with self._display.writing(self._folder.tensorboard):
                    self._add_scalars(record)
                (self._display.train if kind == "train" else self._display.evaluation)(record)
            case "event":
                self._display.event(record)
                if record["event"] == "checkpoint":
                    self._on_checkpoint()
            case "fatal":
                self._display.debug(record.get("traceback", ""))

    def _begin(self, record: Record) -> None:
        """Report how a worker group starts: from a checkpoint, after a failure, or with another size."""
        # The result of an earlier launch is valid until the run continues.
        with suppress(OSError):
            self._folder.result.unlink(missing_ok=True)
        resumed = record["resumed_step"]
        start = f"resumed from the checkpoint of step {resumed}" if resumed is not None else "restarted at step 0"
        earlier_size, world_size = self.state.world_size, int(record["world_size"])
        if earlier_size and earlier_size != world_size:
            start = f"{start} with {world_size} instead of {earlier_size} workers"
        if self._restart is not None:
            reason, self._restart = self._restart, None
            self._event(record, "resized", f"{reason}: {start}")
        elif self.failures:
            self.recoveries += 1
            reason = "; ".join(dict.fromkeys(self.failures))
            self.failures = []
            text = f"worker group failed at step {self.state.step} ({reason}); {start}"
            self._event(record, "recovered", text)
        elif resumed is not None:
            self._event(record, "resumed", start)

    def _event(self, record: Record, event: str, message: str) -> None:
        common = {"time": record["time"], "step": record["resumed_step"] or 0, "attempt": record["attempt"]}
        self({"kind": "event", **common, "event": event, "message": message})

    def _add_scalars(self, record: Record) -> None:
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._folder.tensorboard), flush_secs=10)
        for name, value in metrics_of(record).items():
            self._board.add_scalar(name, value, record["step"], walltime=record["time"])

    def close(self) -> None:
        """Write the lines that are still in memory, and close the files."""
        with self._display.tolerance.drop_errors():
            self._metrics.close()
        if self._board is not None:
            with self._display.writing(self._folder.tensorboard):
                self._board.close()
        self._display.close()
