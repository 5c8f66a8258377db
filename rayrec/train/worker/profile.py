"""torch's profiler over some steps of a run, on rank 0: a trace in the run folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from rayrec.train.config.trainer import ProfileConfig

FOLDER = "profile"


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
