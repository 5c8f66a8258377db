"""`NumberMetrics`: errors of regression predictions, over any number of batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rayrec.distributed.comm import all_reduce

if TYPE_CHECKING:
    import torch.distributed as dist

SUMS = 7  # of weights, labels, their squares, predictions, squared and absolute errors, each weighted; of examples


class NumberMetrics:
    """Metrics of a model that predicts numbers, accumulated over batches and ranks in constant memory.

    `compute` gives:

    - `mse`, `rmse`, `mae`: mean squared error, its root, and mean absolute error.
    - `r2`: 1 - mse / variance of the labels; 0 is as good as always predicting their mean.
    - `label_mean`, `prediction_mean`: their means.
    - `samples`: examples seen.
    - `tasks`, for several labels: all of the above for each, by name; the first label's stand above.

    Weights, labels that are NaN and figures that are not defined are as in `BinaryMetrics`.

    Args:
        device: where the state lives.
        names: of T labels; None for one label.
    """

    def __init__(self, device: torch.device | str | None = None, names: Sequence[str] | None = None) -> None:
        self._names = names
        self._sums = torch.zeros(1 if names is None else len(names), SUMS, dtype=torch.float64, device=device)

    def update(self, predictions: torch.Tensor, labels: torch.Tensor, weights_B: torch.Tensor | None = None) -> None:
        """Adds a batch; never waits for the device.

        Args:
            predictions: floating [B], or [B, T] with several labels; B may be 0.
            labels: of the same shape, NaN where a label was not observed.
            weights_B: [B], each finite and at least 0; None: all 1.

        Raises:
            ValueError: the shapes are not these.
        """
        tail = () if self._names is None else (len(self._names),)
        if predictions.shape != labels.shape or predictions.dim() < 1 or predictions.shape[1:] != tail:
            raise ValueError(
                f"predictions {list(predictions.shape)} and labels {list(labels.shape)} must both be of shape "
                f"{['B', *tail]}"
            )
        device, shape = self._sums.device, (len(labels), len(self._sums))
        predicted_BT = predictions.detach().to(device).double().reshape(shape)
        labels_BT = labels.detach().to(device).double().reshape(shape)
        seen_BT = ~labels_BT.isnan()
        weights_BT = seen_BT.double() if weights_B is None else weights_B.to(device).double()[:, None] * seen_BT
        labels_BT = labels_BT.nan_to_num()
        error_BT = predicted_BT - labels_BT
        terms = [labels_BT, labels_BT.square(), predicted_BT, error_BT.square(), error_BT.abs()]
        sums = [weights_BT.sum(0), *((term * weights_BT).sum(0) for term in terms), seen_BT.sum(0)]
        self._sums += torch.stack(sums, dim=1)

    def compute(self, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        """The metrics of all that was added since the last `reset`; with a `group`, of all its ranks (a collective)."""
        figures = [_figures(sums.tolist()) for sums in self.state(group)["numbers"]]
        if self._names is None:
            return figures[0]
        return {**figures[0], "tasks": dict(zip(self._names, figures, strict=True))}

    def reset(self) -> None:
        """Forgets every batch."""
        self._sums.zero_()

    def state(self, group: dist.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
        """A copy of the state, on the CPU: `numbers` [T, 7]; with a `group`, the sum over its ranks (a collective)."""
        sums = self._sums if group is None else all_reduce(self._sums.clone(), group)
        return {"numbers": sums.cpu().clone()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replaces the state by one that `state` gave.

        Raises:
            ValueError: it is not such a state, or of another number of labels.
        """
        if set(state) != {"numbers"} or state["numbers"].shape != self._sums.shape:
            raise ValueError(
                f"not a state of {len(self._sums)} labels: { ({k: list(v.shape) for k, v in state.items()}) }"
            )
        self._sums.copy_(state["numbers"])


def _figures(sums: Sequence[float]) -> dict[str, float | int | None]:
    weight, labels, label_squares, predictions, squares, absolutes, samples = sums
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
