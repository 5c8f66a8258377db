"""Some features of a batch, in the order that an executor wants."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayrec.distributed.ids.message import Ids
from rayrec.sparse import KeyedJaggedTensor, ops


class FeatureOrder:
    """Picks features out of batches on the host; remembers the places for each list of keys that it has seen.

    Args:
        features: wanted, in order; a feature may come several times.
        weighted: ids carry weights.
    """

    def __init__(self, features: Sequence[str], weighted: bool) -> None:
        self._features, self._weighted = tuple(features), weighted
        self._orders: dict[tuple[str, ...], torch.Tensor | None] = {}

    def of(self, kjt: KeyedJaggedTensor) -> Ids:
        """The features' ids: lengths `[F, B]`, int64 values."""
        keys = tuple(kjt.keys())
        if keys not in self._orders:
            order = [kjt.index_per_key()[feature] for feature in self._features]
            in_order = order == list(range(len(keys)))
            self._orders[keys] = None if in_order else torch.tensor(order, dtype=torch.int32)
        order_F = self._orders[keys]
        weights = kjt.weights() if self._weighted else None
        lengths_FB, values = kjt.lengths().view(len(keys), kjt.stride()), kjt.values().to(torch.int64)
        if order_F is None:
            return Ids(lengths_FB, values, weights)
        if not self._features:
            return Ids(lengths_FB[:0], values[:0], None if weights is None else weights[:0])
        return Ids(*ops.permute_segments(order_F, lengths_FB, values, weights))
