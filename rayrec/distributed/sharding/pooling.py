"""Means out of sums: kernels only add up; a bag's length is known, whole, where its example lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayrec.modules import EmbeddingBagConfig, PoolingType
from rayrec.sparse import KeyedJaggedTensor


@dataclass(frozen=True)
class BagScale:
    """A factor for each bag: what turns sums into means.

    Args:
        factors_BE: one factor for each example and output.
        dims: width of each output.
    """

    factors_BE: torch.Tensor
    dims: tuple[int, ...]

    def times(self, vectors: torch.Tensor, extra: float = 1.0) -> torch.Tensor:
        """`vectors [B, sum of dims]` times each bag's factor (and `extra`)."""
        factors = self.factors_BE if extra == 1.0 else self.factors_BE * extra
        if len(set(self.dims)) == 1:
            blocks = vectors.view(vectors.shape[0], len(self.dims), self.dims[0])
            return (blocks * factors[:, :, None]).view_as(vectors)
        dims = torch.tensor(self.dims, device=vectors.device)
        return vectors * factors.repeat_interleave(dims, dim=1, output_size=vectors.shape[1])


class MeanScale:
    """Makes the factors of a batch: 1 / length for outputs that are means, 1 for the others.

    Args:
        outputs: (feature, width, whether it is a mean) of each output.
    """

    def __init__(self, outputs: Sequence[tuple[str, int, bool]]) -> None:
        self._features = [feature for feature, _, _ in outputs]
        self._dims = tuple(dim for _, dim, _ in outputs)
        self._sums = [place for place, (_, _, mean) in enumerate(outputs) if not mean]

    def of(self, kjt: KeyedJaggedTensor) -> BagScale | None:
        """The factors for `kjt`'s bags; None where every output is a sum. An empty bag's mean is 0."""
        if len(self._sums) == len(self._features):
            return None
        index = kjt.index_per_key()
        order = [index[feature] for feature in self._features]
        lengths_EB = kjt.lengths().view(len(kjt.keys()), kjt.stride())[order]
        factors_BE = 1 / lengths_EB.t().clamp(min=1).to(torch.float32)
        if self._sums:
            factors_BE[:, self._sums] = 1
        return BagScale(factors_BE, self._dims)


def is_mean(tables: Sequence[EmbeddingBagConfig], name: str) -> bool:
    """Whether the named table's bags are averaged."""
    return any(table.name == name and table.pooling is PoolingType.MEAN for table in tables)
