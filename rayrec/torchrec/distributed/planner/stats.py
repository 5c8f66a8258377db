"""Reports of a finished plan."""

from __future__ import annotations

import logging
from typing import Any

from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.torchrec.distributed.planner.bases import Stats
from rayrec.torchrec.distributed.planner.topology import Topology
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = ["EmbeddingStats", "NoopEmbeddingStats", "Stats"]

logger = logging.getLogger(__name__)


class EmbeddingStats(Stats):
    """Logs the plan's tables; `rayrec plan` and `PlanResult` give more."""

    def log(self, sharding_plan: ShardingPlan, topology: Topology, batch_size: int, **more: Any) -> None:
        logger.info("plan for %d ranks, batch size %d:\n%s", topology.world_size, batch_size, sharding_plan)


class NoopEmbeddingStats(Stats):
    """Logs nothing."""

    def log(self, sharding_plan: ShardingPlan, topology: Topology, batch_size: int, **more: Any) -> None:
        """Do nothing."""
