"""Definition of a metric: sums over examples, and results computed from the sums."""

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
        predictions: float64 [T, B]; with C classes [T, B, C].
        labels_TB, weights_TB: float64.
        inputs: other model outputs that the metric requires, by name; each [T, B].
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
        """Returns the weighted sum over examples, [T]."""
        return (self.weights_TB * values_TB).sum(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A metric.

    Args:
        sums: names of the sums.
        of_batch: computes the sums of a batch.
        results: computes the results by name, each [T] or [T, …], from the sums of a run or window.
        totals: computes results that have no window.
        options: options with defaults; `REQUIRED` marks an option without default.
        shape: dimensions of the sums after T.
        inputs: names of the other model outputs it needs besides label, prediction and weight.
        last_only: the sums of a run are those of its last batch.
    """

    sums: tuple[str, ...]
    of_batch: Callable[[Examples, Options], Sums]
    results: Callable[[Sums, Options], Sums]
    totals: Callable[[Sums], Sums] | None = None
    options: Options = field(default_factory=dict)
    shape: Callable[[Options], tuple[int, ...]] = lambda options: ()
    inputs: Callable[[Options], set[str]] = lambda options: set()
    last_only: bool = False


REQUIRED = object()


def share(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Returns numerator / denominator, and 0 where the denominator is 0."""
    return torch.where(denominator == 0, 0.0, numerator / denominator)
