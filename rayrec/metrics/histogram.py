"""Bins of logits, and the AUC of two binned classes.

Bins bound the memory of the AUC and make its state a sum over batches and ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitBins:
    """A monotone map from logits to `count` bins of equal width in asinh(logit) over [-limit, limit].

    Around 0 a bin has width `2 asinh(limit) / count` (0.0003 by default); beyond 1 the width grows in proportion to
    |logit|. Logits beyond the limit go to the outermost bins.
    """

    count: int = 1 << 16
    limit: float = 10_000.0

    def __post_init__(self) -> None:
        if self.count < 2 or not self.limit > 0:
            raise ValueError(f"LogitBins(count={self.count}, limit={self.limit}): count must be ≥ 2 and limit > 0")

    def index(self, logits_B: torch.Tensor) -> torch.Tensor:
        """Bin of each logit, int64 [B] in [0, count). NaN goes to bin 0, infinities to the outermost bins."""
        limited_B = torch.nan_to_num(logits_B.double(), nan=-self.limit).clamp(-self.limit, self.limit)
        unit_B = torch.asinh(limited_B) / (2 * math.asinh(self.limit)) + 0.5
        return (unit_B * self.count).long().clamp_(0, self.count - 1)

    def middles(self) -> torch.Tensor:
        """The logit in the middle of each bin, float64 [count]."""
        unit_N = (torch.arange(self.count, dtype=torch.float64) + 0.5) / self.count
        return torch.sinh((unit_N - 0.5) * (2 * math.asinh(self.limit)))


def binned_auc(negatives: torch.Tensor, positives: torch.Tensor) -> tuple[float, float] | None:
    """Area under the ROC curve of two binned classes, and a bound of its distance from the unbinned area.

    A pair of one positive and one negative in the same bin counts half. Unbinned it counts 0, half or 1, so the error
    is at most half the share of these pairs; with narrow bins it is orders of magnitude smaller.

    Args:
        negatives, positives: float64 [bins], weight of the samples of a class by bin, in ascending order of score.

    Returns:
        (area, maximum error), or None if a class is empty.
    """
    total_negatives, total_positives = float(negatives.sum()), float(positives.sum())
    if not total_negatives or not total_positives:
        return None
    below = negatives.cumsum(0) - negatives
    pairs = total_negatives * total_positives
    tied = float((positives * negatives).sum())
    return (float((positives * below).sum()) + tied / 2) / pairs, tied / 2 / pairs


def binned_auprc(negatives: torch.Tensor, positives: torch.Tensor) -> float | None:
    """Average precision of two binned classes: the sum of precision × recall gained over bins, from the highest score
    down. None without a positive.

    Args:
        negatives, positives: As for `binned_auc`.
    """
    total = float(positives.sum())
    if not total:
        return None
    gained = positives.flip(0)
    true_positives = gained.cumsum(0)
    predicted_positives = true_positives + negatives.flip(0).cumsum(0)
    return (
        float(
            (gained * true_positives / predicted_positives.clamp_min(torch.finfo(predicted_positives.dtype).tiny)).sum()
        )
        / total
    )
