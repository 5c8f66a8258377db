"""Checks of ids and offsets before the kernel, which accepts -1 and would read out of bounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayrec.modules.embedding import smallest_tables
from rayrec.quant.layout import TableConfig
from rayrec.sparse import KeyedJaggedTensor


def check_lookups(features: KeyedJaggedTensor, tables: Sequence[TableConfig]) -> None:
    """Calls `check_ids` with the tables that read the features."""
    smallest = smallest_tables(tables)
    read = [smallest.get(key) for key in features.keys()]
    rows = [None if table is None else table.num_embeddings for table in read]
    check_ids(features, rows, ["" if table is None else table.name for table in read])


def check_ids(features: KeyedJaggedTensor, rows_K: Sequence[int | None], tables_K: Sequence[str]) -> None:
    """Checks that every bag is inside the ids, and every id inside its table.

    Args:
        features: K keys.
        rows_K: Rows of the smallest table that reads each key. None for keys without a table.
        tables_K: Names of these tables.

    Raises:
        ValueError: Names the feature, the example and the value.
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
    for key_number, key in enumerate(keys):
        rows, ids = rows_K[key_number], values[ends[key_number] : ends[key_number + 1]]
        if rows is None or not ids.numel():
            continue
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= rows:
            position = int(((ids < 0) | (ids >= rows)).nonzero()[0]) + ends[key_number]
            example = int(torch.searchsorted(offsets, position, right=True)) - 1 - starts[key_number]
            raise ValueError(
                f"feature {key!r}, example {example}: id {int(values[position])} is outside the rows [0, {rows}) of "
                f"table {tables_K[key_number]!r}; map ids to rows as in training"
            )


def _check_offsets(features: KeyedJaggedTensor, offsets: torch.Tensor, count: int) -> None:
    """Checks that the bags are contiguous from the first id to the last."""
    if not offsets.numel():
        raise ValueError("offsets are empty; pass one more than the number of bags")
    begin, end = int(offsets[0]), int(offsets[-1])
    falling = (offsets[1:] < offsets[:-1]).nonzero()
    if begin != 0 or end != count or falling.numel():
        bag, keys, strides = int(falling[0]) if falling.numel() else 0, features.keys(), features.stride_per_key()
        index = 0
        while falling.numel() and bag >= strides[index]:
            bag, index = bag - strides[index], index + 1
        location = f"feature {keys[index]!r}, example {bag}: its bag has a negative length; " if falling.numel() else ""
        raise ValueError(
            f"{location}offsets must rise from 0 to the number of ids, {count}; they go from {begin} to {end}"
        )
