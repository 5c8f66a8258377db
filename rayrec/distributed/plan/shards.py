"""The sharding of one table: its rectangles, kernel and cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata

DEFAULT_LOAD_FACTOR = 0.2  # of a device cache; fbgemm's default


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
        """Return the intersection; of size 0 if the spans are disjoint."""
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


@dataclass(frozen=True, slots=True)
class CacheParams:
    """The device cache of a table with kernel `fused_uvm_caching`.

    Args:
        algorithm, reserved_memory, precision, prefetch_pipeline, stats, multipass_prefetch_config: accepted, not used.
        load_factor: cached share of the rows; default: fbgemm's.

    Raises:
        ValueError: a load factor not above 0 or above 1.
    """

    algorithm: object = None
    load_factor: float | None = None
    reserved_memory: float | None = None
    precision: object = None
    prefetch_pipeline: bool | None = None
    stats: object = None
    multipass_prefetch_config: object = None

    def __post_init__(self) -> None:
        if self.load_factor is not None and not 0 < self.load_factor <= 1:
            raise ValueError(f"cache_params: load_factor={self.load_factor} must be above 0 and at most 1")


@dataclass(frozen=True, slots=True, init=False)
class ParameterSharding:
    """The sharding of one table.

    `shards` cover the table exactly once; a data-parallel table has one full rectangle per rank. If they are given as a
    `sharding_spec` or as `ranks`, `of_table` adds the table's name and size.

    Args:
        sharding_type: a `ShardingType`'s value.
        compute_kernel: an `EmbeddingComputeKernel`'s value.
        ranks: ranks of a data-parallel table; other tables give `sharding_spec`.
        sharding_spec: one `ShardMetadata` per rectangle: offsets, sizes, and a placement such as `rank:1/cuda:1`.
        cache_params: device cache; default: fbgemm's load factor.
        enforce_hbm, bounds_check_mode: accepted, not used; the kernel defines the memory, and ids are checked on input.
        stochastic_rounding, output_dtype, key_value_params: not supported; must be None.
        shards: the rectangles, instead of `ranks` or `sharding_spec`.
        device: device type.
        local_ranks: device index by rank, if it differs from the rank.

    Raises:
        ValueError: a setting that is not supported.
    """

    sharding_type: str
    compute_kernel: str
    shards: tuple[Shard, ...]
    device: str
    cache_params: CacheParams | None
    local_ranks: Mapping[int, int] = field(hash=False)

    def __init__(
        self,
        sharding_type: str,
        compute_kernel: str,
        ranks: Sequence[int] | None = None,
        sharding_spec: EnumerableShardingSpec | None = None,
        cache_params: CacheParams | None = None,
        enforce_hbm: bool | None = None,
        stochastic_rounding: bool | None = None,
        bounds_check_mode: object = None,
        output_dtype: object = None,
        key_value_params: object = None,
        *,
        shards: Sequence[Shard] | None = None,
        device: str = "cpu",
        local_ranks: Mapping[int, int] | None = None,
    ) -> None:
        refused = {"stochastic_rounding": "a setting of the optimizer (fused_params)"}
        refused |= {"output_dtype": "vectors are float32", "key_value_params": "there are no tables on disk"}
        given = {"stochastic_rounding": stochastic_rounding, "output_dtype": output_dtype}
        for name, value in {**given, "key_value_params": key_value_params}.items():
            if value is not None:
                raise ValueError(f"ParameterSharding: {name} is not supported: {refused[name]}; leave it out")
        local = dict(local_ranks or {})
        if shards is None and sharding_spec is not None:
            shards, device, local = _read_spec(sharding_spec.shards)
        elif shards is None:
            shards = [Shard(table="", rows=Span(0, 0), cols=Span(0, 0), rank=rank) for rank in ranks or ()]
        for name, value in (
            ("sharding_type", str(getattr(sharding_type, "value", sharding_type))),
            ("compute_kernel", str(getattr(compute_kernel, "value", compute_kernel))),
            ("shards", tuple(shards)),
            ("device", device),
            ("cache_params", cache_params),
            ("local_ranks", local),
        ):
            object.__setattr__(self, name, value)

    @property
    def ranks(self) -> list[int]:
        """The rank of each shard, in order."""
        return [shard.rank for shard in self.shards]

    @property
    def sharding_spec(self) -> EnumerableShardingSpec | None:
        """The rectangles as torch's sharding spec; None for a data-parallel table."""
        from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata

        if self.replicated:
            return None
        return EnumerableShardingSpec(
            [ShardMetadata([s.rows.start, s.cols.start], list(s.shape), self.placement(s)) for s in self.shards]
        )

    @property
    def load_factor(self) -> float:
        """Cached share of the rows."""
        return (self.cache_params and self.cache_params.load_factor) or DEFAULT_LOAD_FACTOR

    @property
    def replicated(self) -> bool:
        return self.sharding_type == ShardingType.DATA_PARALLEL.value

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, embedding dim) of the whole table."""
        return (max(s.rows.stop for s in self.shards), max(s.cols.stop for s in self.shards))

    def placement(self, shard: Shard) -> str:
        """Return the shard's rank and local device: `rank:2/cuda:0`, `rank:2/cpu`."""
        index = self.local_ranks.get(shard.rank, shard.rank)
        return f"rank:{shard.rank}/{'cpu' if self.device == 'cpu' else f'{self.device}:{index}'}"

    def of_table(self, name: str, rows: int, dim: int) -> ParameterSharding:
        """Return the sharding with the table's name and, if data-parallel, its size; unchanged if already set."""
        if all(shard.table for shard in self.shards):
            return self
        named = [replace(shard, table=name) for shard in self.shards]
        if self.replicated:
            named = [replace(shard, rows=Span(0, rows), cols=Span(0, dim)) for shard in named]
        return replace(self, shards=tuple(named))


def _read_spec(shards: Iterable[ShardMetadata]) -> tuple[list[Shard], str, dict[int, int]]:
    """Return rectangles without table name, device type, and device index by rank if it differs."""
    found: list[Shard] = []
    device, local = "cpu", {}
    for each in shards:
        placement: Any = each.placement
        (row, col), (rows, cols) = each.shard_offsets, each.shard_sizes
        rank, on = placement.rank(), placement.device()
        device = on.type
        if on.index is not None and on.index != rank:
            local[rank] = on.index
        found.append(Shard(table="", rows=Span(row, row + rows), cols=Span(col, col + cols), rank=rank))
    return found, device, local
