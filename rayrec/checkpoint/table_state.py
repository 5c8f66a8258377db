"""The optimizer state of tables in forms that can be resharded: rectangles, column units, single numbers.

A table is updated inside backward, or by an optimizer over its shards. In both cases the state is sharded like the
weights.

Row-wise optimizers keep one accumulator per row for every column shard. It is saved as `[rows, units]`, where the width
of a unit is the greatest common divisor of the column edges. A shard of another plan reads the units that it covers:
their width-weighted mean is the exact full-row value when shards are merged, and a copy when they are split.
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
    """Tensors of the shapes of this rank's shards, as rectangles of the table."""
    rectangles = [
        Rectangle((item.shard.rows.start, item.shard.cols.start), tensor)
        for item, tensor in zip(table.local, tensors, strict=True)
    ]
    return Rectangles((table.config.num_embeddings, table.config.embedding_dim), rectangles)


def as_tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of an optimizer's state, with its numbers converted to tensors."""
    numbers = {
        key: torch.tensor(float(v), dtype=torch.float64) for key, v in state.items() if isinstance(v, int | float)
    }
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)} | numbers


def to_save(name: str, table: ShardedTable, states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, Rectangles]:
    """The states of this rank's shards, by key.

    Raises:
        ValueError: a state is neither of the shape of its shard, nor one number per row, nor a single number.
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
                f"{rows} x {dim}, which cannot be resharded; use an optimizer whose state has one number per weight, "
                "per row or per table"
            )
    return out


def state_device(key: str, param: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.device:
    """The device of a torch optimizer's state of `param`: the device of `param`, but the step count is on the host
    unless the optimizer is fused or capturable."""
    (group,) = (group for group in optimizer.param_groups if any(p is param for p in group["params"]))
    on_host = key == "step" and not group.get("fused") and not group.get("capturable")
    return torch.device("cpu") if on_host else param.device


def make_targets(
    table: ShardedTable, key: str, saved: TensorStorageMetadata, optimizer: torch.optim.Optimizer
) -> list[torch.Tensor]:
    """An empty state for each of this rank's shards, with the dtype and dimensions that were saved under `key`."""
    table_size = torch.Size((table.config.num_embeddings, table.config.embedding_dim))
    dims = 2 if saved.size == table_size else min(len(saved.size), 1)
    return [
        torch.empty(
            item.shard.shape[:dims],
            dtype=saved.properties.dtype,
            device=state_device(key, item.parameter, optimizer),
        )
        for item in table.local
    ]


def to_load(table: ShardedTable, size: torch.Size, targets: Sequence[torch.Tensor]) -> tuple[Rectangles, list[Finish]]:
    """(rectangles to read for the states of this rank's shards, functions that then fill these states)

    Args:
        size: shape of the saved state.
        targets: states of this rank's shards.
    """
    if len(size) == 0:
        number = torch.empty((), dtype=targets[0].dtype, device=targets[0].device)
        return Rectangles.whole(number), [partial(target.copy_, number) for target in targets]
    if size == (table.config.num_embeddings, table.config.embedding_dim):
        return whole_rows(table, targets), []
    return _rows_to_load(table, targets, size[1])


def _unit_width(dim: int, shards: Iterable[Shard]) -> int:
    """Width of a column unit, from the edges of all ranks' shards; the full width if columns are not sharded."""
    return math.gcd(dim, *(edge for shard in shards for edge in (shard.cols.start, shard.cols.stop)))


def _rows_to_save(table: ShardedTable, tensors: Sequence[torch.Tensor]) -> Rectangles:
    """Row-wise states `[rows]` of this rank's shards, repeated for each unit that a shard covers."""
    config = table.config
    unit = _unit_width(config.embedding_dim, table.shards)
    rectangles = [
        Rectangle(
            (item.shard.rows.start, item.shard.cols.start // unit),
            tensor[:, None].expand(-1, item.shard.cols.size // unit),
        )
        for item, tensor in zip(table.local, tensors, strict=True)
    ]
    return Rectangles((config.num_embeddings, config.embedding_dim // unit), rectangles)


def _merge(target: torch.Tensor, units: torch.Tensor, widths: torch.Tensor) -> None:
    """Average the units `[rows, units]` that a shard covers into its state `[rows]`."""
    target.copy_((units * widths).sum(1) / widths.sum())


def _rows_to_load(
    table: ShardedTable, targets: Sequence[torch.Tensor], num_units: int
) -> tuple[Rectangles, list[Finish]]:
    """Like `to_load`, for row-wise states `[rows]` that were saved with `num_units` units."""
    config = table.config
    unit = config.embedding_dim // num_units
    loads, rectangles = list[Finish](), []
    for item, target in zip(table.local, targets, strict=True):
        start, stop = item.shard.cols.start // unit, -(-item.shard.cols.stop // unit)
        read = target.new_empty(target.shape[0], stop - start)
        widths = _covered(item.shard.cols, unit, range(start, stop))
        loads.append(partial(_merge, target, read, torch.tensor(widths, dtype=target.dtype, device=target.device)))
        rectangles.append(Rectangle((item.shard.rows.start, start), read))
    return Rectangles((config.num_embeddings, num_units), rectangles), loads


def _covered(cols: Span, unit: int, units: Sequence[int]) -> list[int]:
    return [cols.overlap(Span(number * unit, (number + 1) * unit)).size for number in units]
