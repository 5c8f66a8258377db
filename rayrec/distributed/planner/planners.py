"""The planner users call: from a model or table configs to a plan, alone or for a whole process group.

Planning is pure: the model, the sharders and the planner are only read.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rayrec.distributed.plan.module_sharder import ModuleSharder, ShardingPlanner
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.planner.bases import Enumerator, Partitioner, PerfModel, Proposer, Stats
from rayrec.distributed.planner.build import build_plan
from rayrec.distributed.planner.by_hand import Callback, Parts, search, to_sharding_plan
from rayrec.distributed.planner.check import check_plan
from rayrec.distributed.planner.enumerators import EmbeddingEnumerator
from rayrec.distributed.planner.estimate import Estimate, evaluate
from rayrec.distributed.planner.refusal import refuse
from rayrec.distributed.planner.search import Solution, best_solution
from rayrec.distributed.planner.storage import reserves
from rayrec.distributed.planner.storage_reservations import StorageReservation
from rayrec.distributed.planner.tables import (
    Found,
    dense_bytes,
    find_tables,
    planner_tables,
    runnable_kernels,
    state_bytes,
    table_optimizer,
)
from rayrec.distributed.planner.topology import Topology
from rayrec.distributed.planner.types import ParameterConstraints, PlanResult, Table
from rayrec.modules.configs import BaseEmbeddingConfig, EmbeddingConfig

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn

DEFAULT_BATCH_SIZE = 512


class EmbeddingPlannerBase(ShardingPlanner):
    """A planner's settings, as a base of one's own.

    Args:
        topology, batch_size, enumerator, constraints, stats, debug, callbacks, timeout_seconds, plan_loader: as of
            `EmbeddingShardingPlanner`.

    Raises:
        ValueError: a batch size below 1, or a plan loader.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        stats: Stats | Sequence[Stats] | None = None,
        debug: bool = True,
        callbacks: Sequence[Callback] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: None = None,
    ) -> None:
        batch_size = DEFAULT_BATCH_SIZE if batch_size is None else batch_size
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        if plan_loader is not None:
            raise ValueError("plan_loader: plans are loaded by ShardingPlan.from_json; leave it out")
        self._topology, self._batch_size = topology, batch_size
        self._constraints = dict(constraints or {})
        self._stats = [stats] if isinstance(stats, Stats) else list(stats or ())
        self._enumerator, self._callbacks = enumerator, tuple(callbacks or ())

    def hash_planner_context_inputs(self) -> int:
        """A number that is the same for the same topology, batch size and constraints."""
        return zlib.crc32(repr((self._topology, self._batch_size, sorted(self._constraints.items()))).encode())


