"""Mapped rows to batches: the one place of this package where arrays become tensors.

Read tasks do without it, so that their processes need not load torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rayrec.data.arrays.buffers import F32
from rayrec.data.arrays.hashing import TableRows
from rayrec.data.mapping.rows import Part
from rayrec.data.mapping.schema import Schema
from rayrec.models.batch import Batch
from rayrec.sparse import KeyedJaggedTensor


def collate(parts: Sequence[Part], schema: Schema) -> Batch:
    """One batch of the given rows, in order.

    Returns:
        dense float32 [B, N]; sparse int64 values and lengths, key-major; label float32 [B], or [B, T] of several
        labels; where the schema has them, weight float32 [B], group and time int64 [B].
    """
    size = sum(stop - start for _, start, stop in parts)
    targets = [(rows.targets, start, stop) for rows, start, stop in parts]

    def target(name: str, kind: npt.DTypeLike) -> torch.Tensor:
        return _stacked([getattr(part, name)[start:stop] for part, start, stop in targets], (size,), kind)

    return Batch(
        dense=_stacked([rows.dense[start:stop] for rows, start, stop in parts], (size, schema.num_dense)),
        sparse=_jagged(parts, schema, size),
        label=_stacked([part.label[start:stop] for part, start, stop in targets], (size, *schema.label_shape)),
        weight=None if schema.sample_weight is None else target("weight", np.float32),
        group=None if schema.group is None else target("group", np.int64),
        time=None if schema.timestamp is None else target("time", np.int64),
        layout={sequence.name: tuple(sequence.ids) for sequence in schema.sequences},
        lists=_lists(parts, schema),
    )


def _stacked(
    arrays: Sequence[npt.NDArray[Any]], shape: tuple[int, ...], kind: npt.DTypeLike = np.float32
) -> torch.Tensor:
    """The arrays after one another."""
    out = np.empty(shape, dtype=kind)
    if arrays:
        np.concatenate(arrays, out=out)
    return torch.from_numpy(out)


def empty_batch(schema: Schema) -> Batch:
    """A batch of no rows, for a rank whose part of the epoch is done."""
    return collate([], schema)


def _jagged(parts: Sequence[Part], schema: Schema, size: int) -> KeyedJaggedTensor:
    values: list[TableRows] = []
    weights: list[F32] = []
    weighted = schema.weighted
    lengths = np.ones(len(schema.sparse) * size, dtype=np.int64)
    at = 0
    bounds = [(start, stop) for _, start, stop in parts]
    for same_feature in zip(*(rows.ids[: len(schema.sparse)] for rows, _, _ in parts), strict=True):
        for ids, (start, stop) in zip(same_feature, bounds, strict=True):
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
        values=torch.from_numpy(np.concatenate(values, dtype=np.int64) if values else np.empty(0, np.int64)),
        weights=torch.from_numpy(np.concatenate([np.empty(0, np.float32), *weights])) if weighted else None,
        lengths=torch.from_numpy(lengths),
        stride=size,
    )


def _lists(parts: Sequence[Part], schema: Schema) -> dict[str, torch.Tensor]:
    """Times and numbers of the sequences, by `sequence.name`."""
    found, at = dict[str, torch.Tensor](), len(schema.sparse)
    for sequence in schema.sequences:
        for one in sequence.values:
            arrays = [rows.ids[at].values[slice(*rows.ids[at].span(start, stop))] for rows, start, stop in parts]
            empty = np.empty(0, np.int64 if one.kind == "time" else np.float32)
            found[f"{sequence.name}.{one.name}"] = torch.from_numpy(np.concatenate([empty, *arrays]))
            at += 1
    return found
