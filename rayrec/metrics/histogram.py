"""Logits in bins, and the AUC that two binned classes have.

The bins are what makes the AUC's memory bounded and its state summable over batches and ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitBins:
    """A monotone map from logits to `count` bins, evenly wide in asinh(logit) over [-limit, limit].

    Around 0 a bin is `2 asinh(limit) / count` wide (0.0003 with the defaults); beyond 1 it widens in proportion to
    |logit|. Logits past the limit fall in the outermost bins.
    """

    count: int = 1 << 16
    limit: float = 10_000.0

    def __post_init__(self) -> None:
        if self.count < 2 or not self.limit > 0:
            raise ValueError(f"LogitBins(count={self.count}, limit={self.limit}): count must be ≥ 2 and limit > 0")

    def index(self, logits_B: torch.Tensor) -> torch.Tensor:
        """int64 [B] in [0, count): the bin of each logit. NaN goes to bin 0, infinities to the outermost bins."""
        limited_B = torch.nan_to_num(logits_B.double(), nan=-self.limit).clamp(-self.limit, self.limit)
        unit_B = torch.asinh(limited_B) / (2 * math.asinh(self.limit)) + 0.5
        return (unit_B * self.count).long().clamp_(0, self.count - 1)


def binned_auc(negatives: torch.Tensor, positives: torch.Tensor) -> tuple[float, float] | None:
    """The area under the ROC curve of two binned classes, and how far it can be from that of the unbinned scores.

    A pair of one positive and one negative in the same bin counts half. It would count 0, half or 1 unbinned, so the
    error is at most half the share of such pairs; in practice, where bins are narrow, it is orders less.

    Args:
        negatives, positives: float64 [bins], weight of the class's examples by bin, bins in ascending order of score.

    Returns:
        (area, greatest error), or None where a class is empty.
    """
    total_negatives, total_positives = float(negatives.sum()), float(positives.sum())
    if not total_negatives or not total_positives:
        return None
    below = negatives.cumsum(0) - negatives
    pairs = total_negatives * total_positives
    tied = float((positives * negatives).sum())
    return (float((positives * below).sum()) + tied / 2) / pairs, tied / 2 / pairs


def binned_auprc(negatives: torch.Tensor, positives: torch.Tensor) -> float | None:
    """The average precision of two binned classes: the sum over bins, from the highest score down, of the precision so
    far times the recall gained. None without a positive.

    Args:
        negatives, positives: as for `binned_auc`.
    """
    total = float(positives.sum())
    if not total:
        return None
    gained = positives.flip(0)
    found = gained.cumsum(0)
    called = found + negatives.flip(0).cumsum(0)
    return float((gained * found / called.clamp_min(torch.finfo(called.dtype).tiny)).sum()) / total
