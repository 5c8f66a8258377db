"""Metrics of a numeric label, computed from sums."""

from __future__ import annotations

import math

import torch

from rayrec.metrics.binary import add_terms

SUMS = 7  # weighted sums of 1, label, label², prediction, error², |error|; number of samples


class NumberSums:
    """Sums of T labels, which add up over batches and ranks.

    `metrics` returns the following, or None if undefined:

    - `mse`, `rmse`, `mae`: mean squared error, its root, and mean absolute error.
    - `r2`: 1 - mse / variance of the labels; 0 is as good as predicting their mean.
    - `label_mean`, `prediction_mean`: their means.
    - `samples`: number of samples.
    """

    def __init__(self, num_labels: int, device: torch.device | str | None, shape: tuple[int, ...] = ()) -> None:
        self.tensors = {"numbers": torch.zeros(*shape, num_labels, SUMS, dtype=torch.float64, device=device)}

    def add(
        self,
        predicted_BT: torch.Tensor,
        labels_BT: torch.Tensor,
        weights_BT: torch.Tensor,
        seen_BT: torch.Tensor,
        subset_B: torch.Tensor | None = None,
    ) -> None:
        """As for `BinarySums`."""
        error_BT = predicted_BT - labels_BT
        terms = [labels_BT, labels_BT.square(), predicted_BT, error_BT.square(), error_BT.abs()]
        add_terms(self.tensors["numbers"], [weights_BT, *(term * weights_BT for term in terms), seen_BT], subset_B)

    @staticmethod
    def metrics(numbers: torch.Tensor) -> dict[str, float | int | None]:
        """Metrics of one label from its sums [7]."""
        weight, labels, label_squares, predictions, squares, absolutes, samples = numbers.tolist()
        sound = weight > 0 and math.isfinite(squares)
        mse = squares / weight if sound else None
        variance = max(0.0, label_squares / weight - (labels / weight) ** 2) if weight else 0.0
        return {
            "mse": mse,
            "rmse": None if mse is None else math.sqrt(mse),
            "mae": absolutes / weight if sound else None,
            "r2": 1 - mse / variance if mse is not None and variance else None,
            "label_mean": labels / weight if weight else None,
            "prediction_mean": predictions / weight if sound else None,
            "samples": int(samples),
        }
