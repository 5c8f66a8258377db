"""Rows that are ready to be batched: plain arrays, their Arrow form for transport, and slicing into a Batch.

How Arrow columns become these arrays is `mapping.py`'s work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from rayrec.data.buffers import empty
from rayrec.data.lists import offsets_of
from rayrec.data.schema import Schema
from rayrec.models.batch import Batch
from rayrec.sparse import KeyedJaggedTensor
from rayrec.sparse.ops import permute_segments

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
        first, last = self.span(0, len(self.offsets) - 1)
        lengths, values, weights = permute_segments(
            torch.from_numpy(order.astype(np.int32)),
            torch.from_numpy(np.diff(self.offsets)).reshape(-1, 1),
            _tensor(self.values[first:last]),
            None if self.weights is None else _tensor(self.weights[first:last]),
        )
        return Ids(values.numpy(), offsets_of(lengths.numpy()[:, 0]), None if weights is None else weights.numpy())

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Where the values of the rows `[start, stop)` lie."""
        return (start, stop) if self.offsets is None else (int(self.offsets[start]), int(self.offsets[stop]))


@dataclass(frozen=True, slots=True)
class Rows:
    """n mapped rows: dense [n, N], label [n], one `Ids` per sparse feature."""

    dense: F32
    label: F32
    ids: tuple[Ids, ...]

    def __len__(self) -> int:
        return len(self.label)


def _tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
    # torch warns about memory that it could not write to: Arrow's, where ids are used as they are
    return torch.from_numpy(array if array.flags.writeable else array.copy())


Part = tuple[Rows, int, int]  # rows [start, stop) of mapped rows


def collate(parts: Sequence[Part], schema: Schema) -> Batch:
    """One batch of the given rows, in order.

    Returns:
        dense float32 [B, N]; sparse int64 values and lengths, key-major; label float32 [B].
    """
    size = sum(stop - start for _, start, stop in parts)
    dense = np.empty((size, schema.num_dense), dtype=np.float32)
    label = np.empty(size, dtype=np.float32)
    at = 0
    for rows, start, stop in parts:
        end = at + stop - start
        dense[at:end], label[at:end] = rows.dense[start:stop], rows.label[start:stop]
        at = end
    return Batch(torch.from_numpy(dense), _jagged(parts, schema, size), torch.from_numpy(label))


def empty_batch(schema: Schema) -> Batch:
    """A batch of no rows, for a rank whose part of the epoch is done."""
    return collate([], schema)


def _jagged(parts: Sequence[Part], schema: Schema, size: int) -> KeyedJaggedTensor:
    values: list[I64] = []
    weights: list[F32] = []
    weighted = schema.weighted
    lengths = np.ones(len(schema.sparse) * size, dtype=np.int64)
    at = 0
    for feature in range(len(schema.sparse)):
        for rows, start, stop in parts:
            ids = rows.ids[feature]
            first, last = ids.span(start, stop)
            values.append(ids.values[first:last])
            if weighted:
                weights.append(np.ones(last - first, np.float32) if ids.weights is None else ids.weights[first:last])
            end = at + stop - start
            if ids.offsets is not None:
                np.subtract(ids.offsets[start + 1 : stop + 1], ids.offsets[start:stop], out=lengths[at:end])
            at = end
    return KeyedJaggedTensor(
        keys=schema.sparse_names,
        values=torch.from_numpy(np.concatenate(values) if values else np.empty(0, np.int64)),
        weights=torch.from_numpy(_joined(weights)) if weighted else None,
        lengths=torch.from_numpy(lengths),
        stride=size,
    )


def _joined(weights: list[F32]) -> F32:
    return np.concatenate(weights) if weights else np.empty(0, np.float32)


def to_columns(rows: Rows) -> dict[str, pa.Array]:
    """Arrow columns that `from_columns` reads; no copy of the values."""
    columns = {"label": pa.array(rows.label)}
    width = rows.dense.shape[1]
    if width:
        columns["dense"] = pa.FixedSizeListArray.from_arrays(pa.array(rows.dense.reshape(-1)), width)
    for number, ids in enumerate(rows.ids):
        columns[f"ids{number}"] = _to_array(ids.values, ids.offsets)
        if ids.weights is not None:
            columns[f"weights{number}"] = _to_array(ids.weights, ids.offsets)
    return columns


def _to_array(values: npt.NDArray[np.generic], offsets: I64 | None) -> pa.Array:
    if offsets is None:
        return pa.array(values)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))


def from_columns(batch: pa.RecordBatch, num_features: int) -> Rows:
    """The rows that `to_columns` wrote; views of Arrow's memory."""
    label = batch.column("label").to_numpy()
    names = set(batch.schema.names)
    if "dense" in names:
        array = batch.column("dense")
        dense = array.flatten().to_numpy().reshape(len(array), array.type.list_size)
    else:
        dense = np.empty((len(label), 0), np.float32)
    ids = []
    for number in range(num_features):
        array, weights = batch.column(f"ids{number}"), None
        if not pa.types.is_large_list(array.type):
            ids.append(Ids(array.to_numpy(), None))
            continue
        if f"weights{number}" in names:
            weights = batch.column(f"weights{number}").values.to_numpy()
        ids.append(Ids(array.values.to_numpy(), array.offsets.to_numpy(), weights))
    return Rows(dense, label, tuple(ids))
