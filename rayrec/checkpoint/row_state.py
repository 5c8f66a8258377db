"""Optimizer state with one number a row, in a form that column cuts can share.

Row-wise optimizers keep one accumulator a row for every column shard. It is saved as `[rows, units]`, each unit as wide
as the greatest common divisor of the column edges, so that any other cut can read the units that it covers: their
width-weighted mean is the exact full-row value where shards are merged, and a copy where they are split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from rayrec.checkpoint.rectangles import Rectangle, Rectangles
from rayrec.distributed.collections.sharded_table import ShardedTable
from rayrec.distributed.plan.shards import Shard, Span


def unit_width(dim: int, shards: Iterable[Shard]) -> int:
    """Columns of a unit, from the edges of every rank's shards; the whole width where columns are not cut."""
    return math.gcd(dim, *(edge for shard in shards for edge in (shard.cols.start, shard.cols.stop)))


def to_save(table: ShardedTable, tensors: Sequence[torch.Tensor]) -> Rectangles:
    """A state of this rank's shards, `[rows]` each, repeated over the units that each covers."""
    config = table.config
    unit = unit_width(config.embedding_dim, table.shards)
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


def to_load(
    table: ShardedTable, targets: Sequence[torch.Tensor], num_units: int
) -> tuple[Rectangles, list[Callable[[], object]]]:
    """What to read for `targets`, `[rows]` of each of this rank's shards, from a state saved with `num_units` units,
    and how to finish."""
    config = table.config
    unit = config.embedding_dim // num_units
    loads, pieces = list[Callable[[], object]](), []
    for item, target in zip(table.local, targets, strict=True):
        first, last = item.shard.cols.start // unit, -(-item.shard.cols.stop // unit)
        read = target.new_empty(target.shape[0], last - first)
        widths = _covered(item.shard.cols, unit, range(first, last))
        loads.append(partial(_merge, target, read, torch.tensor(widths, dtype=target.dtype, device=target.device)))
        pieces.append(Rectangle((item.shard.rows.start, first), read))
    return Rectangles((config.num_embeddings, num_units), pieces), loads


def _covered(cols: Span, unit: int, units: Sequence[int]) -> list[int]:
    return [cols.overlap(Span(number * unit, (number + 1) * unit)).size for number in units]
