"""The optimizer state of tables, in forms that any other cut can read: rectangles, units of columns, single numbers.

A table is trained inside backward, or by an optimizer that has its shards as parameters; the state is cut in both cases
as the weights are.

Row-wise optimizers keep one accumulator a row for every column shard. It is saved as `[rows, units]`, each unit as wide
as the greatest common divisor of the column edges, so that any other cut can read the units that it covers: their
width-weighted mean is the exact full-row value where shards are merged, and a copy where they are split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rayrec.checkpoint.rectangles import Rectangle, Rectangles
from rayrec.distributed.collections.sharded_table import ShardedTable
from rayrec.distributed.plan.shards import Shard, Span

Finish = Callable[[], object]


def whole_rows(table: ShardedTable, tensors: Sequence[torch.Tensor]) -> Rectangles:
    """Tensors of the shapes of this rank's shards, in their places."""
    pieces = [
        Rectangle((item.shard.rows.start, item.shard.cols.start), tensor)
        for item, tensor in zip(table.local, tensors, strict=True)
    ]
    return Rectangles((table.config.num_embeddings, table.config.embedding_dim), pieces)


def as_tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What can be saved of an optimizer's state: tensors, and numbers as tensors."""
    numbers = {
        key: torch.tensor(float(v), dtype=torch.float64) for key, v in state.items() if isinstance(v, int | float)
    }
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)} | numbers


def to_save(name: str, table: ShardedTable, states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, Rectangles]:
    """The states of this rank's shards, by key.

    Raises:
        ValueError: a state that is neither of the shard's shape, nor a number a row, nor a single number.
    """
    out: dict[str, Rectangles] = {}
    for key in sorted({key for state in states for key in state}):
        tensors = [state[key] for state in states]
        shape, (rows, dim) = tensors[0].shape, table.local[0].shard.shape
        if shape == (rows, dim):
            out[key] = whole_rows(table, tensors)
        elif shape == (rows,):
            out[key] = _rows_to_save(table, tensors)
        elif shape == ():
            out[key] = Rectangles.whole(tensors[0])
        else:
            raise ValueError(
                f"table {name!r}: the optimizer keeps a state {key!r} of shape {tuple(shape)} for a shard of "
                f"{rows} x {dim}, which no other cut of the table could take up; use an optimizer whose state has a "
                "number for each weight, each row or each table"
            )
    return out


def state_device(key: str, param: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.device:
    """Where a torch optimizer keeps a state of `param`: beside it, but for the count of steps, which the host reads
    unless the optimizer is fused or capturable."""
    (group,) = (group for group in optimizer.param_groups if any(p is param for p in group["params"]))
    on_host = key == "step" and not group.get("fused") and not group.get("capturable")
    return torch.device("cpu") if on_host else param.device


def make_targets(
    table: ShardedTable, key: str, saved: TensorStorageMetadata, optimizer: torch.optim.Optimizer
) -> list[torch.Tensor]:
    """For each of this rank's shards an empty state of the kind that was saved under `key`."""
    whole = torch.Size((table.config.num_embeddings, table.config.embedding_dim))
    dims = 2 if saved.size == whole else min(len(saved.size), 1)
    return [
        torch.empty(
            item.shard.shape[:dims],
            dtype=saved.properties.dtype,
            device=state_device(key, item.parameter, optimizer),
        )
        for item in table.local
    ]


def to_load(table: ShardedTable, size: torch.Size, targets: Sequence[torch.Tensor]) -> tuple[Rectangles, list[Finish]]:
    """What to read to fill `targets`, the states of this rank's shards, and the steps that finish it.

    Args:
        size: with which the state was saved.
    """
    if len(size) == 0:
        number = torch.empty((), dtype=targets[0].dtype, device=targets[0].device)
        return Rectangles.whole(number), [partial(target.copy_, number) for target in targets]
    if size == (table.config.num_embeddings, table.config.embedding_dim):
        return whole_rows(table, targets), []
    return _rows_to_load(table, targets, size[1])


def _unit_width(dim: int, shards: Iterable[Shard]) -> int:
    """Columns of a unit, from the edges of every rank's shards; the whole width where columns are not cut."""
    return math.gcd(dim, *(edge for shard in shards for edge in (shard.cols.start, shard.cols.stop)))


def _rows_to_save(table: ShardedTable, tensors: Sequence[torch.Tensor]) -> Rectangles:
    """A state of this rank's shards, `[rows]` each, repeated over the units that each covers."""
    config = table.config
    unit = _unit_width(config.embedding_dim, table.shards)
    pieces = [
        Rectangle(
            (item.shard.rows.start, item.shard.cols.start // unit),
            tensor[:, None].expand(-1, item.shard.cols.size // unit),
        )
        for item, tensor in zip(table.local, tensors, strict=True)
    ]
    return Rectangles((config.num_embeddings, config.embedding_dim // unit), pieces)


def _merge(target: torch.Tensor, units: torch.Tensor, widths: torch.Tensor) -> None:
    """`[rows]` of one shard from the `[rows, units]` read for it, each as wide as the shard's part of it."""
    target.copy_((units * widths).sum(1) / widths.sum())


def _rows_to_load(
    table: ShardedTable, targets: Sequence[torch.Tensor], num_units: int
) -> tuple[Rectangles, list[Finish]]:
    """What to read for `targets`, `[rows]` of each of this rank's shards, from a state saved with `num_units` units,
    and how to finish."""
    config = table.config
    unit = config.embedding_dim // num_units
    loads, pieces = list[Finish](), []
    for item, target in zip(table.local, targets, strict=True):
        first, last = item.shard.cols.start // unit, -(-item.shard.cols.stop // unit)
        read = target.new_empty(target.shape[0], last - first)
        widths = _covered(item.shard.cols, unit, range(first, last))
        loads.append(partial(_merge, target, read, torch.tensor(widths, dtype=target.dtype, device=target.device)))
        pieces.append(Rectangle((item.shard.rows.start, first), read))
    return Rectangles((config.num_embeddings, num_units), pieces), loads


def _covered(cols: Span, unit: int, units: Sequence[int]) -> list[int]:
    return [cols.overlap(Span(number * unit, (number + 1) * unit)).size for number in units]
