"""Definition of a metric: sums over examples, and figures computed from sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Sums = Mapping[str, torch.Tensor]  # float64, each [T] or [T, …]
Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """A batch of T tasks.

    Args:
        predictions: float64 [T, B]; of a task with C classes [T, B, C].
        labels_TB, weights_TB: float64.
        inputs: further outputs of the model that the metric requires, by name; each [T, B].
    """

    predictions: torch.Tensor
    labels_TB: torch.Tensor
    weights_TB: torch.Tensor
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """B."""
        return self.labels_TB.shape[-1]

    def weighted_sum(self, values_TB: torch.Tensor) -> torch.Tensor:
        """Weighted sum over examples: [T]."""
        return (self.weights_TB * values_TB).sum(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A metric.

    Args:
        sums: names of what it adds up.
        of_batch: those sums of a batch.
        figures: by name, each [T] or [T, …], from the sums of a run or of a window.
        totals: figures that have no window.
        options: what a user may set, with defaults; a value of `REQUIRED` must be set.
        shape: what follows T in the shape of the sums.
        inputs: names of the model's outputs that it needs beside label, prediction and weight.
        last_only: a run's sums are those of the last batch alone.
    """

    sums: tuple[str, ...]
    of_batch: Callable[[Examples, Options], Sums]
    figures: Callable[[Sums, Options], Sums]
    totals: Callable[[Sums], Sums] | None = None
    options: Options = field(default_factory=dict)
    shape: Callable[[Options], tuple[int, ...]] = lambda options: ()
    inputs: Callable[[Options], set[str]] = lambda options: set()
    last_only: bool = False


REQUIRED = object()


def share(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """part / whole, and 0 where the whole is 0."""
    return torch.where(whole == 0, 0.0, part / whole)
