"""What all rows of a request share, looked up once.

A graph may take one row of bags more than there are rows to score: the first row's pooled vectors are added to those of
every other row. A bag that is empty pools to zeros, so a feature is in the first row, or in the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor


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
    values = torch.cat([context.values(), rows.values()])
    size, shift = rows.stride(), context.values().numel()
    begins_FB, lengths_FB = np.zeros((len(keys), size + 1), np.int64), np.zeros((len(keys), size + 1), np.int64)
    for part, first, columns in ((context, 0, slice(0, 1)), (rows, shift, slice(1, None))):
        if part.keys():
            at, bounds = [keys.index(key) for key in part.keys()], part.offsets().numpy()
            begins_FB[at, columns] = (bounds[:-1] + first).reshape(len(at), -1)
            lengths_FB[at, columns] = np.diff(bounds).reshape(len(at), -1)
    lengths = lengths_FB.reshape(-1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    picked = np.repeat(begins_FB.reshape(-1) - offsets[:-1], lengths) + np.arange(offsets[-1])
    return values[torch.from_numpy(picked)], torch.from_numpy(offsets)
