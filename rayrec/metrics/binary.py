"""The figures of a binary label, and the sums that they follow from."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from rayrec.metrics.histogram import LogitBins, binned_auc, binned_auprc

TOTALS = 5  # weighted log loss (nats), predicted probabilities, examples, squared and absolute error


class BinarySums:
    """The sums of T labels; they add up over batches and ranks. Those of weights that are whole numbers are exact up to
    2**53.

    `figures` gives:

    - `auc`: area under the ROC curve, from a histogram of the logits (see `LogitBins`). Within 1e-5 of the exact area
      for ordinary models, typically 1e-7; `binned_auc` says how far it can be.
    - `ne`: normalized entropy, the log loss over that of always predicting the base rate (He et al., "Practical lessons
      from predicting clicks on ads at Facebook", 2014). Below 1 is better than no model.
    - `logloss`: mean log loss, in nats.
    - `calibration`: sum of predictions over sum of labels; 1 is calibrated.
    - `samples`: examples seen.
    - `auprc`: area under the precision-recall curve (average precision), from the same histogram.
    - `accuracy`, `precision`, `recall`: of calling an example positive from a probability of 0.5 on; exact.
    - `ctr`: the share of positives. `mse`, `mae`: mean squared and absolute error of the probabilities.

    One that is not defined is None: all if no example has a weight above 0; `auc` and `ne` (and, without a positive,
    `calibration`) if all labels are equal; `logloss` and what depends on it once a logit was not finite.

    Args:
        bins: how logits are binned for the AUC.
    """

    def __init__(self, num_labels: int, device: torch.device | str | None, bins: LogitBins) -> None:
        self.bins = bins
        self.tensors = {
            "counts": torch.zeros(num_labels, 2, bins.count, dtype=torch.float64, device=device),  # by label and bin
            "totals": torch.zeros(num_labels, TOTALS, dtype=torch.float64, device=device),
        }
        self._first_cell = torch.arange(num_labels, device=device) * 2 * bins.count  # where a label's counts start

    def add(
        self, logits_BT: torch.Tensor, labels_BT: torch.Tensor, weights_BT: torch.Tensor, seen_T: torch.Tensor
    ) -> None:
        """A batch, in doubles; weights are 0 where a label was not observed, which `seen_T` does not count."""
        cell_BT = (labels_BT > 0.5).long() * self.bins.count + self.bins.index(logits_BT) + self._first_cell
        self.tensors["counts"].view(-1).scatter_add_(0, cell_BT.view(-1), weights_BT.reshape(-1))
        loss_BT = binary_cross_entropy_with_logits(logits_BT, labels_BT, weights_BT, reduction="none")
        predicted_BT = torch.sigmoid(logits_BT)
        error_BT = (predicted_BT - labels_BT).abs_()
        sums = [loss_BT.sum(0), (predicted_BT * weights_BT).sum(0), seen_T]
        sums += [(error_BT.square() * weights_BT).sum(0), (error_BT * weights_BT).sum(0)]
        self.tensors["totals"] += torch.stack(sums, dim=1)

    @staticmethod
    def figures(counts: torch.Tensor, totals: torch.Tensor) -> dict[str, float | int | None]:
        """Of one label's counts [2, bins] and totals [5]."""
        negatives, positives = (float(weight) for weight in counts.sum(1))
        weight = negatives + positives
        loss_sum, prediction_sum, samples, squares, absolutes = (float(total) for total in totals)
        sound = weight > 0 and math.isfinite(loss_sum)
        logloss = loss_sum / weight if sound else None
        base_entropy = _entropy(positives / weight) if weight else 0.0
        area = binned_auc(counts[0], counts[1]) if sound else None
        return {
            "auc": area[0] if area else None,
            "ne": logloss / base_entropy if logloss is not None and base_entropy else None,
            "logloss": logloss,
            "calibration": prediction_sum / positives if sound and positives else None,
            "samples": int(samples),
            "auprc": binned_auprc(counts[0], counts[1]) if sound else None,
            **_at_half(counts, weight if sound else 0.0),
            "ctr": positives / weight if sound else None,
            "mse": squares / weight if sound else None,
            "mae": absolutes / weight if sound else None,
        }


def _at_half(counts: torch.Tensor, weight: float) -> dict[str, float | None]:
    """Of calling an example positive from a probability of 0.5 on, which is where a bin starts: exact."""
    middle = counts.shape[1] // 2
    (below, above), (missed, found) = ((float(c[:middle].sum()), float(c[middle:].sum())) for c in counts)
    return {
        "accuracy": (below + found) / weight if weight else None,
        "precision": found / (found + above) if weight and found + above else None,
        "recall": found / (found + missed) if weight and found + missed else None,
    }


def _entropy(rate: float) -> float:
    """Entropy of a Bernoulli variable with probability `rate`, in nats."""
    return -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0)
