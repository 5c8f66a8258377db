"""The sharding of one table: shards, kernel and cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

DEFAULT_LOAD_FACTOR = 0.2  # fbgemm's default for device caches


class ShardingType(str, Enum):
    """How a table is cut into shards (see `cuts.py`)."""

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID_SHARD = "grid_shard"


class EmbeddingComputeKernel(str, Enum):
    """The kernel that looks up and updates a shard.

    DENSE leaves gradients to a torch optimizer; the FUSED family updates inside backward, with weights in device
    memory (FUSED), in host memory read by the device (FUSED_UVM), or in host memory with a device cache
    (FUSED_UVM_CACHING). The names with BATCHED_ are aliases.
    """

    DENSE = "dense"
    FUSED = "fused"
    FUSED_UVM = "fused_uvm"
    FUSED_UVM_CACHING = "fused_uvm_caching"

    BATCHED_DENSE = "dense"
    BATCHED_FUSED = "fused"
    BATCHED_FUSED_UVM = "fused_uvm"
    BATCHED_FUSED_UVM_CACHING = "fused_uvm_caching"

    @classmethod
    def _missing_(cls, value: object) -> EmbeddingComputeKernel | None:
        if isinstance(value, str) and value.startswith("batched_"):
            return cls(value.removeprefix("batched_"))
        return None


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A half-open range `[start, stop)` of rows or columns."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def overlap(self, other: Span) -> Span:
        """The intersection; of size 0 if the spans are disjoint."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shard:
    """One rectangle of one table on one rank."""

    table: str
    rows: Span
    cols: Span
    rank: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows.size, self.cols.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheParams:
    """The device cache of a table with kernel `fused_uvm_caching`.

    Args:
        load_factor: fraction of the rows in the cache; fbgemm's by default.

    Raises:
        ValueError: a load factor outside (0, 1].
    """

    load_factor: float | None = None

    def __post_init__(self) -> None:
        if self.load_factor is not None and not 0 < self.load_factor <= 1:
            raise ValueError(f"cache_params: load_factor={self.load_factor} must be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class ParameterSharding:
    """The sharding of one table.

    `shards` cover the table exactly once; a data-parallel table has one full shard per rank. `of_table` sets the name
    of shards without one, and the size of a data-parallel table.

    Args:
        sharding_type: a `ShardingType`'s value.
        compute_kernel: an `EmbeddingComputeKernel`'s value.
        shards: the shards.
        device: device type.
        cache_params: device cache; fbgemm's load factor by default.
        local_ranks: device index by rank, if it differs from the rank.
        stochastic_rounding: for 16-bit weights; the setting of the optimizer by default.
    """

    sharding_type: str
    compute_kernel: str
    _: KW_ONLY
    shards: tuple[Shard, ...]
    device: str = "cpu"
    cache_params: CacheParams | None = None
    local_ranks: Mapping[int, int] = field(default_factory=dict, hash=False)
    stochastic_rounding: bool | None = None

    def __post_init__(self) -> None:
        for name in ("sharding_type", "compute_kernel"):
            value = getattr(self, name)
            object.__setattr__(self, name, str(getattr(value, "value", value)))
        object.__setattr__(self, "shards", tuple(self.shards))

    @property
    def ranks(self) -> list[int]:
        """The rank of each shard, in order."""
        return [shard.rank for shard in self.shards]

    @property
    def load_factor(self) -> float:
        """Fraction of the rows in the cache."""
        return (self.cache_params and self.cache_params.load_factor) or DEFAULT_LOAD_FACTOR

    @property
    def replicated(self) -> bool:
        return self.sharding_type == ShardingType.DATA_PARALLEL.value

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, embedding dim) of the whole table."""
        return (max(s.rows.stop for s in self.shards), max(s.cols.stop for s in self.shards))

    def placement(self, shard: Shard) -> str:
        """The shard's rank and local device: `rank:2/cuda:0`, `rank:2/cpu`."""
        index = self.local_ranks.get(shard.rank, shard.rank)
        return f"rank:{shard.rank}/{'cpu' if self.device == 'cpu' else f'{self.device}:{index}'}"

    @property
    def sharding_spec(self) -> EnumerableShardingSpec | None:
        """The rectangles as torch's sharding spec; None for a data-parallel table."""
        from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata

        if self.replicated:
            return None
        return EnumerableShardingSpec(
            [ShardMetadata([s.rows.start, s.cols.start], list(s.shape), self.placement(s)) for s in self.shards]
        )

    def of_table(self, name: str, rows: int, dim: int) -> ParameterSharding:
        """The sharding with the table's name and, if data-parallel, its size; unchanged if already set."""
        if all(shard.table for shard in self.shards):
            return self
        named = [replace(shard, table=name) for shard in self.shards]
        if self.replicated:
            named = [replace(shard, rows=Span(0, rows), cols=Span(0, dim)) for shard in named]
        return replace(self, shards=tuple(named))
