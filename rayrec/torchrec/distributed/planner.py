"""`torchrec.distributed.planner`, whose modules are the planner's own."""

import sys
from importlib import import_module

from rayrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

__all__ = ["EmbeddingShardingPlanner", "ParameterConstraints", "Topology"]
__path__: list[str] = []

_NAMES = "constants enumerators partitioners perf_models planners proposers shard_estimators stats storage_reservations"
for _name in f"{_NAMES} types utils".split():
    sys.modules[f"{__name__}.{_name}"] = import_module(f"rayrec.distributed.planner.{_name}")
