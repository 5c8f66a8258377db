"""What the planner is told and what it answers: constraints, its view of a table, costs, bytes, and the result.

No decision is made here; `options.py` enumerates, `search.py` decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rayrec.distributed.comm.wire import VECTOR_ELEMENT_BYTES
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.plan.shards import CacheParams
from rayrec.distributed.planner.bases import (
    Enumerator,
    Partitioner,
    PerfModel,
    PlanLoader,
    Proposer,
    ShardEstimator,
    Stats,
)
from rayrec.distributed.planner.factory import (
    HardwareConfig,
    KernelConfig,
    TopologyFactory,
    TrainerConfig,
)
from rayrec.distributed.planner.parts import (
    DeviceHardware,
    NoPlanError,
    PartitionByType,
    Perf,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardingOption,
    Storage,
)
from rayrec.distributed.planner.storage_reservations import StorageReservation
from rayrec.distributed.planner.topology import CustomTopologyData, Topology

if TYPE_CHECKING:
    from rayrec.distributed.planner.estimate import Estimate

__all__ = [
    "CacheParams",
    "Cost",
    "CustomTopologyData",
    "DeviceHardware",
    "Enumerator",
    "HardwareConfig",
    "KernelConfig",
    "NoPlanError",
    "ParameterConstraints",
    "PartitionByType",
    "Partitioner",
    "Perf",
    "PerfModel",
    "PlanLoader",
    "PlanResult",
    "PlannerError",
    "PlannerErrorType",
    "Proposer",
    "Shard",
    "ShardBytes",
    "ShardEstimator",
    "ShardingOption",
    "Stats",
    "Storage",
    "StorageReservation",
    "Table",
    "TableKey",
    "Topology",
    "TopologyFactory",
    "TrainerConfig",
]

TableKey = tuple[str, str]  # (module path, table name)


@dataclass(frozen=True)
class ParameterConstraints:
    """What the user says about one table.

    Args:
        sharding_types: `ShardingType` values the planner may use; default: all that can run.
        compute_kernels: kernel names it may use; default: all that can run. `batched_` names are understood.
        min_partition: the narrowest column cut, in columns; default 16. The uncut table is never forbidden by it.
        pooling_factors: mean ids per bag, one number for each feature of the table (one number alone is for all).
        num_poolings: bags per example, one number for each feature; default 1.
        batch_sizes: examples per rank and step, one for each feature; default the planner's `batch_size`.
        num_ids: ids per rank and step, one for each feature; overrides `pooling_factors` where given.
        is_weighted: ids carry weights; default what the module says.
        cache_params: share of a UVM-cached table to keep in device memory; default: planned.
        enforce_hbm, bounds_check_mode, feature_names: taken and not needed.
        stochastic_rounding, output_dtype, key_value_params, use_virtual_table: must be left out, as in a plan.
        device_group: ranks the table may lie on, or the name of the compute device it must have ("cpu", "cuda").

    Raises:
        ValueError: a setting that is not offered.
    """

    sharding_types: Sequence[str] | None = None
    compute_kernels: Sequence[str] | None = None
    min_partition: int | None = None
    pooling_factors: Sequence[float] | None = None
    num_poolings: Sequence[float] | None = None
    batch_sizes: Sequence[int] | None = None
    is_weighted: bool | None = None
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: object = None
    feature_names: Sequence[str] | None = None
    output_dtype: object = None
    device_group: Sequence[int] | str | None = None
    key_value_params: object = None
    use_virtual_table: bool = False
    num_ids: Sequence[float] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("stochastic_rounding", "output_dtype", "key_value_params", "use_virtual_table"):
            if getattr(self, name):
                raise ValueError(f"ParameterConstraints: {name} is not offered; leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table as the planner sees it: sizes, traffic of one step, and what may be done with it.

    Args:
        ids: ids looked up by all ranks together in one step.
        bags: bags of all ranks together in one step.
        pooled: one vector a bag comes back; otherwise one an id.
        state_row_bytes: optimizer state for each row; `state_element_bytes`: for each number of a row.
        kernels: for each sharding type that may be used, the kernels that may be used with it, best first.
        runnable: the same before the user's constraints.
        ranks: the ranks it may lie on, ascending.
        sent_bytes, returned_bytes: of a number of a vector, and of a gradient, on its way between ranks.
    """

    path: str
    name: str
    rows: int
    dim: int
    element_bytes: int
    num_features: int
    ids: float
    bags: float
    pooled: bool
    weighted: bool
    state_row_bytes: int
    state_element_bytes: int
    kernels: Mapping[str, tuple[str, ...]]
    runnable: Mapping[str, tuple[str, ...]]
    ranks: tuple[int, ...]
    min_partition: int
    cache_load_factor: float | None = None
    sent_bytes: float = VECTOR_ELEMENT_BYTES
    returned_bytes: float = VECTOR_ELEMENT_BYTES

    @property
    def key(self) -> TableKey:
        return (self.path, self.name)

    @property
    def label(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def weight_bytes(self) -> int:
        return self.rows * self.dim * self.element_bytes

    @property
    def state_bytes(self) -> int:
        return self.rows * (self.state_row_bytes + self.dim * self.state_element_bytes)


class Cost(NamedTuple):
    """Seconds a shard adds to its rank in one step, by term (formulas in `cost.py`)."""

    lookup: float = 0.0
    input_intra: float = 0.0
    input_inter: float = 0.0
    output_intra: float = 0.0
    output_inter: float = 0.0
    backward: float = 0.0
    gradient_intra: float = 0.0
    gradient_inter: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


class ShardBytes(NamedTuple):
    """Bytes a shard takes on its rank, by term (formulas in `storage.py`).

    All but `host` lie in the memory of the compute device (RAM when that is the CPU); `host` is the memory beside it.
    """

    weights: float = 0.0
    optimizer: float = 0.0
    gradients: float = 0.0
    ids: float = 0.0
    vectors: float = 0.0
    cache: float = 0.0
    host: float = 0.0

    @property
    def device(self) -> float:
        return sum(self[:-1])


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A plan and what is known about it.

    Args:
        plan: the answer.
        estimate: predicted seconds and bytes of every rank.
        bound_s: no plan under the same cost model, constraints and memory has a worst rank below this.
        tables: the planner's view of every table, in the modules' order.
        topology: what was planned for.
        dense_bytes: what the rest of the model takes on every rank.
    """

    plan: ShardingPlan
    estimate: Estimate
    bound_s: float
    tables: tuple[Table, ...]
    topology: Topology
    dense_bytes: int = 0

    @property
    def gap(self) -> float:
        """How far the worst rank is above the lower bound, as a share: 0.03 is at most 3 % from optimal."""
        return self.estimate.worst_s / self.bound_s - 1.0 if self.bound_s > 0 else 0.0
