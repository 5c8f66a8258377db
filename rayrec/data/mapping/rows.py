"""Rows that are ready to be batched: plain arrays, and their Arrow form for transport.

How Arrow columns become these arrays is `map_rows.py`'s work, how these become a batch `collate.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec.data.arrays.buffers import F32, I64, taken
from rayrec.data.arrays.lists import take_bags


@dataclass(frozen=True, slots=True)
class Ids:
    """One sparse feature of n rows, or the times or numbers of a sequence.

    Args:
        values: table rows, all bags one after the other; int32 where the table's rows allow it.
        offsets: [n + 1], where each bag starts, `offsets[0]` need not be 0; None when every row has exactly one id.
        weights: one a value, or None.
    """

    values: npt.NDArray[Any]
    offsets: I64 | None
    weights: F32 | None = None

    def take(self, order: I64 | None) -> Ids:
        """The bags of the rows `order[0]`, `order[1]`, …; all in their own order without one."""
        if order is None:
            return self
        if self.offsets is None:
            return Ids(taken(self.values, order), None)
        values, offsets = take_bags(self.values, self.offsets, order)
        return Ids(values, offsets, None if self.weights is None else take_bags(self.weights, self.offsets, order)[0])

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Where the values of the rows `[start, stop)` lie."""
        return (start, stop) if self.offsets is None else (int(self.offsets[start]), int(self.offsets[stop]))


@dataclass(frozen=True, slots=True)
class Targets:
    """What n rows are trained towards and measured by.

    Args:
        label: [n], or [n, T] of several, NaN where one was not observed.
        weight: [n], where rows have weights.
        group: [n], equal for rows of one group; time: [n], seconds since 1970. Where the schema has them.
    """

    label: F32
    weight: F32 | None = None
    group: I64 | None = None
    time: I64 | None = None

    def take(self, order: I64) -> Targets:
        """Those of the rows `order[0]`, `order[1]`, …"""
        parts = (getattr(self, field.name) for field in fields(self))
        return Targets(*(None if part is None else taken(part, order) for part in parts))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Rows:
    """n mapped rows: dense [n, N], their targets, and one `Ids` per sparse feature, then one per list of times (int64)
    or numbers (float32) of the sequences."""

    dense: F32
    targets: Targets
    ids: tuple[Ids, ...]

    def __len__(self) -> int:
        return len(self.targets.label)

    def take(self, order: I64) -> Rows:
        """The rows `order[0]`, `order[1]`, …"""
        return Rows(taken(self.dense, order), self.targets.take(order), tuple(i.take(order) for i in self.ids))


Part = tuple[Rows, int, int]  # rows [start, stop) of mapped rows


def to_columns(rows: Rows) -> dict[str, pa.Array]:
    """Arrow columns that `from_columns` reads; no copy of the values."""
    targets = {field.name: getattr(rows.targets, field.name) for field in fields(Targets)}
    columns = {name: _flat_or_fixed(array) for name, array in targets.items() if array is not None}
    if rows.dense.shape[1]:
        columns["dense"] = _flat_or_fixed(rows.dense)
    for number, ids in enumerate(rows.ids):
        columns[f"ids{number}"] = _to_array(ids.values, ids.offsets)
        if ids.weights is not None:
            columns[f"weights{number}"] = _to_array(ids.weights, ids.offsets)
    return columns


def _flat_or_fixed(array: npt.NDArray[np.generic]) -> pa.Array:
    """[n] as it is, [n, k] as lists of k."""
    flat = pa.array(array.reshape(-1))
    return flat if array.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, array.shape[1])


def _from_flat_or_fixed(array: pa.Array) -> npt.NDArray[Any]:
    if not pa.types.is_fixed_size_list(array.type):
        return array.to_numpy()
    return array.flatten().to_numpy().reshape(len(array), array.type.list_size)


def _to_array(values: npt.NDArray[np.generic], offsets: I64 | None) -> pa.Array:
    if offsets is None:
        return pa.array(values)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))


def from_columns(batch: pa.RecordBatch, num_lists: int) -> Rows:
    """The rows that `to_columns` wrote; views of Arrow's memory."""
    names = set(batch.schema.names)
    found = {
        name: _from_flat_or_fixed(batch.column(name))
        for name in ("dense", *(field.name for field in fields(Targets)))
        if name in names
    }
    dense = found.pop("dense", np.empty((batch.num_rows, 0), np.float32))
    ids = []
    for number in range(num_lists):
        array, weights = batch.column(f"ids{number}"), None
        if not pa.types.is_large_list(array.type):
            ids.append(Ids(array.to_numpy(), None))
            continue
        if f"weights{number}" in names:
            weights = batch.column(f"weights{number}").values.to_numpy()
        ids.append(Ids(array.values.to_numpy(), array.offsets.to_numpy(), weights))
    return Rows(dense, Targets(**found), tuple(ids))
