"""The context row: features that all rows of a request share, looked up once.

A graph with a context reads one more row of bags than there are rows to score. The pooled vectors of this first row are
added to every other row. An empty bag pools to zeros, so each feature is either in the first row or in the
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

I64 = npt.NDArray[np.int64]


def add_first_row(collection: nn.Module, inputs: Any, output: Any) -> KeyedTensor | dict[str, JaggedTensor]:
    """Forward hook of a collection: adds the first row to all others. Sequences are empty in the first row."""
    if isinstance(output, KeyedTensor):
        pooled = output.values()
        return KeyedTensor(output.keys(), output.length_per_key(), pooled[1:] + pooled[:1])
    return {
        name: JaggedTensor(values=jagged.values(), weights=jagged.weights_or_none(), lengths=jagged.lengths()[1:])
        for name, jagged in output.items()
    }


def with_first_row(
    rows: KeyedJaggedTensor, context: KeyedJaggedTensor | None, keys: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and offsets `[F * (B + 1) + 1]` of all keys, with the context as the first row.

    Args:
        rows: B >= 1 rows with the keys that the context does not have.
        context: One row; None leaves the first row empty.
    """
    if context is None:
        begins = rows.offsets()[:-1].view(len(keys), -1)
        return rows.values(), torch.cat([torch.cat([begins[:, :1], begins], dim=1).view(-1), rows.offsets()[-1:]])
    sources = ((context, slice(0, 1), slice(None)), (rows, slice(1, None), slice(None)))
    indices, offsets = joined_bags(keys, rows.stride() + 1, sources)
    return torch.cat([context.values(), rows.values()])[indices], offsets


def joined_bags(
    keys: Sequence[str], size: int, sources: Sequence[tuple[KeyedJaggedTensor, slice, slice | I64]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gathers bags `[F, size]` from several tensors.

    Args:
        sources: (tensor with some of the keys, columns of the result to fill, index of the bag for each column).

    Returns:
        Indices into the concatenated values of all sources, and offsets `[F * size + 1]`.
    """
    begins, lengths = np.zeros((len(keys), size), np.int64), np.zeros((len(keys), size), np.int64)
    num_values = 0
    for sparse, columns, bags in sources:
        if sparse.keys():
            rows, bounds = [keys.index(key) for key in sparse.keys()], sparse.offsets().numpy()
            begins[rows, columns] = (bounds[:-1] + num_values).reshape(len(rows), -1)[:, bags]
            lengths[rows, columns] = np.diff(bounds).reshape(len(rows), -1)[:, bags]
        num_values += sparse.values().numel()
    flat = lengths.reshape(-1)
    offsets = np.concatenate([[0], np.cumsum(flat)])
    indices = np.repeat(begins.reshape(-1) - offsets[:-1], flat) + np.arange(offsets[-1])
    return torch.from_numpy(indices), torch.from_numpy(offsets)
