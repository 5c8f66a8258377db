"""`StreamedSums`: the sums of a metric, over the run and over a window of its last examples."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from rayrec.torchrec.metrics.streaming.measure import Examples, Measure, Options, Sums

MOST_BATCHES = 1000  # of a window, which holds the sums of each batch in it

Figure = tuple[str, str, torch.Tensor]  # "lifetime_", "window_" or "", the metric's name, its value [T] or [T, …]


class StreamedSums(torch.nn.Module):
    """The sums of T tasks. A run's are buffers of their names, float64 [T, …], which a `state_dict` holds; a window's
    begin anew in a resumed run.

    Args:
        measure: what is added up.
        options: of the measure.
        num_tasks: T.
        window: examples of this rank in a window; whole batches, at most `MOST_BATCHES`, and never fewer than one.
    """

    def __init__(self, measure: Measure, options: Options, num_tasks: int, window: int) -> None:
        super().__init__()
        self._measure, self._options, self._window = measure, options, window
        self._batches: deque[tuple[int, torch.Tensor]] = deque()
        self._held = 0  # examples in them
        zeros = torch.zeros(num_tasks, *measure.shape(options), dtype=torch.float64)
        for name in measure.sums:
            self.register_buffer(name, zeros.clone(), persistent=not measure.last_only)
        self.register_buffer("_recent", torch.stack([zeros] * len(measure.sums)), persistent=False)

    _recent: torch.Tensor  # sums of the window, one below the other

    def add(self, examples: Examples) -> None:
        """Adds a batch."""
        sums = self._measure.of_batch(examples, self._options)
        batch = torch.stack([sums[name].double() for name in self._measure.sums]).to(self._recent.device)
        for name, value in zip(self._measure.sums, batch, strict=True):
            own = getattr(self, name)
            own.copy_(value) if self._measure.last_only else own.add_(value)
        self._batches.append((examples.count, batch))
        self._held += examples.count
        self._recent += batch
        while len(self._batches) > 1 and (len(self._batches) > MOST_BATCHES or self._held > self._window):
            count, oldest = self._batches.popleft()
            self._held -= count
            self._recent -= oldest

    def figures(self) -> list[Figure]:
        """Figures of what was added; after `take`, of all ranks."""
        names = self._measure.sums
        of_run: Sums = {name: getattr(self, name) for name in names}
        of_window = dict(zip(names, self._recent, strict=True))
        found = [("lifetime_", *item) for item in self._measure.figures(of_run, self._options).items()]
        found += [("window_", *item) for item in self._measure.figures(of_window, self._options).items()]
        totals = self._measure.totals(of_run) if self._measure.totals else {}
        return found + [("", *item) for item in totals.items()]

    def reset(self) -> None:
        for name in self._measure.sums:
            getattr(self, name).zero_()
        self._recent.zero_()
        self._batches.clear()
        self._held = 0

    def flat(self) -> torch.Tensor:
        """State that is summed over ranks."""
        return torch.cat([*(getattr(self, name).flatten() for name in self._measure.sums), self._recent.flatten()])

    def kept(self) -> Any:
        """State that is concatenated over ranks: none."""

    def take(self, flat: torch.Tensor, kept: Sequence[Any]) -> None:
        """Makes the sums those that `flat` holds."""
        parts = flat.split([getattr(self, name).numel() for name in self._measure.sums] + [self._recent.numel()])
        for name, part in zip(self._measure.sums, parts, strict=False):
            getattr(self, name).copy_(part.view_as(getattr(self, name)))
        self._recent.copy_(parts[-1].view_as(self._recent))
