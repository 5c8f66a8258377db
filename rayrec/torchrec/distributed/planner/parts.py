"""Sharding options, their shards and costs, which the planner's components exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from rayrec.distributed.plan.shards import ShardingType
from rayrec.modules.embedding import EmbeddingCollectionInterface
from rayrec.torchrec.distributed.parameter_sharding import CacheParams

if TYPE_CHECKING:
    from torch import nn


class PlannerErrorType(Enum):
    """Reasons for a `PlannerError`."""

    INSUFFICIENT_STORAGE = "insufficient_storage"
    STRICT_CONSTRAINTS = "strict_constraints"
    PARTITION = "partition"
    OTHER = "other"
    PLANNER_INPUT_CONTEXT_MISMATCH = "planner_input_context_mismatch"
    PLAN_LOADING_FAILED = "plan_loading_failed"
    INVALID_RANK_ASSIGNMENT = "invalid_rank_assignment"
    INPUT_VALIDATION = "input_validation"
    MISSING_MODULE_IN_PLAN = "missing_module_in_plan"
    INVALID_COMPUTE_KERNEL = "invalid_compute_kernel"


class PlannerError(ValueError):
    """The planner found no plan; `error_type` is the reason."""

    def __init__(self, message: str, error_type: PlannerErrorType = PlannerErrorType.OTHER) -> None:
        super().__init__(message)
        self.error_type = error_type


@dataclass(frozen=True)
class Perf:
    """Milliseconds that a shard adds to its rank in one step."""

    fwd_compute: float
    fwd_comms: float
    bwd_compute: float
    bwd_comms: float
    input_dist_comms: float = 0.0
    prefetch_compute: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all terms except `input_dist_comms`, which overlaps with the previous step."""
        return self.fwd_compute + self.bwd_compute + self.fwd_comms + self.bwd_comms + self.prefetch_compute

    def __add__(self, other: Perf) -> Perf:
        return Perf(*(a + b for a, b in zip(self._numbers(), other._numbers(), strict=True)))

    def _numbers(self) -> tuple[float, ...]:
        forward, backward = (self.fwd_compute, self.fwd_comms), (self.bwd_compute, self.bwd_comms)
        return (*forward, *backward, self.input_dist_comms, self.prefetch_compute)


@dataclass(order=True, frozen=True)
class Storage:
    """Bytes of device memory, host memory and disk."""

    hbm: int
    ddr: int
    ssd: int = 0

    def __add__(self, other: Storage) -> Storage:
        return Storage(self.hbm + other.hbm, self.ddr + other.ddr, self.ssd + other.ssd)

    def __sub__(self, other: Storage) -> Storage:
        return Storage(self.hbm - other.hbm, self.ddr - other.ddr, self.ssd - other.ssd)

    def fits_in(self, other: Storage) -> bool:
        return self.hbm <= other.hbm and self.ddr <= other.ddr and self.ssd <= other.ssd


@dataclass
class DeviceHardware:
    """A rank's free memory and its load in milliseconds."""

    rank: int
    storage: Storage
    perf: Perf

    def __hash__(self) -> int:
        return hash((self.rank, self.storage, self.perf))


@dataclass
class Shard:
    """A rectangle of a table: size and offset as `[rows, columns]`, costs, and rank once placed."""

    size: list[int]
    offset: list[int]
    storage: Storage | None = None
    perf: Perf | None = None
    rank: int | None = None

    def __hash__(self) -> int:
        return hash((tuple(self.size), tuple(self.offset), self.storage, self.perf, self.rank))


class PartitionByType(Enum):
    """Placement of the shards of a table: each on any rank, all on one host, on all ranks, or on several hosts."""

    DEVICE = "device"
    HOST = "host"
    UNIFORM = "uniform"
    MULTI_HOST = "multi_host"


PARTITION_BY = {
    ShardingType.TABLE_WISE: PartitionByType.DEVICE,
    ShardingType.COLUMN_WISE: PartitionByType.DEVICE,
    ShardingType.TABLE_ROW_WISE: PartitionByType.HOST,
    ShardingType.TABLE_COLUMN_WISE: PartitionByType.HOST,
    ShardingType.ROW_WISE: PartitionByType.UNIFORM,
    ShardingType.DATA_PARALLEL: PartitionByType.UNIFORM,
    ShardingType.GRID_SHARD: PartitionByType.MULTI_HOST,
}


