"""Means out of sums: kernels only add up; a bag's length is known, whole, where its example lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayrec.modules import EmbeddingBagConfig, PoolingType
from rayrec.sparse import KeyedJaggedTensor


class MeanScale:
    """Makes the factors of a batch: 1 / length for outputs that are means, 1 for the others.

    Args:
        outputs: (feature, whether it is a mean) of each output.
    """

    def __init__(self, outputs: Sequence[tuple[str, bool]]) -> None:
        self._features = [feature for feature, _ in outputs]
        self._sums = [place for place, (_, mean) in enumerate(outputs) if not mean]

    def of(self, kjt: KeyedJaggedTensor) -> torch.Tensor | None:
        """Factors `[B, E]` for `kjt`'s bags; None where every output is a sum. An empty bag's mean is 0."""
        if len(self._sums) == len(self._features):
            return None
        index = kjt.index_per_key()
        order = [index[feature] for feature in self._features]
        lengths_EB = kjt.lengths().view(len(kjt.keys()), kjt.stride())[order]
        factors_BE = 1 / lengths_EB.t().clamp(min=1).to(torch.float32)
        if self._sums:
            factors_BE[:, self._sums] = 1
        return factors_BE


def is_mean(tables: Sequence[EmbeddingBagConfig], name: str) -> bool:
    """Whether the named table's bags are averaged."""
    return any(table.name == name and table.pooling is PoolingType.MEAN for table in tables)
