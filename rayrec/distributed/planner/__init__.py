"""Deciding how to shard: tables, a topology and constraints in, a plan out. No process group and no GPU needed."""

from rayrec.distributed.planner.planners import EmbeddingShardingPlanner
from rayrec.distributed.planner.topology import Topology
from rayrec.distributed.planner.types import NoPlanError, ParameterConstraints, PlanResult

__all__ = ["EmbeddingShardingPlanner", "NoPlanError", "ParameterConstraints", "PlanResult", "Topology"]
