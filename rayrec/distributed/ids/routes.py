"""Turns a plan's shards into fixed routes, once: which ids go to which rank, and which columns come back.

Routes are frozen data, equal on every rank; exchanges and executors follow them. Terms:

- output: one feature read by one table; its vector is a block of columns of the result.
- variant: all ids of a feature (edges None), or its ids split by the row edges of a table that is cut by rows.
- stream: the part of a variant that one rank receives: all ids, or the ids of one bucket of rows. It is sent once, even
  if several lookups of that rank read it.
- lookup: one output read in one shard of its table, on the rank that holds the shard.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

from rayrec.distributed.kernel.local_table import LocalTable
from rayrec.distributed.kernel.optimizer_spec import OptimizerSpec
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ParameterSharding, Shard, Span
from rayrec.modules.configs import BaseEmbeddingConfig

Edges = tuple[int, ...]
Rectangle = tuple[str, Span, Span]  # table, columns, rows
GroupKey = Callable[[LocalTable], Hashable]
Config = TypeVar("Config", bound=BaseEmbeddingConfig)


@dataclass(frozen=True)
class PlannedTable(Generic[Config]):
    """A table, its sharding, and its optimizer inside backward; None leaves gradients to an optimizer of the user."""

    config: Config
    sharding: ParameterSharding
    optimizer: OptimizerSpec | None


@dataclass(frozen=True, slots=True)
class Output:
    """A block of `dim` columns of the result, starting at column `col`."""

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
    """One output in one shard. `stream` and `table` are indices on the lookup's rank."""

    output: int
    stream: int
    table: int  # in the rank's group
    group: int
    cols: Span  # of the result


@dataclass(frozen=True)
class RankRoute:
    """The streams that one rank receives, its lookups and its tables."""

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
class _OutputShard:
    """An output in one shard, before streams and tables are numbered."""

    group: int
    output: int
    local: LocalTable
    stream: Stream
    cols: Span  # of the result


def make_routes(tables: Sequence[PlannedTable], world_size: int, group_of: GroupKey) -> Routes:
    """The routes of tables; none may be replicated.

    Args:
        group_of: returns the key of a local table's group; tables with the same key share a kernel.

    Raises:
        ValueError: shards that do not cover a table exactly, or are on a rank outside the world.
    """
    outputs = make_outputs([table.config for table in tables])
    shards = {table.config.name: _local_tables(table, world_size) for table in tables}
    group_index: dict[Hashable, int] = {}
    variant_index: dict[Variant, int] = {}
    by_rank: list[list[_OutputShard]] = [[] for _ in range(world_size)]
    for number, output in enumerate(outputs):
        for rank, local, edges in shards[output.table]:
            variant = Variant(output.feature, edges)
            bucket = 0 if edges is None else bisect_left(edges, local.rows.start)
            group = group_index.setdefault(group_of(local), len(group_index))
            stream = Stream(variant_index.setdefault(variant, len(variant_index)), bucket)
            cols = Span(output.col + local.cols.start, output.col + local.cols.stop)
            by_rank[rank].append(_OutputShard(group, number, local, stream, cols))
    ranks = tuple(_rank_route(shards_of_rank) for shards_of_rank in by_rank)
    features = tuple(dict.fromkeys(output.feature for output in outputs))
    return Routes(features, outputs, tuple(variant_index), ranks, len(group_index))


def _local_tables(table: PlannedTable, world_size: int) -> list[tuple[int, LocalTable, Edges | None]]:
    """Each shard's rank, the shard, and the row edges of its column strip (None if it has all rows)."""
    config, sharding = table.config, table.sharding
    shards = _joined(config, sharding.shards, world_size)
    edges = {column: _row_edges(shards, column) for column in {shard.cols.start for shard in shards}}
    kernel = EmbeddingComputeKernel(sharding.compute_kernel)
    load_factor = sharding.load_factor if kernel is EmbeddingComputeKernel.FUSED_UVM_CACHING else None
    make = partial(LocalTable, config=config, kernel=kernel, optimizer=table.optimizer, load_factor=load_factor)
    return [(shard.rank, make(rows=shard.rows, cols=shard.cols), edges[shard.cols.start]) for shard in shards]


def _rank_route(shards: Sequence[_OutputShard]) -> RankRoute:
    streams: dict[Stream, int] = {}
    tables: dict[int, dict[Rectangle, LocalTable]] = {}
    index: dict[Rectangle, int] = {}
    lookups: list[Lookup] = []
    for shard in _by_rectangle(shards):
        group, rectangle = tables.setdefault(shard.group, {}), _rectangle(shard)
        index.setdefault(rectangle, len(group))
        group[rectangle] = shard.local
        lookups.append(
            Lookup(
                output=shard.output,
                stream=streams.setdefault(shard.stream, len(streams)),
                table=index[rectangle],
                group=shard.group,
                cols=shard.cols,
            )
        )
    return RankRoute(
        tuple(streams), tuple(lookups), {number: tuple(group.values()) for number, group in tables.items()}
    )


def _rectangle(shard: _OutputShard) -> Rectangle:
    return shard.local.config.name, shard.local.cols, shard.local.rows


def _by_rectangle(shards: Sequence[_OutputShard]) -> list[_OutputShard]:
    """Sorts by group and column, but keeps all lookups in a rectangle together, as fbgemm's CPU kernels need them."""
    start: dict[Rectangle, int] = {}
    for shard in shards:
        start[_rectangle(shard)] = min(start.get(_rectangle(shard), shard.cols.start), shard.cols.start)
    return sorted(shards, key=lambda s: (s.group, start[_rectangle(s)], s.local.rows, s.cols.start))


def _joined(config: BaseEmbeddingConfig, shards: Sequence[Shard], world_size: int) -> list[Shard]:
    """The table's shards, checked; adjacent shards on one rank are joined, and empty ones left out."""
    shards = [shard for shard in shards if shard.rows.size and shard.cols.size]
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
    """The row edges of the shards that hold a column; None if one shard holds it.

    Joining columns may have made strips that overlap in part, so shards are selected by column, not by strip.
    """
    rows = sorted(shard.rows for shard in shards if shard.cols.start <= column < shard.cols.stop)
    return None if len(rows) == 1 else (*(span.start for span in rows), rows[-1].stop)
