"""Batches whose size varies by key: only distinct lists are sent, and their vectors are expanded to examples.

Keys with few lists are padded with empty lists, so that all have equally many. An empty list costs its length and a
vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rayrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def same_size(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The distinct lists as a batch of one size, the largest size of a key."""
    strides = kjt.stride_per_key()
    stride = max(strides, default=0)
    lengths = kjt.lengths()
    padded = lengths.new_zeros(len(strides), stride)
    for row, key_lengths in zip(padded, lengths.split(strides), strict=True):
        row[: key_lengths.numel()] = key_lengths
    return KeyedJaggedTensor(kjt.keys(), kjt.values(), kjt.weights_or_none(), lengths=padded.view(-1), stride=stride)


class Examples:
    """Expands the vectors of distinct lists to examples.

    Args:
        features, dims: feature and width of each output.
        device: device of the vectors.
    """

    def __init__(self, features: Sequence[str], dims: Sequence[int], device: torch.device) -> None:
        self._features = list(features)
        self._unit = math.gcd(*dims)
        output_of_unit = [number for number, dim in enumerate(dims) for _ in range(dim // self._unit)]
        self._output_of_unit = torch.tensor(output_of_unit, dtype=torch.int64).to(device)
        self._units = torch.arange(len(output_of_unit)).to(device)

    def lists_of(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        """`[B, E]`: the list of each example and output.

        Raises:
            ValueError: `kjt` has no inverse indices.
        """
        keys, lists_KB = kjt.inverse_indices()
        return lists_KB[[keys.index(feature) for feature in self._features]].t().contiguous()

    def expand(self, vectors: torch.Tensor, lists_BE: torch.Tensor) -> torch.Tensor:
        """`[B, columns]`, from the vectors `[lists, columns]` of the lists."""
        num_units = len(self._output_of_unit)
        units_BU = lists_BE.index_select(1, self._output_of_unit) * num_units + self._units
        units = vectors.reshape(-1, self._unit).index_select(0, units_BU.view(-1))
        return units.view(len(lists_BE), num_units * self._unit)
