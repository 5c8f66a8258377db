"""Manual plans: `construct_module_sharding_plan` creates the plan of a collection from one generator per table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rayrec.distributed.plan.cuts import blocks
from rayrec.distributed.plan.module_sharder import ModuleSharder
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ParameterSharding, Shard, ShardingType, Span
from rayrec.torchrec.distributed.comm import get_local_size
from rayrec.torchrec.distributed.module_sharder import get_default_sharders
from rayrec.torchrec.distributed.parameter_sharding import EmbeddingModuleShardingPlan
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = [
    "ParameterShardingGenerator",
    "Table",
    "apply_to_all",
    "calculate_shard_sizes_and_offsets",
    "column_wise",
    "construct_module_sharding_plan",
    "data_parallel",
    "get_default_sharders",
    "get_module_to_default_sharders",
    "grid_shard",
    "placement",
    "row_wise",
    "table_row_wise",
    "table_wise",
]


@dataclass(frozen=True)
class Table:
    """A table and the ranks: the argument of a generator."""

    name: str
    weight: torch.Tensor
    world_size: int
    local_size: int
    device: str

    @property
    def rows(self) -> Span:
        return Span(0, self.weight.shape[0])

    @property
    def cols(self) -> Span:
        return Span(0, self.weight.shape[1])

    def host(self, index: int) -> range:
        """The ranks of a host."""
        return range(index * self.local_size, (index + 1) * self.local_size)

    def shard(self, rank: int, rows: Span | None = None, cols: Span | None = None) -> Shard:
        """Returns a rectangle on a rank; by default all rows and columns.

        Raises:
            ValueError: the rank is outside the world.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"table {self.name!r}: rank {rank} is outside the world of {self.world_size} ranks")
        return Shard(table=self.name, rows=rows or self.rows, cols=cols or self.cols, rank=rank)

    def by_rows(self, ranks: Sequence[int], cols: Span | None = None) -> list[Shard]:
        """Returns equal blocks of rows, one per rank; the last blocks may be shorter or missing."""
        spans = blocks(self.rows.size, len(ranks))
        return [self.shard(rank, rows, cols) for rank, rows in zip(ranks, spans, strict=False)]

    def columns(self, num_spans: int) -> list[Span]:
        """Divides the columns into spans of equal width.

        Raises:
            ValueError: the embedding dim is not a multiple of `num_spans`.
        """
        if self.cols.size % num_spans:
            raise ValueError(
                f"table {self.name!r}: embedding_dim={self.cols.size} must be a multiple of {num_spans}, the number of "
                "column shards"
            )
        width = self.cols.size // num_spans
        return [Span(index * width, (index + 1) * width) for index in range(num_spans)]

    def sharding(
        self, kind: ShardingType, shards: Iterable[Shard], kernel: str | None, device: str | None = None
    ) -> ParameterSharding:
        """Returns the sharding of the table.

        Args:
            kind: sharding type.
            shards: the rectangles.
            kernel: None: fused if the table has an optimizer in the backward pass, else dense.
            device: device type; default: the one of the table.
        """
        fused = hasattr(self.weight, "_in_backward_optimizers") or hasattr(self.weight, "_optimizer_classes")
        shards, device = tuple(shards), device or self.device
        remote_ranks = [] if device == "cpu" else [s.rank for s in shards if s.rank >= self.local_size]
        return ParameterSharding(
            sharding_type=kind.value,
            compute_kernel=kernel or (EmbeddingComputeKernel.FUSED if fused else EmbeddingComputeKernel.DENSE).value,
            shards=shards,
            device=device,
            local_ranks={rank: rank % self.local_size for rank in remote_ranks},
        )


ParameterShardingGenerator = Callable[[Table], ParameterSharding]


def data_parallel() -> ParameterShardingGenerator:
    """The whole table on every rank."""

    def cut(table: Table) -> ParameterSharding:
        shards = [table.shard(rank) for rank in range(table.world_size)]
        return table.sharding(ShardingType.DATA_PARALLEL, shards, EmbeddingComputeKernel.DENSE.value)

    return cut


