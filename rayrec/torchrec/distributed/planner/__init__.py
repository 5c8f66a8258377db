"""`torchrec.distributed.planner`: TorchRec's planner arguments and components, over rayrec's planner."""

from rayrec.torchrec.distributed.planner.constraints import ParameterConstraints
from rayrec.torchrec.distributed.planner.planners import EmbeddingPlannerBase, EmbeddingShardingPlanner
from rayrec.torchrec.distributed.planner.topology import Topology
from rayrec.torchrec.distributed.planner.utils import bytes_to_gb, bytes_to_mb, sharder_name
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = [
    "EmbeddingPlannerBase",
    "EmbeddingShardingPlanner",
    "ParameterConstraints",
    "Topology",
    "bytes_to_gb",
    "bytes_to_mb",
    "sharder_name",
]
