"""Decides how every embedding table is sharded. Needs no GPU and no process group.

Rooms, low to high; a room imports only from rooms before it:

- `machine`: hosts, memory and speeds of the cluster
- `tables`: sizes, traffic and constraints of every table
- `cost`: seconds and bytes of a shard; the estimate of a plan
- `search`: options → bound → choose → pack → refine → plan
- `report`: check, explain, draw and compare plans
- `planner.py`, `sharding_groups.py`: the planner, and the number of sharding groups of a 2D run
- `config.py`: the section `sharding` of a train config

The names here are loaded when first used: a report needs only some of the texts.
"""

from typing import TYPE_CHECKING

from rayrec._runtime.imports import lazy_names

if TYPE_CHECKING:
    from rayrec.distributed.planner.machine.topology import Topology
    from rayrec.distributed.planner.planner import EmbeddingShardingPlanner, plan_tables
    from rayrec.distributed.planner.report.check import check_plan
    from rayrec.distributed.planner.report.compare import diff
    from rayrec.distributed.planner.report.explain import explain
    from rayrec.distributed.planner.report.html import write_html
    from rayrec.distributed.planner.report.result import NoPlanError, PlanResult
    from rayrec.distributed.planner.tables.constraints import ParameterConstraints

__getattr__ = lazy_names(__name__)

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