def table_wise(rank: int, device: str | None = None, compute_kernel: str | None = None) -> ParameterShardingGenerator:
    """The whole table on one rank."""
    return lambda table: table.sharding(ShardingType.TABLE_WISE, [table.shard(rank)], compute_kernel, device)


def row_wise(
    sizes_placement: tuple[Sequence[int], str | Sequence[str]] | None = None,
    compute_kernel: str | None = None,
    num_buckets: int | None = None,
) -> ParameterShardingGenerator:
    """Blocks of rows over all ranks.

    Args:
        sizes_placement: number of rows of each rank, and the device type; default: equal blocks.
        compute_kernel: see `Table.sharding`.
        num_buckets: ignored.
    """

    def cut(table: Table) -> ParameterSharding:
        if sizes_placement is None:
            return table.sharding(ShardingType.ROW_WISE, table.by_rows(range(table.world_size)), compute_kernel)
        sizes, device = sizes_placement
        edges = [sum(sizes[:rank]) for rank in range(len(sizes) + 1)]
        if edges[-1] != table.rows.size:
            raise ValueError(f"table {table.name!r}: sizes {list(sizes)} do not add up to {table.rows.size} rows")
        shards = [table.shard(rank, Span(edges[rank], edges[rank + 1])) for rank in range(len(sizes))]
        device_type = device if isinstance(device, str) else device[0]
        return table.sharding(ShardingType.ROW_WISE, shards, compute_kernel, device_type)

    return cut


def column_wise(
    ranks: Sequence[int] | None = None,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
    device_types: Sequence[str] | None = None,
) -> ParameterShardingGenerator:
    """Blocks of columns over ranks.

    Args:
        ranks: the rank of each block, of equal width; a rank may occur twice.
        size_per_rank: number of columns of each rank, instead of `ranks`.
        compute_kernel: see `Table.sharding`.
        device_types: the first one is the device type of the table.

    Raises:
        ValueError: neither ranks nor sizes.
    """
    if ranks is None and size_per_rank is None:
        raise ValueError("column_wise: pass ranks or size_per_rank")

    def cut(table: Table) -> ParameterSharding:
        if size_per_rank is not None:
            edges = [sum(size_per_rank[:rank]) for rank in range(len(size_per_rank) + 1)]
            if edges[-1] != table.cols.size:
                raise ValueError(
                    f"table {table.name!r}: sizes {list(size_per_rank)} do not add up to {table.cols.size} columns"
                )
            spans = [Span(start, stop) for start, stop in pairwise(edges)]
            block_ranks: Sequence[int] = range(len(size_per_rank))
        else:
            assert ranks is not None
            spans, block_ranks = table.columns(len(ranks)), ranks
        shards = [table.shard(rank, cols=cols) for rank, cols in zip(block_ranks, spans, strict=True)]
        return table.sharding(
            ShardingType.COLUMN_WISE, shards, compute_kernel, device_types[0] if device_types else None
        )

    return cut


def table_row_wise(host_index: int, compute_kernel: str | None = None) -> ParameterShardingGenerator:
    """Blocks of rows over the ranks of one host."""

    def cut(table: Table) -> ParameterSharding:
        return table.sharding(ShardingType.TABLE_ROW_WISE, table.by_rows(table.host(host_index)), compute_kernel)

    return cut


def grid_shard(host_indexes: Sequence[int], compute_kernel: str | None = None) -> ParameterShardingGenerator:
    """Blocks of columns over hosts, and blocks of rows over the ranks of each host."""

    def cut(table: Table) -> ParameterSharding:
        columns = table.columns(len(host_indexes))
        host_shards = [table.by_rows(table.host(host), span) for host, span in zip(host_indexes, columns, strict=True)]
        return table.sharding(ShardingType.GRID_SHARD, chain.from_iterable(host_shards), compute_kernel)

    return cut


