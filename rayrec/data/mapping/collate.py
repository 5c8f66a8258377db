"""Collates mapped rows to a `Batch` of tensors.

Read tasks do not import this module, so that their processes do not load torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rayrec.data.arrays.buffers import F32
from rayrec.data.arrays.hashing import TableRows
from rayrec.data.mapping.rows import RowRange
from rayrec.data.mapping.schema import Schema
from rayrec.models.batch import Batch
from rayrec.sparse import KeyedJaggedTensor


def collate(ranges: Sequence[RowRange], schema: Schema) -> Batch:
    """Joins ranges of rows to one batch, in order.

    Returns:
        dense float32 [B, N]; sparse int64 values and lengths, key-major; label float32 [B], or [B, T] for several
        labels; if the schema has them, weight float32 [B], group and time int64 [B].
    """
    size = sum(stop - start for _, start, stop in ranges)
    targets = [(rows.targets, start, stop) for rows, start, stop in ranges]

    def target(name: str, kind: npt.DTypeLike) -> torch.Tensor:
        return _stacked([getattr(rows, name)[start:stop] for rows, start, stop in targets], (size,), kind)

    return Batch(
        dense=_stacked([rows.dense[start:stop] for rows, start, stop in ranges], (size, schema.num_dense)),
        sparse=_jagged(ranges, schema, size),
        label=_stacked([rows.label[start:stop] for rows, start, stop in targets], (size, *schema.label_shape)),
        weight=None if schema.sample_weight is None else target("weight", np.float32),
        group=None if schema.group is None else target("group", np.int64),
        time=None if schema.timestamp is None else target("time", np.int64),
        layout={sequence.name: tuple(sequence.ids) for sequence in schema.sequences},
        lists=_lists(ranges, schema),
    )


def _stacked(
    arrays: Sequence[npt.NDArray[Any]], shape: tuple[int, ...], kind: npt.DTypeLike = np.float32
) -> torch.Tensor:
    """The concatenated arrays as a tensor."""
    out = np.empty(shape, dtype=kind)
    if arrays:
        np.concatenate(arrays, out=out)
    return torch.from_numpy(out)


def empty_batch(schema: Schema) -> Batch:
    """A batch without rows, for a rank that has finished its share of the epoch."""
    return collate([], schema)


def _jagged(ranges: Sequence[RowRange], schema: Schema, size: int) -> KeyedJaggedTensor:
    values: list[TableRows] = []
    weights: list[F32] = []
    weighted = schema.weighted
    lengths = np.ones(len(schema.sparse) * size, dtype=np.int64)
    position = 0
    bounds = [(start, stop) for _, start, stop in ranges]
    for same_feature in zip(*(rows.ids[: len(schema.sparse)] for rows, _, _ in ranges), strict=True):
        for ids, (start, stop) in zip(same_feature, bounds, strict=True):
            first, last = ids.span(start, stop)
            values.append(ids.values if last - first == len(ids.values) else ids.values[first:last])
            if weighted:
                given = ids.weights
                weights.append(np.ones(last - first, np.float32) if given is None else given[first:last])
            end = position + stop - start
            if ids.offsets is not None:
                np.subtract(ids.offsets[start + 1 : stop + 1], ids.offsets[start:stop], out=lengths[position:end])
            position = end
    return KeyedJaggedTensor(
        keys=schema.sparse_names,
        values=torch.from_numpy(np.concatenate(values, dtype=np.int64) if values else np.empty(0, np.int64)),
        weights=torch.from_numpy(np.concatenate([np.empty(0, np.float32), *weights])) if weighted else None,
        lengths=torch.from_numpy(lengths),
        stride=size,
    )


def _lists(ranges: Sequence[RowRange], schema: Schema) -> dict[str, torch.Tensor]:
    """Times and numbers of the sequences, by `<sequence>.<list>`."""
    lists, list_number = dict[str, torch.Tensor](), len(schema.sparse)
    for sequence in schema.sequences:
        for spec in sequence.values:
            ids = [(rows.ids[list_number], start, stop) for rows, start, stop in ranges]
            arrays = [values.values[slice(*values.span(start, stop))] for values, start, stop in ids]
            empty = np.empty(0, np.int64 if spec.kind == "time" else np.float32)
            lists[f"{sequence.name}.{spec.name}"] = torch.from_numpy(np.concatenate([empty, *arrays]))
            list_number += 1
    return lists
