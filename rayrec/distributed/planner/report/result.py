"""What planning returns: a plan with its estimate and lower bound, or an error."""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.planner.cost.estimate import Estimate
from rayrec.distributed.planner.machine.topology import Topology
from rayrec.distributed.planner.tables.table import Table


class NoPlanError(ValueError):
    """No plan fits; the message gives the table or sum, the bytes needed and available, and changes that would fit."""


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A plan and its predicted cost.

    Args:
        plan: the plan.
        estimate: predicted seconds and bytes of every rank.
        bound_s: lower bound of the slowest rank's seconds, under the same cost model, constraints and memory.
        tables: the planned tables, in the model's order.
        topology: the cluster.
        dense_bytes: bytes of the rest of the model on every rank.
    """

    plan: ShardingPlan
    estimate: Estimate
    bound_s: float
    tables: tuple[Table, ...]
    topology: Topology
    dense_bytes: int = 0

    @property
    def gap(self) -> float:
        """Distance of the slowest rank from the lower bound, as a share: 0.03 is at most 3 % from optimal."""
        return self.estimate.worst_s / self.bound_s - 1.0 if self.bound_s > 0 else 0.0
