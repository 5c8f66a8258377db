"""Ids and offsets are checked before the kernel: it lets -1 pass, and would read memory that is not its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayrec.modules.embedding import smallest_tables
from rayrec.quant.layout import TableConfig
from rayrec.sparse import KeyedJaggedTensor


def check_lookups(features: KeyedJaggedTensor, tables: Sequence[TableConfig]) -> None:
    """As `check_ids`, against the tables that read the features."""
    smallest = smallest_tables(tables)
    read = [smallest.get(key) for key in features.keys()]
    rows = [None if table is None else table.num_embeddings for table in read]
    check_ids(features, rows, ["" if table is None else table.name for table in read])


def check_ids(features: KeyedJaggedTensor, rows_K: Sequence[int | None], tables_K: Sequence[str]) -> None:
    """That every bag lies inside the ids, and every id inside its table.

    Args:
        features: K keys.
        rows_K: for each key the rows of the smallest table that reads it; None where none does.
        tables_K: the names of those tables.

    Raises:
        ValueError: with feature, example and value.
    """
    values, offsets = features.values(), features.offsets()
    keys, strides = features.keys(), features.stride_per_key()
    if values.is_floating_point() or values.dim() != 1:
        raise ValueError(f"ids must be integers of one dimension, not {values.dtype} {list(values.shape)}")
    _check_offsets(features, offsets, values.numel())
    if not values.numel():
        return
    starts = [0]
    for stride in strides:
        starts.append(starts[-1] + stride)
    ends = offsets[torch.tensor(starts, device=offsets.device)].tolist()
    for place, key in enumerate(keys):
        rows, ids = rows_K[place], values[ends[place] : ends[place + 1]]
        if rows is None or not ids.numel():
            continue
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= rows:
            at = int(((ids < 0) | (ids >= rows)).nonzero()[0]) + ends[place]
            example = int(torch.searchsorted(offsets, at, right=True)) - 1 - starts[place]
            raise ValueError(
                f"feature {key!r}, example {example}: id {int(values[at])} is outside the rows [0, {rows}) of table "
                f"{tables_K[place]!r}; map ids to rows as in training"
            )


def _check_offsets(features: KeyedJaggedTensor, offsets: torch.Tensor, count: int) -> None:
    """That the bags follow one another from the first id to the last."""
    if not offsets.numel():
        raise ValueError("offsets are empty; there is one more than there are bags")
    first, last = int(offsets[0]), int(offsets[-1])
    falling = (offsets[1:] < offsets[:-1]).nonzero()
    if first != 0 or last != count or falling.numel():
        bag, keys, strides = int(falling[0]) if falling.numel() else 0, features.keys(), features.stride_per_key()
        place = 0
        while falling.numel() and bag >= strides[place]:
            bag, place = bag - strides[place], place + 1
        where = f"feature {keys[place]!r}, example {bag}: its bag has a negative length; " if falling.numel() else ""
        raise ValueError(
            f"{where}offsets must rise from 0 to the number of ids, {count}; they go from {first} to {last}"
        )
