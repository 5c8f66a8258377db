"""Reliability of predicted probabilities, from the histogram of the logits."""

from __future__ import annotations

import torch

from rayrec.metrics.histogram import LogitBins

BANDS = 20


def reliability(counts: torch.Tensor, bins: LogitBins) -> torch.Tensor:
    """Bands of equal weight in ascending order of prediction: the points of a reliability diagram.

    Bands of equal weight, and not of equal width, because the predictions of rare events are all near 0. A bin of the
    histogram is in one band; its prediction is that of its middle, which is within 0.02 % of all others in it.

    Args:
        counts: float64 [2, bins], weight of negatives and of positives by bin.

    Returns:
        float64 [n, 3], n up to `BANDS`: weight, mean prediction and share of positives of each band with weight.
    """
    weight_N = counts.sum(0)
    total = weight_N.sum().clamp(min=torch.finfo(torch.float64).tiny)
    middle_N = weight_N.cumsum(0) - weight_N / 2
    band_N = (middle_N / total * BANDS).long().clamp_(0, BANDS - 1)
    predicted_N = bins.middles().to(counts.device).sigmoid() * weight_N
    sums = torch.stack([weight_N, predicted_N, counts[1]], dim=1)
    bands = sums.new_zeros(BANDS, 3).index_add_(0, band_N, sums)
    bands = bands[bands[:, 0] > 0]
    return torch.cat([bands[:, :1], bands[:, 1:] / bands[:, :1]], dim=1)


def calibration_error(bands: torch.Tensor) -> float | None:
    """Expected calibration error: the mean distance of a band's prediction from its share of positives, by weight.

    None without bands.
    """
    if not len(bands):
        return None
    weight, predicted, observed = bands.unbind(1)
    return float((weight * (predicted - observed).abs()).sum() / weight.sum())
