"""Features of a batch by name, on the host: their order, and the factors that make means of sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayrec.distributed.ids.batch import Ids
from rayrec.distributed.ids.routes import Output
from rayrec.modules import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType
from rayrec.sparse import KeyedJaggedTensor, ops


class FeatureOrder:
    """Selects features of batches on the host; caches the places for each list of keys.

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


class MeanScale:
    """Makes means of sums: kernels only add up, and a bag's whole length is known on the rank of its example.

    Args:
        tables: of the outputs, among others.
        outputs: in the order of factors.
    """

    def __init__(self, tables: Sequence[BaseEmbeddingConfig], outputs: Sequence[Output]) -> None:
        means = {t.name for t in tables if isinstance(t, EmbeddingBagConfig) and t.pooling is PoolingType.MEAN}
        self._features = [output.feature for output in outputs]
        self._sums = [place for place, output in enumerate(outputs) if output.table not in means]
        self._orders: dict[tuple[str, ...], list[int]] = {}

    def of(self, kjt: KeyedJaggedTensor) -> torch.Tensor | None:
        """Factors `[B, E]`: 1 / length for a mean, 1 for a sum; None if every output is a sum. An empty bag's is 1."""
        if len(self._sums) == len(self._features):
            return None
        keys = tuple(kjt.keys())
        if keys not in self._orders:
            self._orders[keys] = [kjt.index_per_key()[feature] for feature in self._features]
        lengths_EB = kjt.lengths().view(len(keys), kjt.stride())[self._orders[keys]]
        factors_BE = 1 / lengths_EB.t().clamp(min=1).to(torch.float32)
        if self._sums:
            factors_BE[:, self._sums] = 1
        return factors_BE
