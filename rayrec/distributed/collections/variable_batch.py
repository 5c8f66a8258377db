"""Batches whose size varies by key: only distinct lists travel, and examples are made of the vectors that come back.

Keys with few lists get empty ones, so that all have as many; an empty list costs its length and a vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rayrec.sparse import KeyedJaggedTensor


def same_size(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The distinct lists, as one batch of as many lists as the key with the most has."""
    strides = kjt.stride_per_key()
    most = max(strides, default=0)
    lengths = kjt.lengths()
    padded = lengths.new_zeros(len(strides), most)
    for row, of_key in zip(padded, lengths.split(strides), strict=True):
        row[: of_key.numel()] = of_key
    return KeyedJaggedTensor(kjt.keys(), kjt.values(), kjt.weights_or_none(), lengths=padded.view(-1), stride=most)


class Examples:
    """Makes examples' vectors out of those of distinct lists.

    Args:
        features, dims: of each output.
        device: where vectors lie.
    """

    def __init__(self, features: Sequence[str], dims: Sequence[int], device: torch.device) -> None:
        self._features = list(features)
        self._unit = math.gcd(*dims)
        output_of_unit = [number for number, dim in enumerate(dims) for _ in range(dim // self._unit)]
        self._output_of_unit = torch.tensor(output_of_unit, dtype=torch.int64).to(device)

    def lists_of(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        """`[B, E]`: for each example and output the list that stands for it.

        Raises:
            ValueError: there are no inverse indices.
        """
        keys, lists_KB = kjt.inverse_indices()
        return lists_KB[[keys.index(feature) for feature in self._features]].t().contiguous()

    def expand(self, vectors: torch.Tensor, lists_BE: torch.Tensor) -> torch.Tensor:
        """`[B, columns]` from the lists' `[lists, columns]`."""
        lists_BU = lists_BE.index_select(1, self._output_of_unit)
        units = vectors.view(vectors.shape[0], lists_BU.shape[1], self._unit)
        return units.gather(0, lists_BU[:, :, None].expand(-1, -1, self._unit)).view(lists_BU.shape[0], -1)
