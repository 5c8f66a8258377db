"""What a step is spent on, from its spans: seconds in exchanges all the time, and of a few steps a timeline by rank, or
torch's profile of rank 0."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from rayrec.distributed.comm.trace import EXCHANGE, listen
from rayrec.train.config.trainer import ProfileConfig
from rayrec.train.worker.lockstep import Control

STEPS_BEFORE = 20  # of an attempt: the first ones are slower
MOST_RANKS = 16
MOST_SPANS = 2_000  # of a rank
FOLDER = "profile"


class ExchangeClock:
    """Seconds that this rank's host has waited in exchanges of the model so far; a listener of spans."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, name: str, began: float, ended: float) -> None:
        if name == EXCHANGE:
            self.seconds += ended - began


class Stalls:
    """Seconds in which training stands still between two steps, for checkpoints and evaluations."""

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, time.perf_counter()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """The body is such a stop; it may contain others."""
        began, before = time.perf_counter(), self._seconds
        try:
            yield
        finally:
            self._seconds = before + time.perf_counter() - began

    def close(self) -> float:
        """Their part of the time since the last call."""
        now = time.perf_counter()
        fraction = min(1.0, self._seconds / max(now - self._since, 1e-9))
        self._seconds, self._since = 0.0, now
        return fraction


class Timeline:
    """The spans of some steps in a row, of the first ranks; once an attempt.

    Args:
        steps: how many; 0: none.
    """

    def __init__(self, control: Control, steps: int) -> None:
        self._control, self._steps = control, steps
        self._done = 0
        self._spans: list[tuple[str, float, float]] = []
        self._open = ExitStack()
        self._began: float

    def after_step(self, step: int) -> dict[str, Any] | None:
        """The record to report after a step, once; every rank calls it, after each step that follows another.

        Returns:
            `first_step`, and for each rank its spans: name, start and length in ms, from a start that ranks have in
            common up to the time that an exchange between them takes.
        """
        if not self._steps:
            return None
        self._done += 1
        if self._done == STEPS_BEFORE:
            self._control.gather(None)  # so that all begin at once
            self._began = time.perf_counter()
            self._open.enter_context(listen(self._hear))
        if self._done < STEPS_BEFORE + self._steps:
            return None
        self._open.close()
        own = [(name, _ms(began - self._began), _ms(ended - began)) for name, began, ended in self._spans]
        ranks = self._control.gather(own[:MOST_SPANS] if self._control.rank < MOST_RANKS else None)
        first, self._steps = step - self._steps + 1, 0
        return {"first_step": first, "ranks": [spans for spans in ranks if spans is not None]}

    def interrupt(self) -> None:
        """Something else came between two steps, an evaluation: begin again, so that steps are in a row."""
        self._open.close()
        self._done, self._spans = 0, []

    def _hear(self, name: str, began: float, ended: float) -> None:
        if began >= self._began:
            self._spans.append((name, began, ended))


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


class Profile:
    """Records the steps from the first to the last, once an attempt.

    Args:
        folder: of the run.
        config: which steps; None: none.
    """

    def __init__(self, folder: Path, config: ProfileConfig | None, device: torch.device) -> None:
        self._folder, self._config = folder / FOLDER, config
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._running: profile | None = None

    def before_step(self, step: int) -> None:
        """Begins with the first step, or in the middle of them where the run goes on there; counted from 1."""
        if self._config is None or self._running is not None:
            return
        first, last = self._config.steps
        if first <= step <= last:
            self._running = profile(activities=self._activities, record_shapes=self._config.shapes)
            self._running.start()

    def after_step(self, step: int) -> str | None:
        """What to report after the last step: where the trace is, or why it could not be written."""
        if self._running is None or self._config is None or step < self._config.steps[1]:
            return None
        path = self._folder / f"steps-{self._config.steps[0]}-{self._config.steps[1]}.json.gz"
        done = self._running
        self.close()
        try:
            self._folder.mkdir(exist_ok=True)
            done.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            return f"{path} cannot be written ({error}); the run goes on"
        return f"the profile of rank 0 is in {path}; open it in https://ui.perfetto.dev"

    def close(self) -> None:
        """Ends the recording, if one goes on; there is no second one."""
        if self._running is not None:
            self._running.stop()
        self._running = self._config = None
