"""Which ids go where, and which columns come back: a plan's rectangles turned into fixed routes, once.

Pure facts, equal on every rank; the exchanges and executors only follow them. Words used here:

- output: one feature read by one table; its vector is a block of columns of the result.
- variant: a feature's ids as a whole (edges None), or split by the row edges of a table that is cut by rows.
- stream: what one rank receives of a variant: all of it, or one bucket of rows. Sent once, whoever reads it there.
- lookup: one output read in one rectangle of its table, on the rank that holds it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from rayrec.distributed.kernel import LocalTable, OptimizerSpec
from rayrec.distributed.plan.sharding_plan import ModuleSharding
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ParameterSharding, Shard, Span
from rayrec.modules import BaseEmbeddingConfig

Edges = tuple[int, ...]
Rectangle = tuple[str, Span, Span]  # table, columns, rows
GroupKey = Callable[[LocalTable], Hashable]


@dataclass(frozen=True, slots=True)
class Output:
    """A block of `dim` columns of the result, from `col`."""

    feature: str
    table: str
    col: int
    dim: int


@dataclass(frozen=True, slots=True)
class Variant:
    feature: str
    edges: Edges | None


@dataclass(frozen=True, slots=True)
class Stream:
    variant: int
    bucket: int


@dataclass(frozen=True, slots=True)
class Lookup:
    output: int
    stream: int
    table: int  # place in the rank's group
    group: int
    cols: Span  # of the result


@dataclass(frozen=True)
class RankRoute:
    """What one rank receives, holds and sends back."""

    streams: tuple[Stream, ...]
    lookups: tuple[Lookup, ...]  # group after group
    tables: Mapping[int, tuple[LocalTable, ...]]  # by group

    def lookups_of(self, group: int) -> list[Lookup]:
        return [lookup for lookup in self.lookups if lookup.group == group]


@dataclass(frozen=True)
class Routes:
    """The routes of one collection on every rank."""

    features: tuple[str, ...]
    outputs: tuple[Output, ...]
    variants: tuple[Variant, ...]
    ranks: tuple[RankRoute, ...]
    num_groups: int


def make_outputs(tables: Sequence[BaseEmbeddingConfig]) -> tuple[Output, ...]:
    """The result's blocks, in the order of tables and their features."""
    outputs, col = [], 0
    for table in tables:
        for feature in table.feature_names:
            outputs.append(Output(feature, table.name, col, table.embedding_dim))
            col += table.embedding_dim
    return tuple(outputs)


@dataclass(frozen=True, slots=True)
class _Piece:
    """An output in one rectangle, before places are given out."""

    group: int
    output: int
    local: LocalTable
    stream: Stream
    cols: Span  # of the result


def make_routes(
    tables: Sequence[BaseEmbeddingConfig],
    plan: ModuleSharding,
    optimizers: Mapping[str, OptimizerSpec | None],
    world_size: int,
    group_of: GroupKey,
) -> Routes:
    """The routes of `tables` under `plan`; `plan` has no replicated table.

    Args:
        optimizers: by table.
        group_of: the key of a local table's group; tables of one key share a kernel.

    Raises:
        ValueError: rectangles that do not cover a table exactly, or lie on a rank outside the world.
    """
    outputs = make_outputs(tables)
    held = {t.name: _rectangles(t, plan[t.name], optimizers[t.name], world_size) for t in tables}
    group_index: dict[Hashable, int] = {}
    variant_index: dict[Variant, int] = {}
    by_rank: list[list[_Piece]] = [[] for _ in range(world_size)]
    for place, output in enumerate(outputs):
        for rank, local, edges in held[output.table]:
            variant = Variant(output.feature, edges)
            bucket = 0 if edges is None else bisect_left(edges, local.rows.start)
            group = group_index.setdefault(group_of(local), len(group_index))
            stream = Stream(variant_index.setdefault(variant, len(variant_index)), bucket)
            cols = Span(output.col + local.cols.start, output.col + local.cols.stop)
            by_rank[rank].append(_Piece(group, place, local, stream, cols))
    ranks = tuple(_rank_route(pieces) for pieces in by_rank)
    features = tuple(dict.fromkeys(output.feature for output in outputs))
    return Routes(features, outputs, tuple(variant_index), ranks, len(group_index))


