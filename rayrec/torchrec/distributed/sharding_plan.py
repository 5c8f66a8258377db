"""Plans by hand: `construct_module_sharding_plan` makes a plan from a generator for each table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    """A generator's argument: a table and the ranks."""

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
        """A rectangle on a rank; all rows or columns unless said otherwise.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"table {self.name!r}: there is no rank {rank} among {self.world_size}")
        return Shard(table=self.name, rows=rows or self.rows, cols=cols or self.cols, rank=rank)

    def by_rows(self, ranks: Sequence[int], cols: Span | None = None) -> list[Shard]:
        """Blocks of rows, one a rank, the last ones shorter or absent."""
        spans = blocks(self.rows.size, len(ranks))
        return [self.shard(rank, rows, cols) for rank, rows in zip(ranks, spans, strict=False)]

    def columns(self, parts: int) -> list[Span]:
        """Equal parts of the columns.

        Raises:
            ValueError: the columns are no multiple of the parts.
        """
        if self.cols.size % parts:
            raise ValueError(
                f"table {self.name!r}: embedding_dim={self.cols.size} cannot be cut into {parts} equal parts"
            )
        width = self.cols.size // parts
        return [Span(place * width, (place + 1) * width) for place in range(parts)]

    def sharding(
        self, kind: ShardingType, shards: Iterable[Shard], kernel: str | None, device: str | None = None
    ) -> ParameterSharding:
        """The table's part of a plan; its kernel is fused where the table has an optimizer inside backward, else dense,
        unless one is named."""
        fused = hasattr(self.weight, "_in_backward_optimizers") or hasattr(self.weight, "_optimizer_classes")
        chosen = kernel or (EmbeddingComputeKernel.FUSED if fused else EmbeddingComputeKernel.DENSE).value
        shards, device = tuple(shards), device or self.device
        beyond = [] if device == "cpu" else [s.rank for s in shards if s.rank >= self.local_size]
        return ParameterSharding(
            sharding_type=kind.value,
            compute_kernel=chosen,
            shards=shards,
            device=device,
            local_ranks={rank: rank % self.local_size for rank in beyond},
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
        sizes_placement: rows of ranks 0, 1, …, and the device; default: equal blocks.
        num_buckets: accepted for compatibility, ignored.
    """

    def cut(table: Table) -> ParameterSharding:
        if sizes_placement is None:
            return table.sharding(ShardingType.ROW_WISE, table.by_rows(range(table.world_size)), compute_kernel)
        sizes, device = sizes_placement
        edges = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
        if edges[-1] != table.rows.size:
            raise ValueError(f"table {table.name!r}: sizes {list(sizes)} do not add up to {table.rows.size} rows")
        shards = [table.shard(rank, Span(edges[rank], edges[rank + 1])) for rank in range(len(sizes))]
        named = device if isinstance(device, str) else device[0]
        return table.sharding(ShardingType.ROW_WISE, shards, compute_kernel, named)

    return cut


def column_wise(
    ranks: Sequence[int] | None = None,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
    device_types: Sequence[str] | None = None,
) -> ParameterShardingGenerator:
    """Columns over ranks.

    Args:
        ranks: one a cut, equally wide; a rank may come twice.
        size_per_rank: widths on ranks 0, 1, …, instead.
        device_types: the first of them is the table's.

    Raises:
        ValueError: neither ranks nor sizes.
    """
    if ranks is None and size_per_rank is None:
        raise ValueError("column_wise: give ranks, or size_per_rank")

    def cut(table: Table) -> ParameterSharding:
        if size_per_rank is not None:
            edges = [sum(size_per_rank[:place]) for place in range(len(size_per_rank) + 1)]
            if edges[-1] != table.cols.size:
                raise ValueError(
                    f"table {table.name!r}: sizes {list(size_per_rank)} do not add up to {table.cols.size} columns"
                )
            spans, on = [Span(a, b) for a, b in zip(edges, edges[1:], strict=False)], range(len(size_per_rank))
        else:
            assert ranks is not None
            spans, on = table.columns(len(ranks)), ranks  # type: ignore[assignment]
        shards = [table.shard(rank, cols=cols) for rank, cols in zip(on, spans, strict=True)]
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
    """Columns over hosts, blocks of rows over the ranks of each."""

    def cut(table: Table) -> ParameterSharding:
        cols = table.columns(len(host_indexes))
        parts = [table.by_rows(table.host(host), span) for host, span in zip(host_indexes, cols, strict=True)]
        return table.sharding(ShardingType.GRID_SHARD, [shard for part in parts for shard in part], compute_kernel)

    return cut


def _sharder_of(module: nn.Module, sharder: ModuleSharder[Any] | None) -> ModuleSharder[Any]:
    found = sharder or get_module_to_default_sharders().get(type(module))
    if found is None:
        raise ValueError(f"there is no sharder of {type(module).__name__}; give one")
    return found


def construct_module_sharding_plan(
    module: nn.Module,
    per_param_sharding: Mapping[str, ParameterShardingGenerator],
    sharder: ModuleSharder[Any] | None = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """The plan of one collection.

    Args:
        module: the collection.
        per_param_sharding: a generator for each of its tables.
        sharder: of the collection; its default one if not given.
        local_size: ranks of a host; default: as of this process.
        world_size: default: of the default process group.
        device_type: "cpu" or "cuda"; default: what there is.

    Raises:
        ValueError: a table without a generator, or a generator without a table; a cut that does not fit.
    """
    weights = _sharder_of(module, sharder).shardable_parameters(module)
    unlike = sorted(set(weights) ^ set(per_param_sharding))
    if unlike:
        raise ValueError(f"table {unlike[0]!r} is only in {'the module' if unlike[0] in weights else 'the sharding'}")
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
    """The same generator for every table of a collection."""
    return dict.fromkeys(_sharder_of(module, sharder).shardable_parameters(module), parameter_sharding_generator)


def get_module_to_default_sharders() -> dict[type[nn.Module], ModuleSharder[Any]]:
    """The default sharder of each type of collection."""
    return {sharder.module_type: sharder for sharder in get_default_sharders()}


def placement(compute_device: str, rank: int, local_size: int) -> str:
    """A rank's device as plans write it: `rank:1/cuda:1`, `rank:1/cpu`."""
    return f"rank:{rank}/{compute_device if compute_device == 'cpu' else f'{compute_device}:{rank % local_size}'}"


def calculate_shard_sizes_and_offsets(
    tensor: torch.Tensor,
    world_size: int,
    local_world_size: int,
    sharding_type: str,
    col_wise_shard_dim: int | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Sizes and offsets of a table's shards; column-wise ones are `col_wise_shard_dim` wide.

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
            starts = [min(place * step, rows) for place in range(ranks + 1)]
            return [[b - a, dim] for a, b in zip(starts, starts[1:], strict=False)], [[a, 0] for a in starts[:-1]]
        case ShardingType.COLUMN_WISE | ShardingType.TABLE_COLUMN_WISE:
            width = min(dim, col_wise_shard_dim or dim)
            edges = [*range(0, dim, width), dim]
            return [[rows, b - a] for a, b in zip(edges, edges[1:], strict=False)], [[0, a] for a in edges[:-1]]
    raise ValueError(f"calculate_shard_sizes_and_offsets: not for {sharding_type}")
