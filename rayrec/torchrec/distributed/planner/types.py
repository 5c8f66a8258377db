"""`torchrec.distributed.planner.types`."""

from rayrec.torchrec.distributed.parameter_sharding import CacheParams
from rayrec.torchrec.distributed.planner.bases import (
    Enumerator,
    Partitioner,
    PerfModel,
    PlanLoader,
    Proposer,
    ShardEstimator,
    Stats,
    StorageReservation,
)
from rayrec.torchrec.distributed.planner.constraints import ParameterConstraints
from rayrec.torchrec.distributed.planner.factory import (
    HardwareConfig,
    KernelConfig,
    TopologyFactory,
    TrainerConfig,
)
from rayrec.torchrec.distributed.planner.parts import (
    DeviceHardware,
    PartitionByType,
    Perf,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardingOption,
    Storage,
)
from rayrec.torchrec.distributed.planner.topology import CustomTopologyData, Topology
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = [
    "CacheParams",
    "CustomTopologyData",
    "DeviceHardware",
    "Enumerator",
    "HardwareConfig",
    "KernelConfig",
    "ParameterConstraints",
    "PartitionByType",
    "Partitioner",
    "Perf",
    "PerfModel",
    "PlanLoader",
    "PlannerError",
    "PlannerErrorType",
    "Proposer",
    "Shard",
    "ShardEstimator",
    "ShardingOption",
    "Stats",
    "Storage",
    "StorageReservation",
    "Topology",
    "TopologyFactory",
    "TrainerConfig",
]
