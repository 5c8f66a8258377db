"""Some features of a batch, in the order that an executor wants."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayrec.sparse import KeyedJaggedTensor, ops


class FeatureOrder:
    """Picks features out of batches; remembers the places for each list of keys that it has seen.

    Args:
        features: wanted, in order; a feature may come several times.
        device: where ids lie.
    """

    def __init__(self, features: Sequence[str], device: torch.device) -> None:
        self._features, self._device = tuple(features), device
        self._orders: dict[tuple[str, ...], torch.Tensor | None] = {}

    def of(self, kjt: KeyedJaggedTensor, weighted: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Lengths `[F, B]`, int64 values and, if `weighted`, weights of the features."""
        keys = tuple(kjt.keys())
        if keys not in self._orders:
            self._orders[keys] = self._order(kjt)
        order = self._orders[keys]
        weights = kjt.weights() if weighted else None
        lengths_FB, values = kjt.lengths().view(len(keys), kjt.stride()), kjt.values().to(torch.int64)
        if order is None:
            return lengths_FB, values, weights
        if not self._features:
            return lengths_FB[:0], values[:0], None if weights is None else weights[:0]
        return ops.permute_segments(order, lengths_FB, values, weights)

    def _order(self, kjt: KeyedJaggedTensor) -> torch.Tensor | None:
        order = [kjt.index_per_key()[feature] for feature in self._features]
        if order == list(range(len(kjt.keys()))):
            return None
        return torch.tensor(order, dtype=torch.int32, device=self._device)