def _rectangles(
    config: BaseEmbeddingConfig, sharding: ParameterSharding, optimizer: OptimizerSpec | None, world_size: int
) -> list[tuple[int, LocalTable, Edges | None]]:
    """A table's rectangles, each with its rank and the row edges of its column strip (None where it holds all rows)."""
    shards = _joined(config, sharding.shards, world_size)
    edges = {column: _row_edges(shards, column) for column in {shard.cols.start for shard in shards}}
    kernel = EmbeddingComputeKernel(sharding.compute_kernel)
    load_factor = sharding.load_factor if kernel is EmbeddingComputeKernel.FUSED_UVM_CACHING else None
    make = partial(LocalTable, config=config, kernel=kernel, optimizer=optimizer, load_factor=load_factor)
    return [(shard.rank, make(rows=shard.rows, cols=shard.cols), edges[shard.cols.start]) for shard in shards]


def _rank_route(pieces: Sequence[_Piece]) -> RankRoute:
    streams: dict[Stream, int] = {}
    tables: dict[int, dict[Rectangle, LocalTable]] = {}
    places: dict[Rectangle, int] = {}
    lookups: list[Lookup] = []
    for piece in _rectangle_after_rectangle(pieces):
        held, rectangle = tables.setdefault(piece.group, {}), _rectangle(piece)
        places.setdefault(rectangle, len(held))
        held[rectangle] = piece.local
        lookups.append(
            Lookup(
                output=piece.output,
                stream=streams.setdefault(piece.stream, len(streams)),
                table=places[rectangle],
                group=piece.group,
                cols=piece.cols,
            )
        )
    return RankRoute(tuple(streams), tuple(lookups), {group: tuple(held.values()) for group, held in tables.items()})


def _rectangle(piece: _Piece) -> Rectangle:
    return piece.local.config.name, piece.local.cols, piece.local.rows


def _rectangle_after_rectangle(pieces: Sequence[_Piece]) -> list[_Piece]:
    """By group and column, but with all lookups in a rectangle side by side, as fbgemm's CPU kernels need them."""
    first: dict[Rectangle, int] = {}
    for piece in pieces:
        first[_rectangle(piece)] = min(first.get(_rectangle(piece), piece.cols.start), piece.cols.start)
    return sorted(pieces, key=lambda p: (p.group, first[_rectangle(p)], p.local.rows, p.cols.start))


def _joined(config: BaseEmbeddingConfig, shards: Sequence[Shard], world_size: int) -> list[Shard]:
    """The table's rectangles, checked; neighbours on one rank are made one rectangle."""
    name, size = config.name, (config.num_embeddings, config.embedding_dim)
    outside = [shard.rank for shard in shards if not 0 <= shard.rank < world_size]
    if outside:
        raise ValueError(f"table {name!r}: the plan uses rank {outside[0]}, but there are {world_size} ranks")
    strips: dict[Span, list[Span]] = {}
    for shard in shards:
        strips.setdefault(shard.cols, []).append(shard.rows)
    if not _tiles(strips, size[1]) or not all(_tiles(rows, size[0]) for rows in strips.values()):
        raise ValueError(
            f"table {name!r}: its shards do not cover {size[0]} rows × {size[1]} columns exactly once, column by column"
        )
    side_by_side: list[Shard] = []
    for shard in sorted(shards, key=lambda s: (s.rows, s.rank, s.cols)):
        last = side_by_side[-1] if side_by_side else None
        if last and (last.rows, last.rank, last.cols.stop) == (shard.rows, shard.rank, shard.cols.start):
            shard = replace(side_by_side.pop(), cols=Span(last.cols.start, shard.cols.stop))
        side_by_side.append(shard)
    stacked: list[Shard] = []
    for shard in sorted(side_by_side, key=lambda s: (s.cols, s.rank, s.rows)):
        last = stacked[-1] if stacked else None
        if last and (last.cols, last.rank, last.rows.stop) == (shard.cols, shard.rank, shard.rows.start):
            shard = replace(stacked.pop(), rows=Span(last.rows.start, shard.rows.stop))
        stacked.append(shard)
    return sorted(stacked, key=lambda s: (s.cols, s.rows))


def _tiles(spans: Iterable[Span], size: int) -> bool:
    ordered = sorted(spans)
    meets = all(a.stop == b.start for a, b in pairwise(ordered))
    return bool(ordered) and ordered[0].start == 0 and ordered[-1].stop == size and meets


def _row_edges(shards: Sequence[Shard], column: int) -> Edges | None:
    """The row edges of the rectangles that hold a column; None if there is one. Joining columns may have left strips
    that overlap in part: what a strip's rectangles share is found by any of its columns."""
    rows = sorted(shard.rows for shard in shards if shard.cols.start <= column < shard.cols.stop)
    return None if len(rows) == 1 else (*(span.start for span in rows), rows[-1].stop)