class ShardingOption:
    """One sharding option of a table.

    Args:
        name: name of the table.
        tensor: the weight, on any device.
        module: path and collection of the table.
        input_lengths: mean ids per bag, for each feature.
        batch_size: examples per rank and step.
        sharding_type: a `ShardingType`'s value.
        partition_by: a `PartitionByType`'s value.
        compute_kernel: an `EmbeddingComputeKernel`'s value.
        shards: the rectangles.
        cache_params: settings of the device cache.
        dependency: options with the same value are placed on the same host.
        is_pooled: default: derived from the type of the collection.
        enforce_hbm, stochastic_rounding, bounds_check_mode, feature_names, output_dtype, key_value_params,
            num_poolings: ignored attributes.
    """

    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        module: tuple[str, nn.Module],
        input_lengths: list[float],
        batch_size: int,
        sharding_type: str,
        partition_by: str,
        compute_kernel: str,
        shards: list[Shard],
        cache_params: CacheParams | None = None,
        enforce_hbm: bool | None = None,
        stochastic_rounding: bool | None = None,
        bounds_check_mode: object = None,
        dependency: str | None = None,
        is_pooled: bool | None = None,
        feature_names: list[str] | None = None,
        output_dtype: object = None,
        key_value_params: object = None,
        num_poolings: list[float] | None = None,
    ) -> None:
        self.name, self.tensor, self.module = name, tensor, module
        self.input_lengths, self.batch_size = input_lengths, batch_size
        self.sharding_type, self.partition_by, self.compute_kernel = sharding_type, partition_by, compute_kernel
        self.shards, self.cache_params, self.dependency = shards, cache_params, dependency
        self.enforce_hbm, self.stochastic_rounding = enforce_hbm, stochastic_rounding
        self.bounds_check_mode, self.output_dtype, self.key_value_params = (
            bounds_check_mode,
            output_dtype,
            key_value_params,
        )
        self.feature_names, self.num_poolings = feature_names, num_poolings
        self.is_pooled = not isinstance(module[1], EmbeddingCollectionInterface) if is_pooled is None else is_pooled
        weighted = getattr(module[1], "is_weighted", None)
        self.is_weighted: bool | None = weighted() if callable(weighted) else None

    @property
    def path(self) -> str:
        return self.module[0]

    @property
    def fqn(self) -> str:
        return f"{self.path}.{self.name}"

    @property
    def cache_load_factor(self) -> float | None:
        return None if self.cache_params is None else self.cache_params.load_factor

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    @property
    def num_inputs(self) -> int:
        return len(self.input_lengths)

    @property
    def total_storage(self) -> Storage:
        return sum((shard.storage for shard in self.shards if shard.storage is not None), Storage(0, 0, 0))

    @property
    def total_perf(self) -> float:
        return sum(shard.perf.total for shard in self.shards if shard.perf is not None)

    @property
    def module_type_key(self) -> str:
        return f"{type(self.module[1]).__module__}.{type(self.module[1]).__name__}"

    def get_shards_assignment(self) -> list[int | None]:
        """Return the rank of each shard."""
        return [shard.rank for shard in self.shards]

    def __hash__(self) -> int:
        return hash((self.fqn, self.sharding_type, self.compute_kernel, tuple(self.shards), self.cache_params))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardingOption) and hash(self) == hash(other)


Proposal = list[ShardingOption]


def bytes_of(shard: Shard) -> Storage:
    """Return the bytes of a shard.

    Raises:
        PlannerError: the bytes are not set.
    """
    if shard.storage is None:
        raise PlannerError(f"shard of size {shard.size} has no storage; set it with an estimator")
    return shard.storage


def cost_of(shard: Shard) -> Perf:
    """Return the milliseconds of a shard.

    Raises:
        PlannerError: the milliseconds are not set.
    """
    if shard.perf is None:
        raise PlannerError(f"shard of size {shard.size} has no perf; set it with an estimator")
    return shard.perf


def by_table(options: Sequence[ShardingOption]) -> dict[str, Proposal]:
    """Group options by table, in order."""
    groups: dict[str, Proposal] = {}
    for option in options:
        groups.setdefault(option.fqn, []).append(option)
    return groups
