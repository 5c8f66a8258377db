"""Ratings of plans with ranks and costs."""

from __future__ import annotations

from rayrec.torchrec.distributed.planner.bases import PerfModel
from rayrec.torchrec.distributed.planner.parts import Proposal, bytes_of, cost_of
from rayrec.torchrec.distributed.planner.topology import Topology

__all__ = ["NoopPerfModel", "NoopStorageModel", "PerfModel"]


class NoopPerfModel(PerfModel):
    """Milliseconds of the slowest rank."""

    def __init__(self, topology: Topology) -> None:
        self._world_size = topology.world_size

    def rate(self, plan: Proposal) -> float:
        return _fullest(self._world_size, [(s.rank, cost_of(s).total) for option in plan for s in option.shards])


class NoopStorageModel(PerfModel):
    """Bytes of device memory on the fullest rank."""

    def __init__(self, topology: Topology) -> None:
        self._world_size = topology.world_size

    def rate(self, plan: Proposal) -> float:
        return _fullest(self._world_size, [(s.rank, bytes_of(s).hbm) for option in plan for s in option.shards])


def _fullest(world_size: int, loads: list[tuple[int | None, float]]) -> float:
    totals = [0.0] * world_size
    for rank, load in loads:
        assert rank is not None, "a shard has no rank; call the partitioner first"
        totals[rank] += load
    return max(totals)
