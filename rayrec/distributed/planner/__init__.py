"""Deciding how to shard: tables, a topology and constraints in, a plan out. No process group and no GPU needed."""

from rayrec.distributed.planner.check import check_plan
from rayrec.distributed.planner.diff import diff
from rayrec.distributed.planner.explain import explain
from rayrec.distributed.planner.html import write_html
from rayrec.distributed.planner.planners import EmbeddingShardingPlanner, plan_tables
from rayrec.distributed.planner.topology import Topology
from rayrec.distributed.planner.types import NoPlanError, ParameterConstraints, PlanResult

__all__ = [
    "EmbeddingShardingPlanner",
    "NoPlanError",
    "ParameterConstraints",
    "PlanResult",
    "Topology",
    "check_plan",
    "diff",
    "explain",
    "plan_tables",
    "write_html",
]
