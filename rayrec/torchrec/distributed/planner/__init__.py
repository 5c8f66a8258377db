"""TorchRec's planner: its arguments and parts, over rayrec's planner."""

from rayrec.torchrec.distributed.planner.constraints import ParameterConstraints
from rayrec.torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from rayrec.torchrec.distributed.planner.topology import Topology
from rayrec.torchrec.distributed.planner.utils import bytes_to_gb, bytes_to_mb, sharder_name

__all__ = [
    "EmbeddingShardingPlanner",
    "ParameterConstraints",
    "Topology",
    "bytes_to_gb",
    "bytes_to_mb",
    "sharder_name",
]
