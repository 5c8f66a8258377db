"""What the driver does with the records of a run: keep them in files, show them, remember how it went."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rayrec.train.driver.console import Display
from rayrec.train.errors import StorageError
from rayrec.train.run.folder import RunFolder, write_json
from rayrec.train.run.log import Course, Record, figures_of

KEPT = ("train", "eval", "event", "timeline")
MOST_KEPT = 100_000


@contextmanager
def reporting_errors(display: Display, path: Path) -> Iterator[None]:
    """Shows that `path` cannot be written, and continues."""
    try:
        yield
    except Exception as error:
        foreign = not isinstance(error, (OSError, StorageError))
        reason = f"{type(error).__name__}: {error}" if foreign else getattr(error, "strerror", None) or error
        display.say(f"{path} cannot be written ({reason}); the run goes on", style="yellow")


class Lines:
    """Appends lines to a file. A failure is shown once, and the lines are kept in memory for the next try."""

    def __init__(self, path: Path, display: Display) -> None:
        self._path, self._display = path, display
        self._waiting: deque[str] = deque(maxlen=MOST_KEPT)
        self._broken = False

    def add(self, line: str) -> None:
        self._waiting.append(line)
        self._write()

    def close(self) -> None:
        if self._waiting:
            self._write()
        if self._waiting:
            lost = f"{len(self._waiting):,} line{'' if len(self._waiting) == 1 else 's'}"
            self._display.say(f"{self._path}: {lost} could not be written", style="yellow")

    def _write(self) -> None:
        try:
            _append(self._path, "".join(f"{line}\n" for line in self._waiting).encode())
        except OSError as error:
            if not self._broken:
                text = f"{self._path} cannot be written ({error.strerror or error}); the run goes on and tries again"
                self._display.say(text, style="yellow")
            self._broken = True
            return
        self._waiting.clear()
        self._broken = False


def _append(path: Path, lines: bytes) -> None:
    """All of the lines, or none where the disk has no room for all; a line that a killed driver left behind half
    written is ended first.

    Raises:
        OSError: they cannot be written.
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
    """Takes every record of a run, in order: remembers what the run needs to know, then keeps and shows the record.

    Keeping and showing may fail in any way; the next record is kept and shown again.

    Args:
        folder: where `metrics.jsonl`, `plan.json` and TensorBoard events go.
        display: what the user sees.
        on_checkpoint: called when a checkpoint is complete.
        also: called with each record when it is kept and shown.
    """

    def __init__(
        self,
        folder: RunFolder,
        display: Display,
        on_checkpoint: Callable[[], object] = lambda: None,
        also: Callable[[Record], object] = lambda _: None,
    ) -> None:
        self._folder, self._display, self._on_checkpoint, self._also = folder, display, on_checkpoint, also
        self._metrics = Lines(folder.metrics, display)
        self._board: Any = None
        self._restart: str | None = None
        self.reasons: list[str] = []  # why the worker group failed, since one has begun
        self.recoveries = 0
        self.course = Course()

    def __call__(self, record: Record) -> None:
        match record["kind"]:
            case "begin":
                self._begin(record)
            case "restart":
                self._restart = record["reason"]
            case "failure":
                self.reasons.append(record["reason"])
        self.course.hear(record)
        with self._display.tolerance:
            if record["kind"] in KEPT:
                self._metrics.add(json.dumps(record))
        with self._display.tolerance:
            self._show(record)
        self._also(record)

    def _show(self, record: Record) -> None:
        match record["kind"]:
            case "begin":
                self._display.begin(record)
            case "plan":
                with reporting_errors(self._display, self._folder.plan):
                    write_json(self._folder.plan, record["plan"])
                self._display.plan(record["plan"])
            case "progress":
                self._display.progress(record)
            case "train" | "eval" as kind:
                with reporting_errors(self._display, self._folder.tensorboard):
                    self._curves(record)
                (self._display.train if kind == "train" else self._display.evaluation)(record)
            case "event":
                self._display.event(record)
                if record["event"] == "checkpoint":
                    self._on_checkpoint()
            case "fatal":
                self._display.debug(record.get("traceback", ""))

    def _begin(self, record: Record) -> None:
        """A worker group starts: the first one, one that goes on from a checkpoint, or one after a failure."""
        with suppress(OSError):
            self._folder.result.unlink(missing_ok=True)  # an earlier end of this run is its result until it goes on
        resumed = record["resumed_step"]
        where = f"resumed from the checkpoint of step {resumed}" if resumed is not None else "started again at step 0"
        before, now = self.course.world_size, int(record["world_size"])
        if before and before != now:
            where = f"{where}, on {now} instead of {before} workers"
        if self._restart is not None:
            reason, self._restart = self._restart, None
            self._event(record, "resized", f"{reason}: {where}")
        elif self.reasons:
            self.recoveries += 1
            reason = "; ".join(dict.fromkeys(self.reasons))
            self.reasons = []
            text = f"worker group failed at step {self.course.step} ({reason}); restarted, {where}"
            self._event(record, "recovered", text)
        elif resumed is not None:
            self._event(record, "resumed", where)

    def _event(self, record: Record, event: str, message: str) -> None:
        at = {"time": record["time"], "step": record["resumed_step"] or 0, "attempt": record["attempt"]}
        self({"kind": "event", **at, "event": event, "message": message})

    def _curves(self, record: Record) -> None:
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._folder.tensorboard), flush_secs=10)
        for name, value in figures_of(record).items():
            self._board.add_scalar(name, value, record["step"], walltime=record["time"])

    def close(self) -> None:
        """Write out what is still in memory."""
        with self._display.tolerance:
            self._metrics.close()
        if self._board is not None:
            with reporting_errors(self._display, self._folder.tensorboard):
                self._board.close()
        self._display.close()