class EmbeddingShardingPlanner(EmbeddingPlannerBase):
    """Finds how to shard every table of a model.

    Args:
        topology: the machine planned for; default: this machine, as many ranks as the process group has (else one).
        batch_size: examples per rank and step.
        storage_reservation: memory to leave free, of `storage_reservations`.
        constraints: what may be done with which table, by table name.
        stats: told of the plan; by default nothing is printed.
        enumerator, proposer, partitioner, performance_model, callbacks: parts of one's own or of the modules of these
            names. With any of them the plan is the best of what they propose (`by_hand.py`); without, the best that
            there is, up to the bound that `result` tells.
        debug, timeout_seconds: taken and not needed: the search is short.
        plan_loader: must be None.

    Raises:
        ValueError: a batch size below 1, or a plan loader.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | Sequence[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | Sequence[Stats] | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: Sequence[Callback] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: None = None,
    ) -> None:
        super().__init__(topology, batch_size, enumerator, constraints, stats, plan_loader=plan_loader)
        self._parts = Parts(
            enumerator=enumerator,
            proposer=proposer,
            partitioner=partitioner,
            performance_model=performance_model,
            callbacks=tuple(callbacks or ()),
        )
        self._reservation = storage_reservation

    def plan(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> ShardingPlan:
        """The plan for `module`.

        Raises:
            NoPlanError: nothing fits; says what is missing and what would fit.
            ValueError: a constraint that cannot be met.
        """
        return self._plan(module, sharders, self._topology or Topology.of_this_machine(1))

    def _plan(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]], topology: Topology) -> ShardingPlan:
        more: dict[str, Any] = {"constraints": self._constraints, "sharders": list(sharders)}
        if self._parts:
            usable = self._usable(topology, module, sharders)
            enumerator = self._parts.enumerator or EmbeddingEnumerator(usable, self._batch_size, self._constraints)
            found = search(self._parts, enumerator, usable, module, sharders)
            plan = to_sharding_plan(found.options, topology)
            counts = {"num_proposals": found.num_proposals, "num_plans": found.num_plans}
            more |= {"best_plan": found.options, "enumerator": enumerator, **counts}
        else:
            plan = self.result(module, sharders, topology).plan
        for stats in self._stats:
            stats.log(plan, topology, self._batch_size, **more)
        return plan

    def _usable(self, topology: Topology, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> Topology:
        """The machine less what is reserved."""
        if self._reservation is None:
            return topology
        return self._reservation.reserve(topology, self._batch_size, module, list(sharders), self._constraints)

    def result(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]], topology: Topology | None = None
    ) -> PlanResult:
        """The plan for `module` with its estimate and the lower bound. Raises as `plan` does."""
        target = self._usable(topology or self._topology or Topology.of_this_machine(1), module, sharders)
        return solve(self._tables(module, sharders, target), target, dense_bytes(module, sharders))

    def estimate(self, plan: ShardingPlan, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> Estimate:
        """What a plan from anywhere costs every rank, without a search for a better one.

        Raises:
            ValueError: the plan names a table or a rank that is not there, or a constraint that cannot be met.
        """
        target = self._topology or Topology.of_this_machine(plan.min_world_size)
        return evaluate(plan, self._tables(module, sharders, target), target)

    def _tables(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]], topology: Topology
    ) -> tuple[Table, ...]:
        found = find_tables(module, sharders, topology.compute_device)
        return planner_tables(found, topology, self._constraints, self._batch_size)

    def judge(self, plan: ShardingPlan, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> PlanResult:
        """A plan from elsewhere (loaded, edited) with its estimate, and the lower bound for `module`.

        Raises:
            NoPlanError: a rank's memory is too small for it.
            ValueError: it does not cover every table exactly once, or names ranks or kernels that are not there.
        """
        own = self.result(module, sharders)
        estimate = check_plan(plan, own.tables, own.topology, own.dense_bytes)
        return replace(own, plan=plan, estimate=estimate)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Rank 0's plan, on every rank of `pg` (default: all ranks). An error of rank 0 is raised on every rank.

        Raises:
            NoPlanError, ValueError: as `plan` does, and a topology whose world is not the group's.
        """
        import torch.distributed as dist

        from rayrec.distributed.comm import broadcast_object

        if sharders is None:
            from rayrec.distributed.model_parallel import default_sharders

            sharders = default_sharders()
        group = pg if pg is not None else dist.group.WORLD
        assert group is not None, "no process group is initialized"
        answer: ShardingPlan | Exception | None = None
        if group.rank() == 0:
            try:
                answer = self._plan_for(group.size(), module, sharders)
            except Exception as error:  # any error must reach the ranks that wait for the plan
                answer = error
        answer = broadcast_object(answer, group)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, ShardingPlan)
        return answer

    def _plan_for(self, world_size: int, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> ShardingPlan:
        topology = self._topology or Topology.of_this_machine(world_size)
        if topology.world_size != world_size:
            raise ValueError(f"the topology has {topology.world_size} ranks, but the process group has {world_size}")
        return self._plan(module, sharders, topology)


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
    """Plan tables without a model around them.

    Args:
        tables: configs of one collection; `EmbeddingConfig`s come back one vector an id, others pooled.
        topology: the machine planned for.
        constraints: by table name.
        batch_size: examples per rank and step.
        dense_bytes: bytes that the rest of the model takes on every rank.
        sharder: says what can run and which optimizer is fused; default: the sharder of bag collections.
        weighted: whether ids carry weights.
        path: where in the model the collection will be.

    Raises:
        NoPlanError: nothing fits; says what is missing and what would fit.
        ValueError: a constraint that cannot be met.
    """
    if sharder is None:
        from rayrec.distributed.collections.embedding_bag import EmbeddingBagCollectionSharder

        sharder = EmbeddingBagCollectionSharder()
    kernels = runnable_kernels(sharder, topology.compute_device)
    state = state_bytes(table_optimizer(sharder))
    found = [
        Found(
            path=path,
            config=config,
            pooled=not isinstance(config, EmbeddingConfig),
            weighted=weighted,
            kernels=kernels,
            state=state,
        )
        for config in tables
    ]
    return solve(planner_tables(found, topology, constraints, batch_size), topology, dense_bytes)


def solve(tables: Sequence[Table], topology: Topology, dense: int = 0) -> PlanResult:
    """Plan tables that are checked already.

    Args:
        dense: bytes that the rest of the model takes on every rank.

    Raises:
        NoPlanError: nothing fits.
    """
    reserve_R = reserves(tables, topology, dense)
    problem, answer = best_solution(tables, topology, reserve_R)
    if not isinstance(answer, Solution):
        raise refuse(problem, answer, dense)
    plan = build_plan(problem, answer.packing, [table.key for table in tables])
    return PlanResult(
        plan=plan,
        estimate=evaluate(plan, tables, topology, reserve_R),
        bound_s=answer.bound_s,
        tables=tuple(tables),
        topology=topology,
        dense_bytes=dense,
    )
