"""Examples per second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rayrec.torchrec.metrics.metrics_config import BatchSizeStage
from rayrec.torchrec.metrics.streaming.measure import Examples, Options
from rayrec.torchrec.metrics.streaming.sums import MAX_BATCHES, Result

LONGEST_WINDOW_S = 2 * 60 * 60
RATE_OPTIONS: Mapping[str, Options] = {"tower_qps": {"warmup_steps": 100}}


class ThroughputMetric(torch.nn.Module):
    """Examples per second over all ranks, assuming that every rank is as fast as this one.

    Args:
        batch_size: examples per rank and batch.
        world_size: number of ranks.
        window_seconds: window in seconds, at most two hours.
        warmup_steps: steps before the measurement.
        batch_size_stages: batch sizes by iteration, instead of `batch_size`.

    Raises:
        ValueError: a window below a second, or no warm-up step.
    """

    # Of the run, over restarts; in the state_dict.
    total_examples: torch.Tensor
    warmup_examples: torch.Tensor
    time_lapse_after_warmup: torch.Tensor
    # Since the process started.
    attempt_examples: torch.Tensor
    attempt_warmup_examples: torch.Tensor
    attempt_time_lapse_after_warmup: torch.Tensor

    def __init__(
        self,
        *,
        batch_size: int,
        world_size: int,
        window_seconds: int,
        warmup_steps: int = 100,
        batch_size_stages: Sequence[BatchSizeStage] | None = None,
    ) -> None:
        super().__init__()
        if window_seconds < 1 or warmup_steps < 1:
            raise ValueError(f"window_seconds={window_seconds} and warmup_steps={warmup_steps} must be at least 1")
        self._batch_size, self._world_size, self._stages = batch_size, world_size, list(batch_size_stages or [])
        self._window_s, self._warmup_steps = min(window_seconds, LONGEST_WINDOW_S), warmup_steps
        self._lapses: deque[float] = deque(maxlen=LONGEST_WINDOW_S)
        self._steps, self._last_step_s = 0, 0.0
        for name in ("total_examples", "warmup_examples"):
            self.register_buffer(name, torch.tensor(0))
        self.register_buffer("time_lapse_after_warmup", torch.tensor(0.0, dtype=torch.float64))
        for name in ("attempt_examples", "attempt_warmup_examples"):
            self.register_buffer(name, torch.tensor(0), persistent=False)
        self.register_buffer(
            "attempt_time_lapse_after_warmup", torch.tensor(0.0, dtype=torch.float64), persistent=False
        )

    def update(self) -> None:
        """Counts a step."""
        now = time.monotonic()
        self._steps += 1
        examples = self._examples()
        self.total_examples += examples
        self.attempt_examples += examples
        if self._steps <= self._warmup_steps:
            self.warmup_examples += examples
            self.attempt_warmup_examples += examples
        else:
            lapse = now - self._last_step_s
            self.time_lapse_after_warmup += lapse
            self.attempt_time_lapse_after_warmup += lapse
            self._lapses.append(lapse)
            while sum(self._lapses) > self._window_s:
                self._lapses.popleft()
        self._last_step_s = now

    def _examples(self) -> int:
        """Examples per step, over all ranks."""
        stages = (stage for stage in self._stages if stage.max_iters is None or self._steps <= stage.max_iters)
        stage = next(stages, None)
        return (stage.batch_size if stage else self._batch_size) * self._world_size

    def compute(self) -> dict[str, torch.Tensor]:
        """Returns `total_examples`, `attempt_examples`, and, after the warm-up, examples per second of the run, of the
        window and since the process started."""
        key = "throughput-throughput|"
        result = {f"{key}total_examples": self.total_examples, f"{key}attempt_examples": self.attempt_examples}
        if self._stages:
            result[f"{key}batch_size"] = torch.tensor(self._examples() // self._world_size, dtype=torch.int32)
        if self.time_lapse_after_warmup > 0 and self._steps > self._warmup_steps:
            run = (self.total_examples - self.warmup_examples) / self.time_lapse_after_warmup
            attempt = (self.attempt_examples - self.attempt_warmup_examples) / self.attempt_time_lapse_after_warmup
            lapse = sum(self._lapses)
            window = len(self._lapses) * self._examples() / lapse if lapse else 0.0
            result[f"{key}lifetime_throughput"] = run
            result[f"{key}window_throughput"] = torch.tensor(window, dtype=torch.float64)
            result[f"{key}attempt_throughput"] = attempt
        return result


class TaskRate(torch.nn.Module):
    """Examples per second of T tasks. Over ranks: the sum of examples divided by the longest time.

    Args:
        options: `warmup_steps`, batches before the measurement.
        num_tasks: T.
        window: examples of this rank in a window.
    """

    num_examples: torch.Tensor
    warmup_examples: torch.Tensor
    time_lapse: torch.Tensor

    def __init__(self, options: Options, num_tasks: int, window: int) -> None:
        super().__init__()
        self._warmup_steps, self._window = options["warmup_steps"], window
        self.register_buffer("num_examples", torch.zeros(num_tasks, dtype=torch.int64))
        self.register_buffer("warmup_examples", torch.zeros(num_tasks, dtype=torch.int64))
        self.register_buffer("time_lapse", torch.zeros(num_tasks, dtype=torch.float64))
        self._recent: deque[tuple[int, float]] = deque(maxlen=MAX_BATCHES)
        self._steps, self._last_step_s = 0, 0.0

    def add(self, examples: Examples) -> None:
        """Counts the examples of a batch and the time since the previous one."""
        now = time.monotonic()
        self._steps += 1
        self.num_examples += examples.count
        if self._steps <= self._warmup_steps:
            self.warmup_examples += examples.count
        else:
            self.time_lapse += now - self._last_step_s
            self._recent.append((examples.count, now - self._last_step_s))
            while len(self._recent) > 1 and sum(count for count, _ in self._recent) > self._window:
                self._recent.popleft()
        self._last_step_s = now

    def results(self) -> list[Result]:
        """Returns the rates of the run and of the window, and the number of examples."""
        run_T = (self.num_examples - self.warmup_examples) / self.time_lapse
        count, lapse = (sum(column) for column in zip((0, 0.0), *self._recent, strict=True))
        window_T = torch.full_like(self.time_lapse, count / lapse if lapse else 0.0)
        run_T = torch.where(self.time_lapse > 0, run_T, 0.0)
        return [("lifetime_", "qps", run_T), ("window_", "qps", window_T), ("", "total_examples", self.num_examples)]

    def reset(self) -> None:
        for values in (self.num_examples, self.warmup_examples, self.time_lapse):
            values.zero_()
        self._recent.clear()

    def summed_state(self) -> torch.Tensor:
        """Returns no state; nothing is summed over ranks."""
        return torch.zeros(0, dtype=torch.float64)

    def gathered_state(self) -> Any:
        return (self.num_examples.clone(), self.warmup_examples.clone(), self.time_lapse.clone(), list(self._recent))

    def load_state(self, summed: torch.Tensor, gathered: Sequence[Any]) -> None:
        """Sets the counts from the `gathered_state` of all ranks."""
        examples, warmup, lapses, _ = zip(*gathered, strict=True)
        self.num_examples, self.warmup_examples = torch.stack(examples).sum(0), torch.stack(warmup).sum(0)
        self.time_lapse = torch.stack(lapses).amax(0)
        windows = [window for *_, window in gathered]
        total = sum(count for window in windows for count, _ in window)
        longest = max(sum(lapse for _, lapse in window) for window in windows)
        self._recent = deque(windows[0] if len(windows) == 1 else [(total, longest)], maxlen=MAX_BATCHES)
