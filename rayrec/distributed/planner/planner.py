"""The planner: from a model or table configs to a plan, in one process or for a process group.

The model, the sharders and the planner are not modified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rayrec.distributed.collections.embedding import default_sharders
from rayrec.distributed.collections.embedding_bag import EmbeddingBagCollectionSharder
from rayrec.distributed.comm.objects import call_on_rank
from rayrec.distributed.plan.module_sharder import ModuleSharder
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.planner.cost.estimate import Estimate, evaluate
from rayrec.distributed.planner.cost.memory import reserves
from rayrec.distributed.planner.machine.topology import Topology
from rayrec.distributed.planner.report.check import check_plan
from rayrec.distributed.planner.report.no_plan import no_plan_error
from rayrec.distributed.planner.report.result import PlanResult
from rayrec.distributed.planner.search.build import build_plan
from rayrec.distributed.planner.search.solve import Solution, best_solution, least_seconds
from rayrec.distributed.planner.tables.constraints import ParameterConstraints
from rayrec.distributed.planner.tables.from_model import (
    TableInfo,
    dense_bytes,
    find_tables,
    planner_tables,
    runnable_kernels,
    table_optimizer,
    trained_by,
)
from rayrec.distributed.planner.tables.table import Table
from rayrec.modules.configs import BaseEmbeddingConfig, EmbeddingConfig

if TYPE_CHECKING:
    from torch import nn

DEFAULT_BATCH_SIZE = 512


class EmbeddingShardingPlanner:
    """Finds a sharding for every table of a model.

    Args:
        topology: the cluster; default: this machine, with the process group's number of ranks (or one).
        batch_size: examples per rank and step.
        constraints: by table name.

    Raises:
        ValueError: a batch size below 1.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
    ) -> None:
        batch_size = DEFAULT_BATCH_SIZE if batch_size is None else batch_size
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        self._topology, self._batch_size = topology, batch_size
        self._constraints = dict(constraints or {})

    def plan(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> ShardingPlan:
        """The plan for `module`.

        Raises:
            NoPlanError: no plan fits.
            ValueError: an invalid constraint.
        """
        return self.result(module, sharders).plan

    def result(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]], topology: Topology | None = None
    ) -> PlanResult:
        """The plan for `module` with its estimate and lower bound. Raises as `plan` does."""
        target = topology or self._topology or Topology.of_this_machine(1)
        return solve(self._tables(module, sharders, target), target, dense_bytes(module, sharders))

    def estimate(self, plan: ShardingPlan, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> Estimate:
        """The cost of any plan, without a search.

        Raises:
            ValueError: an unknown table or rank in the plan, or an invalid constraint.
        """
        target = self._topology or Topology.of_this_machine(plan.min_world_size)
        return evaluate(plan, self._tables(module, sharders, target), target)

    def judge(self, plan: ShardingPlan, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> PlanResult:
        """Checks a loaded or edited plan; returns it with its estimate and the lower bound for `module`.

        Raises:
            NoPlanError: the plan exceeds a rank's memory.
            ValueError: the plan does not cover every table exactly once, or has unknown ranks or kernels.
        """
        target = self._topology or Topology.of_this_machine(1)
        tables, other_bytes = self._tables(module, sharders, target), dense_bytes(module, sharders)
        estimate = check_plan(plan, tables, target, other_bytes)
        bound_s = least_seconds(tables, target, reserves(tables, target, other_bytes))
        return PlanResult(
            plan=plan,
            estimate=estimate,
            bound_s=bound_s,
            tables=tables,
            topology=target,
            dense_bytes=other_bytes,
        )

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plans on rank 0 of `pg` (default: all ranks) and returns the plan on every rank.

        Raises:
            NoPlanError, ValueError: as `plan` does, or the topology and the group differ in size; on every rank.
        """
        used_sharders = default_sharders() if sharders is None else sharders

        def make(world_size: int) -> ShardingPlan:
            return self.result(module, used_sharders, topology_for(self._topology, world_size)).plan

        return plan_on_rank_0(make, pg)

    def _tables(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]], topology: Topology
    ) -> tuple[Table, ...]:
        infos = find_tables(module, sharders, topology.compute_device)
        return planner_tables(infos, topology, self._constraints, self._batch_size)


def topology_for(topology: Topology | None, world_size: int) -> Topology:
    """Returns `topology`, by default this machine with `world_size` ranks.

    Raises:
        ValueError: a topology of another size.
    """
    target = topology or Topology.of_this_machine(world_size)
    if target.world_size != world_size:
        raise ValueError(f"the topology has {target.world_size} ranks, but the process group has {world_size}")
    return target


def plan_on_rank_0(make: Callable[[int], ShardingPlan], pg: dist.ProcessGroup | None = None) -> ShardingPlan:
    """Calls `make(world size)` on rank 0 of `pg` and returns its plan on every rank; collective.

    Raises:
        Exception: the error of rank 0, on every rank.
    """
    group = pg if pg is not None else dist.group.WORLD
    assert group is not None, "no process group is initialized"
    return call_on_rank(group, 0, make, group.size())


def plan_tables(
    tables: Sequence[BaseEmbeddingConfig],
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    dense_bytes: int = 0,
    sharder: ModuleSharder[Any] | None = None,
    weighted: bool = False,
    path: str = "",
) -> PlanResult:
    """Plans tables without a model.

    Args:
        tables: configs of one collection; an `EmbeddingConfig` returns one vector per id, other configs pool.
        topology: the cluster.
        constraints: by table name.
        batch_size: examples per rank and step.
        dense_bytes: bytes of the rest of the model on every rank.
        sharder: defines the available kernels and the fused optimizer; default: `EmbeddingBagCollectionSharder()`.
        weighted: whether ids have weights.
        path: path of the collection in the model.

    Raises:
        NoPlanError: no plan fits.
        ValueError: an invalid constraint.
    """
    used_sharder = EmbeddingBagCollectionSharder() if sharder is None else sharder
    kernels = runnable_kernels(used_sharder, topology.compute_device)
    specs = {config.name: table_optimizer(used_sharder, name=config.name) for config in tables}
    infos = [
        TableInfo(
            path=path,
            config=config,
            pooled=not isinstance(config, EmbeddingConfig),
            weighted=weighted,
            **trained_by(specs[config.name], config, kernels, topology.compute_device),
        )
        for config in tables
    ]
    return solve(planner_tables(infos, topology, constraints, batch_size), topology, dense_bytes)


def solve(tables: Sequence[Table], topology: Topology, dense_bytes: int = 0) -> PlanResult:
    """Plans checked tables.

    Args:
        dense_bytes: bytes of the rest of the model on every rank.

    Raises:
        NoPlanError: no plan fits.
    """
    reserve_R = reserves(tables, topology, dense_bytes)
    problem, answer = best_solution(tables, topology, reserve_R)
    if not isinstance(answer, Solution):
        raise no_plan_error(problem, answer, dense_bytes)
    plan = build_plan(problem, answer.packing, [table.key for table in tables])
    return PlanResult(
        plan=plan,
        estimate=evaluate(plan, tables, topology, reserve_R),
        bound_s=answer.bound_s,
        tables=tuple(tables),
        topology=topology,
        dense_bytes=dense_bytes,
    )
