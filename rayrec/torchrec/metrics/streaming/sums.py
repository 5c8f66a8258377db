"""`StreamedSums`: the sums of a metric over the run and over a window of its last examples."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from rayrec.torchrec.metrics.streaming.measure import Examples, Measure, Options, Sums

MAX_BATCHES = 1000  # batches in a window, which keeps the sums of each

Result = tuple[str, str, torch.Tensor]  # "lifetime_", "window_" or ""; name of the metric; its value [T] or [T, …]


class StreamedSums(torch.nn.Module):
    """The sums of T tasks.

    The sums of the run are buffers, float64 [T, …], in the `state_dict`. A resumed run starts with an empty window.

    Args:
        measure: the metric.
        options: options of the metric.
        num_tasks: T.
        window: examples of this rank in a window. It consists of whole batches, at least one and at most `MAX_BATCHES`.
    """

    def __init__(self, measure: Measure, options: Options, num_tasks: int, window: int) -> None:
        super().__init__()
        self._measure, self._options, self._window = measure, options, window
        self._batches: deque[tuple[int, torch.Tensor]] = deque()
        self._num_examples = 0  # examples in `_batches`
        self._loaded: torch.Tensor | None = None  # sums of the window from `load_state`, until the next batch
        zeros = torch.zeros(num_tasks, *measure.shape(options), dtype=torch.float64)
        for name in measure.sums:
            self.register_buffer(name, zeros.clone(), persistent=not measure.last_only)

    def add(self, examples: Examples) -> None:
        """Adds a batch."""
        sums = self._measure.of_batch(examples, self._options)
        batch = torch.stack([sums[name].double() for name in self._measure.sums])
        for name, value in zip(self._measure.sums, batch, strict=True):
            total = getattr(self, name)
            total.copy_(value) if self._measure.last_only else total.add_(value)
        self._batches.append((examples.count, batch))
        self._num_examples += examples.count
        self._loaded = None
        while len(self._batches) > 1 and (len(self._batches) > MAX_BATCHES or self._num_examples > self._window):
            count, _ = self._batches.popleft()
            self._num_examples -= count

    def results(self) -> list[Result]:
        """Returns the results of this rank; after `load_state`, of all ranks."""
        names = self._measure.sums
        lifetime_sums: Sums = {name: getattr(self, name) for name in names}
        window_sums = dict(zip(names, self._window_sums(), strict=True))
        results = [("lifetime_", *item) for item in self._measure.results(lifetime_sums, self._options).items()]
        results += [("window_", *item) for item in self._measure.results(window_sums, self._options).items()]
        totals = self._measure.totals(lifetime_sums) if self._measure.totals else {}
        return results + [("", *item) for item in totals.items()]

    def reset(self) -> None:
        for name in self._measure.sums:
            getattr(self, name).zero_()
        self._loaded = None
        self._batches.clear()
        self._num_examples = 0

    def summed_state(self) -> torch.Tensor:
        """Returns the state that is summed over ranks, flat."""
        lifetime_sums = (getattr(self, name).flatten() for name in self._measure.sums)
        return torch.cat([*lifetime_sums, self._window_sums().flatten()])

    def gathered_state(self) -> Any:
        """Returns None; no state is gathered."""

    def load_state(self, summed: torch.Tensor, gathered: Sequence[Any]) -> None:
        """Sets the sums from the sum of `summed_state` over ranks."""
        sizes = [getattr(self, name).numel() for name in self._measure.sums]
        *lifetime_sums, window_sums = summed.split([*sizes, sum(sizes)])
        for name, values in zip(self._measure.sums, lifetime_sums, strict=True):
            getattr(self, name).copy_(values.view_as(getattr(self, name)))
        self._loaded = window_sums.clone()

    def _window_sums(self) -> torch.Tensor:
        """Returns the stacked sums of the window."""
        lifetime_sums = torch.stack([getattr(self, name) for name in self._measure.sums])
        if self._loaded is not None:
            return self._loaded.view_as(lifetime_sums)
        # Adding up all batches, instead of subtracting the oldest, also removes NaNs that leave the window.
        batches = [batch.to(lifetime_sums.device) for _, batch in self._batches]
        return torch.stack(batches).sum(0) if batches else torch.zeros_like(lifetime_sums)
