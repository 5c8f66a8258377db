"""Rows that are ready to be batched: plain arrays, and their Arrow form for transport.

How Arrow columns become these arrays is `mapping.py`'s work, how these become a batch `collate.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec.data.buffers import empty
from rayrec.data.lists import take_bags

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ids:
    """One sparse feature of n rows.

    Args:
        values: table rows, all bags one after the other.
        offsets: [n + 1], where each bag starts, `offsets[0]` need not be 0; None when every row has exactly one id.
        weights: one a value, or None.
    """

    values: I64
    offsets: I64 | None
    weights: F32 | None = None

    def take(self, order: I64 | None) -> Ids:
        """The bags of the rows `order[0]`, `order[1]`, …; all in their own order without one."""
        if order is None:
            return self
        if self.offsets is None:
            return Ids(np.take(self.values, order, out=empty(len(order), np.int64), mode="clip"), None)
        values, offsets = take_bags(self.values, self.offsets, order)
        return Ids(values, offsets, None if self.weights is None else take_bags(self.weights, self.offsets, order)[0])

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Where the values of the rows `[start, stop)` lie."""
        return (start, stop) if self.offsets is None else (int(self.offsets[start]), int(self.offsets[stop]))


@dataclass(frozen=True, slots=True)
class Rows:
    """n mapped rows: dense [n, N], label [n] or [n, T] of several, one `Ids` per sparse feature, and the sample
    weight [n] where there is one.
    """

    dense: F32
    label: F32
    ids: tuple[Ids, ...]
    weight: F32 | None = None

    def __len__(self) -> int:
        return len(self.label)


Part = tuple[Rows, int, int]  # rows [start, stop) of mapped rows


def to_columns(rows: Rows) -> dict[str, pa.Array]:
    """Arrow columns that `from_columns` reads; no copy of the values."""
    columns = {"label": pa.array(rows.label) if rows.label.ndim == 1 else _fixed(rows.label)}
    if rows.weight is not None:
        columns["weight"] = pa.array(rows.weight)
    if rows.dense.shape[1]:
        columns["dense"] = _fixed(rows.dense)
    for number, ids in enumerate(rows.ids):
        columns[f"ids{number}"] = _to_array(ids.values, ids.offsets)
        if ids.weights is not None:
            columns[f"weights{number}"] = _to_array(ids.weights, ids.offsets)
    return columns


def _fixed(matrix: F32) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), matrix.shape[1])


def _matrix(array: pa.Array) -> F32:
    found: F32 = array.flatten().to_numpy().reshape(len(array), array.type.list_size)
    return found


def _to_array(values: npt.NDArray[np.generic], offsets: I64 | None) -> pa.Array:
    if offsets is None:
        return pa.array(values)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))


def from_columns(batch: pa.RecordBatch, num_features: int) -> Rows:
    """The rows that `to_columns` wrote; views of Arrow's memory."""
    array = batch.column("label")
    label = _matrix(array) if pa.types.is_fixed_size_list(array.type) else array.to_numpy()
    names = set(batch.schema.names)
    dense = _matrix(batch.column("dense")) if "dense" in names else np.empty((len(label), 0), np.float32)
    ids = []
    for number in range(num_features):
        array, weights = batch.column(f"ids{number}"), None
        if not pa.types.is_large_list(array.type):
            ids.append(Ids(array.to_numpy(), None))
            continue
        if f"weights{number}" in names:
            weights = batch.column(f"weights{number}").values.to_numpy()
        ids.append(Ids(array.values.to_numpy(), array.offsets.to_numpy(), weights))
    return Rows(dense, label, tuple(ids), batch.column("weight").to_numpy() if "weight" in names else None)
