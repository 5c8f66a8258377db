"""What all rows of a request share, looked up once.

A graph may take one row of bags more than there are rows to score: the first row's pooled vectors are added to those of
every other row. A bag that is empty pools to zeros, so a feature is in the first row, or in the others.
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
    """Forward hook of a collection: its output for the rows after the first. Sequences have nothing in the first."""
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
    """Values and offsets `[F * (B + 1) + 1]` of all keys, the context's bag before those of the rows.

    Args:
        rows: B >= 1 rows; of all keys without a context, else of those that it has not.
        context: one row.
    """
    if context is None:
        begins = rows.offsets()[:-1].view(len(keys), -1)
        return rows.values(), torch.cat([torch.cat([begins[:, :1], begins], dim=1).view(-1), rows.offsets()[-1:]])
    parts = ((context, slice(0, 1), slice(None)), (rows, slice(1, None), slice(None)))
    picked, offsets = joined_bags(keys, rows.stride() + 1, parts)
    return torch.cat([context.values(), rows.values()])[picked], offsets


def joined_bags(
    keys: Sequence[str], size: int, parts: Sequence[tuple[KeyedJaggedTensor, slice, slice | I64]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bags `[F, size]` made of those of several parts: places of their ids among the parts' ids, one part after the
    other, and offsets `[F * size + 1]`.

    Args:
        parts: bags of some keys, the columns of the result that they fill, and the bag that is taken for each column.
    """
    begins, lengths = np.zeros((len(keys), size), np.int64), np.zeros((len(keys), size), np.int64)
    first = 0
    for part, columns, bags in parts:
        if part.keys():
            at, bounds = [keys.index(key) for key in part.keys()], part.offsets().numpy()
            begins[at, columns] = (bounds[:-1] + first).reshape(len(at), -1)[:, bags]
            lengths[at, columns] = np.diff(bounds).reshape(len(at), -1)[:, bags]
        first += part.values().numel()
    flat = lengths.reshape(-1)
    offsets = np.concatenate([[0], np.cumsum(flat)])
    picked = np.repeat(begins.reshape(-1) - offsets[:-1], flat) + np.arange(offsets[-1])
    return torch.from_numpy(picked), torch.from_numpy(offsets)
