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
        self._taken: torch.Tensor | None = None  # the window's sums that `take` was given, until a batch is added
        zeros = torch.zeros(num_tasks, *measure.shape(options), dtype=torch.float64)
        for name in measure.sums:
            self.register_buffer(name, zeros.clone(), persistent=not measure.last_only)

    def add(self, examples: Examples) -> None:
        """Adds a batch."""
        sums = self._measure.of_batch(examples, self._options)
        batch = torch.stack([sums[name].double() for name in self._measure.sums])
        for name, value in zip(self._measure.sums, batch, strict=True):
            own = getattr(self, name)
            own.copy_(value) if self._measure.last_only else own.add_(value)
        self._batches.append((examples.count, batch))
        self._held += examples.count
        self._taken = None
        while len(self._batches) > 1 and (len(self._batches) > MOST_BATCHES or self._held > self._window):
            count, _ = self._batches.popleft()
            self._held -= count

    def figures(self) -> list[Figure]:
        """Figures of what was added; after `take`, of all ranks."""
        names = self._measure.sums
        of_run: Sums = {name: getattr(self, name) for name in names}
        of_window = dict(zip(names, self._recent(), strict=True))
        found = [("lifetime_", *item) for item in self._measure.figures(of_run, self._options).items()]
        found += [("window_", *item) for item in self._measure.figures(of_window, self._options).items()]
        totals = self._measure.totals(of_run) if self._measure.totals else {}
        return found + [("", *item) for item in totals.items()]

    def reset(self) -> None:
        for name in self._measure.sums:
            getattr(self, name).zero_()
        self._taken = None
        self._batches.clear()
        self._held = 0

    def flat(self) -> torch.Tensor:
        """State that is summed over ranks."""
        return torch.cat([*(getattr(self, name).flatten() for name in self._measure.sums), self._recent().flatten()])

    def kept(self) -> Any:
        """State that is concatenated over ranks: none."""

    def take(self, flat: torch.Tensor, kept: Sequence[Any]) -> None:
        """Makes the sums those that `flat` holds."""
        sizes = [getattr(self, name).numel() for name in self._measure.sums]
        parts = flat.split([*sizes, sum(sizes)])
        for name, part in zip(self._measure.sums, parts, strict=False):
            getattr(self, name).copy_(part.view_as(getattr(self, name)))
        self._taken = parts[-1].clone()

    def _recent(self) -> torch.Tensor:
        """Sums of the window, one below the other. They are added up when they are wanted: a batch that leaves is gone,
        also one of NaN, which no subtraction would take out again."""
        like = torch.stack([getattr(self, name) for name in self._measure.sums])
        if self._taken is not None:
            return self._taken.view_as(like)
        batches = [batch.to(like.device) for _, batch in self._batches]
        return torch.stack(batches).sum(0) if batches else torch.zeros_like(like)
