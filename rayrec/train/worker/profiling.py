"""Measures where training spends its time: collectives, pauses between steps, and a torch profile of rank 0."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from rayrec.distributed.comm.trace import EXCHANGE
from rayrec.storage.folder import open_folder
from rayrec.storage.locations import inside
from rayrec.train.config.trainer import ProfileConfig

FOLDER = "profile"


class ExchangeClock:
    """A listener of spans that sums the seconds in which this rank's host waits in the model's collectives."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, name: str, start: float, end: float) -> None:
        if name == EXCHANGE:
            self.seconds += end - start


class Stalls:
    """Measures how long checkpoints and evaluations pause training between two steps."""

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, time.perf_counter()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the body as a pause; pauses may be nested."""
        start, earlier_s = time.perf_counter(), self._seconds
        try:
            yield
        finally:
            self._seconds = earlier_s + time.perf_counter() - start

    def close(self) -> float:
        """The fraction of the time since the last call that was spent in pauses."""
        now = time.perf_counter()
        fraction = min(1.0, self._seconds / max(now - self._since, 1e-9))
        self._seconds, self._since = 0.0, now
        return fraction


class Profile:
    """Records a range of steps with torch's profiler, once per attempt.

    Args:
        checkpoints: folder of the checkpoints in the storage; the profile is written beside it. (Only the driver's
            node has the local copy of a remote run folder.)
        config: range of steps; None: no profile.
    """

    def __init__(self, checkpoints: str, config: ProfileConfig | None, device: torch.device) -> None:
        self._checkpoints, self._config = checkpoints, config
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._running: profile | None = None

    def before_step(self, step: int) -> None:
        """Start recording at the first step of the range, or within the range if the run resumes there.

        Args:
            step: counted from 1.
        """
        if self._config is None or self._running is not None:
            return
        start_step, last_step = self._config.steps
        if start_step <= step <= last_step:
            self._running = profile(activities=self._activities, record_shapes=self._config.shapes)
            self._running.start()

    def after_step(self, step: int) -> str | None:
        """Write the trace after the last step; returns a message with its path, or why it could not be written."""
        if self._running is None or self._config is None or step < self._config.steps[1]:
            return None
        name = f"steps-{self._config.steps[0]}-{self._config.steps[1]}.json.gz"
        recorded = self._running
        self.close()
        folder = open_folder(self._checkpoints).parent().sub(FOLDER)
        path = inside(folder.path, name)
        try:
            with tempfile.TemporaryDirectory() as scratch:
                recorded.export_chrome_trace(f"{scratch}/{name}")
                with open(f"{scratch}/{name}", "rb") as trace, folder.create(name) as file:
                    shutil.copyfileobj(trace, file)
        except (OSError, RuntimeError) as error:
            return f"Could not write {path} ({error}). The run continues."
        return f"The profile of rank 0 is in {path}. Open it in https://ui.perfetto.dev."

    def close(self) -> None:
        """Stop the recording, if there is one."""
        if self._running is not None:
            self._running.stop()
        self._running = self._config = None
