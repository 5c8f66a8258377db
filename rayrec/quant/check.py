"""Checks of ids and offsets before the kernel, which accepts -1 and would read out of bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rayrec.modules.embedding import smallest_tables
from rayrec.quant.layout import TableConfig
from rayrec.sparse import KeyedJaggedTensor

_MAX_KEY_LISTS = 64  # for which the bounds are kept: a service sees one for each set of context columns


class IdCheck:
    """Checks that every bag is inside the ids, and every id inside its table.

    Args:
        rows_of: feature → rows of the smallest table that reads it. Ids of other features are not checked.
        table_of: feature → name of that table.
    """

    def __init__(self, rows_of: Mapping[str, int], table_of: Mapping[str, str]) -> None:
        self._rows_of, self._table_of = dict(rows_of), dict(table_of)
        self._last_ids: dict[tuple[str, ...], npt.NDArray[np.uint64]] = {}

    @classmethod
    def of_tables(cls, tables: Sequence[TableConfig]) -> IdCheck:
        smallest = smallest_tables(tables)
        rows_of = {feature: table.num_embeddings for feature, table in smallest.items()}
        return cls(rows_of, {feature: table.name for feature, table in smallest.items()})

    def __call__(self, features: KeyedJaggedTensor) -> None:
        """
        Raises:
            ValueError: Names the feature, the example and the value.
        """
        values = features.values()
        if values.is_floating_point() or values.dim() != 1:
            raise ValueError(f"ids must be integers of one dimension, not {values.dtype} {list(values.shape)}")
        host = features.on_host()
        # NumPy's operators cost a tenth of torch's on the few ids of a request.
        offsets, ids = host.offsets().numpy(), host.values().numpy().astype(np.int64, copy=False)
        _check_offsets(host, offsets, len(ids))
        if not len(ids):
            return
        ends = offsets[host.lengths_offset_per_key()] if host.variable_stride_per_key() else offsets[:: host.stride()]
        starts, last_ids_K = ends[:-1], self._last_ids_of(host)
        filled = starts < ends[1:]
        if not filled.all():
            starts, last_ids_K = starts[filled], last_ids_K[filled]
        # A negative id, read as an unsigned number, is above every table's rows.
        if (np.maximum.reduceat(ids.view(np.uint64), starts) > last_ids_K).any():
            self._raise_first(host, ids, ends)

    def _last_ids_of(self, features: KeyedJaggedTensor) -> npt.NDArray[np.uint64]:
        """The largest id of each key; kept for batches with equal keys."""
        keys = tuple(features.keys())
        last_ids_K = self._last_ids.get(keys)
        if last_ids_K is None:
            last_ids_K = np.array([self._rows_of.get(key, 1 << 64) - 1 for key in keys], np.uint64)
            if len(self._last_ids) >= _MAX_KEY_LISTS:
                self._last_ids.clear()
            self._last_ids[keys] = last_ids_K
        return last_ids_K

    def _raise_first(self, features: KeyedJaggedTensor, ids: npt.NDArray[np.int64], ends: npt.NDArray[Any]) -> None:
        offsets, first_bags = features.offsets().numpy(), features.lengths_offset_per_key()
        for index, key in enumerate(features.keys()):
            rows = self._rows_of.get(key)
            ids_of_key = ids[ends[index] : ends[index + 1]]
            if rows is None or not ((ids_of_key < 0) | (ids_of_key >= rows)).any():
                continue
            position = int(((ids_of_key < 0) | (ids_of_key >= rows)).argmax()) + int(ends[index])
            example = int(np.searchsorted(offsets, position, side="right")) - 1 - first_bags[index]
            raise ValueError(
                f"feature {key!r}, example {example}: id {ids[position]} is outside the rows [0, {rows}) of "
                f"table {self._table_of[key]!r}; map ids to rows as in training"
            )


def _check_offsets(features: KeyedJaggedTensor, offsets: npt.NDArray[Any], count: int) -> None:
    """Checks that the bags are contiguous from the first id to the last."""
    if not len(offsets):
        raise ValueError("offsets are empty; pass one more than the number of bags")
    falling = offsets[1:] < offsets[:-1]
    if offsets[0] == 0 and offsets[-1] == count and not falling.any():
        return
    location = ""
    if falling.any():
        bag, first_bags = int(falling.argmax()), features.lengths_offset_per_key()
        index = int(np.searchsorted(first_bags, bag, side="right")) - 1
        location = (
            f"feature {features.keys()[index]!r}, example {bag - first_bags[index]}: its bag has a negative length; "
        )
    raise ValueError(
        f"{location}offsets must rise from 0 to the number of ids, {count}; they go from {offsets[0]} to {offsets[-1]}"
    )
