"""Sharding types as pure functions from a table's shape and ranks to shards. Execution uses only the shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from rayrec.distributed.plan.shards import Shard, ShardingType, Span

COLUMN_UNIT = 4  # fbgemm's CUDA kernels pad widths to a multiple of 4
# Vectors travel in units of columns that every cut respects: one index for each, so wide units cost less.
# Predicted steps of 194 drawn problems with little memory (`tests/planner/problems.py`) over those of cuts at
# multiples of 4: 1.000 on average, single ones 0.91 to 1.24.
MAX_WIDTH = 1.125


def blocks(size: int, parts: int) -> list[Span]:
    """Cuts `size` into at most `parts` spans of `ceil(size / parts)`; the last spans are shorter or missing."""
    step = -(-size // parts)
    return [Span(start, min(start + step, size)) for start in range(0, size, step)]


def even_widths(dim: int, parts: int) -> list[Span]:
    """Cuts `dim` columns into `parts` spans that start at multiples of the widest of 16, 8 and 4 columns with which no
    span is wider than `MAX_WIDTH` times the mean.

    Raises:
        ValueError: `dim` has fewer than `parts` units of 4 columns (the last unit may be narrower).
    """
    if -(-dim // COLUMN_UNIT) < parts:
        raise ValueError(
            f"embedding_dim={dim} cannot be cut into {parts} columns of {COLUMN_UNIT} or more; "
            f"cut it into at most {-(-dim // COLUMN_UNIT)}"
        )
    for unit in (4 * COLUMN_UNIT, 2 * COLUMN_UNIT, COLUMN_UNIT):
        units = -(-dim // unit)
        edges = [min(units * i // parts * unit, dim) for i in range(parts + 1)]
        spans = [Span(start, stop) for start, stop in pairwise(edges)]
        if unit == COLUMN_UNIT or (units >= parts and max(span.size for span in spans) * parts <= MAX_WIDTH * dim):
            break
    return spans


def whole(table: str, rows: int, dim: int, ranks: Sequence[int]) -> tuple[Shard, ...]:
    """Table-wise: one shard on one rank."""
    (rank,) = ranks
    return (Shard(table=table, rows=Span(0, rows), cols=Span(0, dim), rank=rank),)


def by_rows(table: str, rows: int, dim: int, ranks: Sequence[int]) -> tuple[Shard, ...]:
    """Row-wise: blocks of `ceil(rows / len(ranks))` rows; ranks beyond the last row have no shard."""
    spans = blocks(rows, len(ranks))
    return tuple(
        Shard(table=table, rows=span, cols=Span(0, dim), rank=rank) for span, rank in zip(spans, ranks, strict=False)
    )


def by_cols(table: str, rows: int, dim: int, ranks: Sequence[int]) -> tuple[Shard, ...]:
    """Column-wise: one vertical cut per entry of `ranks`, which may repeat a rank."""
    spans = even_widths(dim, len(ranks))
    return tuple(
        Shard(table=table, rows=Span(0, rows), cols=span, rank=rank) for span, rank in zip(spans, ranks, strict=True)
    )


def by_grid(table: str, rows: int, dim: int, hosts: Sequence[Sequence[int]]) -> tuple[Shard, ...]:
    """Grid: columns cut over hosts; each column cut by rows over the ranks of its host."""
    spans = even_widths(dim, len(hosts))
    return tuple(
        Shard(table=table, rows=block.rows, cols=cols, rank=block.rank)
        for cols, ranks in zip(spans, hosts, strict=True)
        for block in by_rows(table, rows, cols.size, ranks)
    )


def everywhere(table: str, rows: int, dim: int, ranks: Sequence[int]) -> tuple[Shard, ...]:
    """Data-parallel: the whole table on every rank."""
    return tuple(Shard(table=table, rows=Span(0, rows), cols=Span(0, dim), rank=rank) for rank in ranks)


CUTS: dict[ShardingType, Callable[..., tuple[Shard, ...]]] = {
    ShardingType.TABLE_WISE: whole,
    ShardingType.ROW_WISE: by_rows,
    ShardingType.TABLE_ROW_WISE: by_rows,
    ShardingType.COLUMN_WISE: by_cols,
    ShardingType.TABLE_COLUMN_WISE: by_cols,
    ShardingType.GRID_SHARD: by_grid,
    ShardingType.DATA_PARALLEL: everywhere,
}
