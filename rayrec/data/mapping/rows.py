"""Mapped rows as NumPy arrays, and their Arrow form for transport between processes.

`map_rows.py` makes them from Arrow columns; `collate.py` makes batches of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec.data.arrays.buffers import F32, I64, take_rows
from rayrec.data.arrays.lists import take_bags

FEW_ROWS = 256  # up to so many, a call for each column takes longer than the work on its values


@dataclass(frozen=True, slots=True)
class Ids:
    """One sparse feature of n rows, or the times or numbers of a sequence.

    Args:
        values: table rows of all bags, concatenated; int32 if the size of the table allows it. Dynamic ids are int64.
        offsets: [n + 1], offsets of the bags, not necessarily from 0; None if every row has exactly one id.
        weights: one per value, or None.
    """

    values: npt.NDArray[Any]
    offsets: I64 | None
    weights: F32 | None = None

    def take(self, order: I64 | None) -> Ids:
        """The bags of rows `order[0]`, `order[1]`, …; all of them if `order` is None."""
        if order is None:
            return self
        if self.offsets is None:
            return Ids(take_rows(self.values, order), None)
        values, offsets = take_bags(self.values, self.offsets, order)
        return Ids(values, offsets, None if self.weights is None else take_bags(self.weights, self.offsets, order)[0])

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The range of `values` that belongs to rows `[start, stop)`."""
        return (start, stop) if self.offsets is None else (int(self.offsets[start]), int(self.offsets[stop]))


@dataclass(frozen=True, slots=True)
class Targets:
    """Labels of n rows, and the columns that loss and metrics read.

    Args:
        label: [n], or [n, T] for several labels; NaN where a label was not observed.
        weight: [n], sample weights.
        group: [n], group ids.
        time: [n], seconds since 1970.
    """

    label: F32
    weight: F32 | None = None
    group: I64 | None = None
    time: I64 | None = None

    def take(self, order: I64) -> Targets:
        """The targets of rows `order[0]`, `order[1]`, …"""
        arrays = (getattr(self, field.name) for field in fields(self))
        return Targets(*(None if array is None else take_rows(array, order) for array in arrays))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Rows:
    """n mapped rows.

    Args:
        dense: [n, N].
        targets: labels, weights, groups and times.
        ids: one per sparse feature, then one per list of times (int64) or numbers (float32) in the sequences.
    """

    dense: F32
    targets: Targets
    ids: tuple[Ids, ...]

    def __len__(self) -> int:
        return len(self.targets.label)

    def take(self, order: I64) -> Rows:
        """Rows `order[0]`, `order[1]`, …"""
        return Rows(take_rows(self.dense, order), self.targets.take(order), tuple(i.take(order) for i in self.ids))


# Rows [start, stop) of mapped rows.
RowRange = tuple[Rows, int, int]


def to_columns(rows: Rows) -> dict[str, pa.Array]:
    """Arrow columns for `from_columns`, without copying the values."""
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
    """A flat array for [n], lists of length k for [n, k]."""
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
    """The rows from the columns of `to_columns`, as views of Arrow's memory."""
    names = set(batch.schema.names)
    arrays = {
        name: _from_flat_or_fixed(batch.column(name))
        for name in ("dense", *(field.name for field in fields(Targets)))
        if name in names
    }
    dense = arrays.pop("dense", np.empty((batch.num_rows, 0), np.float32))
    ids = []
    for number in range(num_lists):
        array, weights = batch.column(f"ids{number}"), None
        if not pa.types.is_large_list(array.type):
            ids.append(Ids(array.to_numpy(), None))
            continue
        if f"weights{number}" in names:
            weights = batch.column(f"weights{number}").values.to_numpy()
        ids.append(Ids(array.values.to_numpy(), array.offsets.to_numpy(), weights))
    return Rows(dense, Targets(**arrays), tuple(ids))
