"""Metrics of a binary label, computed from sums."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from rayrec.metrics.histogram import LogitBins, binned_auc, binned_auprc
from rayrec.metrics.reliability import calibration_error, reliability

MAX_AUC_ERROR = 1e-3  # `metrics` reports a larger bound
TOTALS = 5  # weighted log loss (nats), predicted probabilities, examples, squared and absolute error


class BinarySums:
    """Sums of T labels, which add up over batches and ranks. Sums of integer weights are exact up to 2**53.

    `metrics` returns:

    - `auc`: area under the ROC curve, from a histogram of the logits (see `LogitBins`). Within 1e-5 of the exact area
      for ordinary models, typically 1e-7.
    - `auc_error`: largest possible distance of `auc` from the exact area. Present only if it exceeds 0.001, because
      many logits share a bin: they lie closer together than a bin is wide, or are equal.
    - `ne`: normalized entropy, the log loss relative to always predicting the base rate (He et al., "Practical lessons
      from predicting clicks on ads at Facebook", 2014). Below 1 is better than no model.
    - `logloss`: mean log loss, in nats.
    - `calibration`: sum of predictions over sum of labels; 1 is calibrated.
    - `ece`: expected calibration error, the mean distance between prediction and share of positives over 20 bands of
      equal weight (see `reliability`); 0 is calibrated at every level.
    - `samples`: number of samples.
    - `auprc`: area under the precision-recall curve (average precision), from the same histogram.
    - `accuracy`, `precision`, `recall`: of predicting positive for probabilities of at least 0.5; exact.
    - `ctr`: share of positives. `mse`, `mae`: mean squared and absolute error of the probabilities.

    An undefined metric is None: every one without a sample of positive weight; `auc` and `ne` (and, without a positive,
    `calibration`) if all labels are equal; `logloss` and the metrics from it after a logit that is not finite.

    Args:
        num_labels: T.
        device: Device of the sums.
        bins: Bins of the logits, for the AUC.
        shape: Leading dimensions of the sums, for subsets of the samples: () or (S,).
    """

    def __init__(
        self, num_labels: int, device: torch.device | str | None, bins: LogitBins, shape: tuple[int, ...] = ()
    ) -> None:
        self.bins = bins
        self.tensors = {
            # by label and bin
            "counts": torch.zeros(*shape, num_labels, 2, bins.count, dtype=torch.float64, device=device),
            "totals": torch.zeros(*shape, num_labels, TOTALS, dtype=torch.float64, device=device),
        }
        self._first_cell = torch.arange(num_labels, device=device) * 2 * bins.count  # first count of each label

    def add(
        self,
        logits_BT: torch.Tensor,
        labels_BT: torch.Tensor,
        weights_BT: torch.Tensor,
        seen_BT: torch.Tensor,
        subset_B: torch.Tensor | None = None,
    ) -> None:
        """Adds a batch of float64 values.

        Args:
            weights_BT: 0 for labels that were not observed.
            seen_BT: 1 for labels that were observed, else 0.
            subset_B: The subset of each sample, in [0, S), for sums of subsets.
        """
        cell_BT = (labels_BT > 0.5).long() * self.bins.count + self.bins.index(logits_BT) + self._first_cell
        if subset_B is not None:
            cell_BT += subset_B[:, None] * self.tensors["counts"][0].numel()
        self.tensors["counts"].view(-1).scatter_add_(0, cell_BT.view(-1), weights_BT.reshape(-1))
        loss_BT = binary_cross_entropy_with_logits(logits_BT, labels_BT, weights_BT, reduction="none")
        predicted_BT = torch.sigmoid(logits_BT)
        error_BT = (predicted_BT - labels_BT).abs_()
        terms = [loss_BT, predicted_BT * weights_BT, seen_BT, error_BT.square() * weights_BT, error_BT * weights_BT]
        add_terms(self.tensors["totals"], terms, subset_B)

    def metrics(self, counts: torch.Tensor, totals: torch.Tensor) -> dict[str, float | int | None]:
        """Metrics of one label from its counts [2, bins] and totals [5]."""
        negatives, positives = (float(weight) for weight in counts.sum(1))
        weight = negatives + positives
        loss_sum, prediction_sum, samples, squares, absolutes = (float(total) for total in totals)
        sound = weight > 0 and math.isfinite(loss_sum)
        logloss = loss_sum / weight if sound else None
        base_entropy = _entropy(positives / weight) if weight else 0.0
        area, error = (binned_auc(counts[0], counts[1]) if sound else None) or (None, 0.0)
        return {
            "auc": area,
            **({"auc_error": error} if error > MAX_AUC_ERROR else {}),
            "ne": logloss / base_entropy if logloss is not None and base_entropy else None,
            "logloss": logloss,
            "calibration": prediction_sum / positives if sound and positives else None,
            "ece": calibration_error(reliability(counts, self.bins)) if sound else None,
            "samples": int(samples),
            "auprc": binned_auprc(counts[0], counts[1]) if sound else None,
            **_at_half(counts, weight if sound else 0.0),
            "ctr": positives / weight if sound else None,
            "mse": squares / weight if sound else None,
            "mae": absolutes / weight if sound else None,
        }


def add_terms(sums: torch.Tensor, terms: Sequence[torch.Tensor], subset_B: torch.Tensor | None) -> None:
    """Adds terms [B, T] of K sums, in place, to sums [T, K]; or with the subset of each row, to sums [S, T, K]."""
    if subset_B is None:
        sums += torch.stack([term.sum(0) for term in terms], dim=1)
    else:
        sums.index_add_(0, subset_B, torch.stack(list(terms), dim=2))


def _at_half(counts: torch.Tensor, weight: float) -> dict[str, float | None]:
    """Metrics of predicting positive for probabilities of at least 0.5; exact, because a bin starts there."""
    middle = counts.shape[1] // 2
    (below, above), (missed, hits) = ((float(c[:middle].sum()), float(c[middle:].sum())) for c in counts)
    return {
        "accuracy": (below + hits) / weight if weight else None,
        "precision": hits / (hits + above) if weight and hits + above else None,
        "recall": hits / (hits + missed) if weight and hits + missed else None,
    }


def _entropy(rate: float) -> float:
    """Entropy of a Bernoulli variable with probability `rate`, in nats."""
    return -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0)
