"""Means out of sums: kernels only add up; a bag's length is known, whole, where its example lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayrec.distributed.ids.routes import Output
from rayrec.modules import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType
from rayrec.sparse import KeyedJaggedTensor


class MeanScale:
    """Makes the factors of a batch: 1 / length for outputs that are means, 1 for the others.

    Args:
        tables: of the outputs, among others.
        outputs: in the order of factors.
    """

    def __init__(self, tables: Sequence[BaseEmbeddingConfig], outputs: Sequence[Output]) -> None:
        means = {t.name for t in tables if isinstance(t, EmbeddingBagConfig) and t.pooling is PoolingType.MEAN}
        self._features = [output.feature for output in outputs]
        self._sums = [place for place, output in enumerate(outputs) if output.table not in means]

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