def _sharder_of(module: nn.Module, sharder: ModuleSharder[Any] | None) -> ModuleSharder[Any]:
    sharder = sharder or get_module_to_default_sharders().get(type(module))
    if sharder is None:
        raise ValueError(f"no default sharder for {type(module).__name__}; pass a sharder")
    return sharder


def construct_module_sharding_plan(
    module: nn.Module,
    per_param_sharding: Mapping[str, ParameterShardingGenerator],
    sharder: ModuleSharder[Any] | None = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """Creates the plan of one collection.

    Args:
        module: the collection.
        per_param_sharding: the generator of each table.
        sharder: sharder of the collection; default: the one of `get_default_sharders`.
        local_size: ranks per host; default: from the environment.
        world_size: default: the size of the default process group.
        device_type: "cpu" or "cuda"; default: "cuda" if a GPU is available.

    Raises:
        ValueError: a table without a generator, a generator without a table, or shards that do not cover the table.
    """
    weights = _sharder_of(module, sharder).shardable_parameters(module)
    mismatch = sorted(set(weights) ^ set(per_param_sharding))
    if mismatch:
        where = "the module" if mismatch[0] in weights else "the sharding"
        raise ValueError(f"table {mismatch[0]!r} is only in {where}")
    ranks = world_size or dist.get_world_size()
    device = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    local = local_size or get_local_size(ranks)
    return EmbeddingModuleShardingPlan(
        (name, per_param_sharding[name](Table(name, weight, ranks, local, device))) for name, weight in weights.items()
    )


def apply_to_all(
    module: nn.Module,
    parameter_sharding_generator: ParameterShardingGenerator,
    sharder: ModuleSharder[Any] | None = None,
) -> dict[str, ParameterShardingGenerator]:
    """Returns the same generator for every table of a collection."""
    return dict.fromkeys(_sharder_of(module, sharder).shardable_parameters(module), parameter_sharding_generator)


def get_module_to_default_sharders() -> dict[type[nn.Module], ModuleSharder[Any]]:
    """Returns the default sharder of each type of collection."""
    return {sharder.module_type: sharder for sharder in get_default_sharders()}


def placement(compute_device: str, rank: int, local_size: int) -> str:
    """Returns the device of a rank in the notation of plans: `rank:1/cuda:1`, `rank:1/cpu`."""
    return f"rank:{rank}/{compute_device if compute_device == 'cpu' else f'{compute_device}:{rank % local_size}'}"


def calculate_shard_sizes_and_offsets(
    tensor: torch.Tensor,
    world_size: int,
    local_world_size: int,
    sharding_type: str,
    col_wise_shard_dim: int | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Returns sizes and offsets of the shards of a table. Column-wise shards have `col_wise_shard_dim` columns.

    Raises:
        ValueError: an unknown sharding type.
    """
    rows, dim = tensor.shape
    match ShardingType(sharding_type):
        case ShardingType.DATA_PARALLEL:
            return [[rows, dim]] * world_size, [[0, 0]] * world_size
        case ShardingType.TABLE_WISE:
            return [[rows, dim]], [[0, 0]]
        case ShardingType.ROW_WISE | ShardingType.TABLE_ROW_WISE as kind:
            ranks = world_size if kind is ShardingType.ROW_WISE else local_world_size
            step = -(-rows // ranks)
            edges = [min(rank * step, rows) for rank in range(ranks + 1)]
            return [[stop - start, dim] for start, stop in pairwise(edges)], [[start, 0] for start in edges[:-1]]
        case ShardingType.COLUMN_WISE | ShardingType.TABLE_COLUMN_WISE:
            width = min(dim, col_wise_shard_dim or dim)
            edges = [*range(0, dim, width), dim]
            return [[rows, stop - start] for start, stop in pairwise(edges)], [[0, start] for start in edges[:-1]]
    raise ValueError(f"calculate_shard_sizes_and_offsets does not support {sharding_type}")
