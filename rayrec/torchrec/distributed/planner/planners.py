"""TorchRec's planners. They call rayrec's planner, or search with the components that you pass."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rayrec.distributed.plan.module_sharder import ModuleSharder
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.planner import planner
from rayrec.distributed.planner.report.result import NoPlanError
from rayrec.torchrec.distributed.module_sharder import ShardingPlanner, get_default_sharders
from rayrec.torchrec.distributed.planner.bases import (
    Enumerator,
    Partitioner,
    PerfModel,
    Proposer,
    Stats,
    StorageReservation,
)
from rayrec.torchrec.distributed.planner.constraints import ParameterConstraints, with_rounding
from rayrec.torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from rayrec.torchrec.distributed.planner.parts import PlannerError, PlannerErrorType
from rayrec.torchrec.distributed.planner.propose_and_partition import Callback, Parts, search, to_sharding_plan
from rayrec.torchrec.distributed.planner.topology import Topology
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn

__all__ = ["EmbeddingPlannerBase", "EmbeddingShardingPlanner", "to_sharding_plan"]


class EmbeddingPlannerBase(ShardingPlanner):
    """Base class for planners: settings and `collective_plan`.

    Args:
        topology, batch_size, enumerator, constraints, stats, callbacks: see `EmbeddingShardingPlanner`.
        debug, timeout_seconds: ignored.
        plan_loader: not supported; must be None.

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
        batch_size = planner.DEFAULT_BATCH_SIZE if batch_size is None else batch_size
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        if plan_loader is not None:
            raise ValueError("plan_loader is not supported; load a plan with ShardingPlan.from_json")
        self._topology, self._batch_size = topology, batch_size
        self._constraints = dict(constraints or {})
        self._stats = [stats] if isinstance(stats, Stats) else list(stats or ())
        self._enumerator, self._callbacks = enumerator, tuple(callbacks or ())

    @abstractmethod
    def plan(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> ShardingPlan:
        """Return the plan for `module`."""

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plan on rank 0 of `pg` (default: all ranks) and return the plan on every rank. Raises what `plan` raises."""
        sharder_list = get_default_sharders() if sharders is None else list(sharders)

        def plan(world_size: int) -> ShardingPlan:
            topology = self._topology or Topology.of_this_machine(world_size)
            planner.topology_for(topology, world_size)
            return self._plan(module, sharder_list, topology)

        return planner.plan_on_rank_0(plan, pg)

    def _plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]], topology: Topology) -> ShardingPlan:
        return self.plan(module, sharders)

    def hash_planner_context_inputs(self) -> int:
        """Return a hash of topology, batch size and constraints."""
        return zlib.crc32(repr((self._topology, self._batch_size, sorted(self._constraints.items()))).encode())


class EmbeddingShardingPlanner(EmbeddingPlannerBase):
    """TorchRec's planner.

    By default it returns the plan of `rayrec.distributed.planner`. If you pass an enumerator, proposer, partitioner,
    performance_model or callbacks, it returns the best proposal of these components (`propose_and_partition.py`).

    Args:
        topology: the cluster; default: this machine, with the ranks of the process group (or one).
        batch_size: examples per rank and step.
        enumerator, proposer, partitioner, performance_model, callbacks: components; defaults as in TorchRec.
        storage_reservation: memory to leave free.
        stats: reports that receive the plan; default: none.
        constraints: constraints by table name.
        debug, timeout_seconds: ignored.
        plan_loader: not supported; must be None.

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
        """Return the plan for `module`.

        Raises:
            PlannerError: no plan fits.
            ValueError: an invalid constraint.
        """
        return self._plan(module, list(sharders), self._topology or Topology.of_this_machine(1))

    def _plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]], topology: Topology) -> ShardingPlan:
        usable = topology
        if self._reservation is not None:
            usable = self._reservation.reserve(topology, self._batch_size, module, sharders, self._constraints)
        facts: dict[str, Any] = {"constraints": self._constraints, "sharders": sharders}
        if self._parts:
            enumerator = self._parts.enumerator or EmbeddingEnumerator(usable, self._batch_size, self._constraints)
            result = search(self._parts, enumerator, usable, module, sharders)
            plan = to_sharding_plan(result.options, topology)
            counts = {"num_proposals": result.num_proposals, "num_plans": result.num_plans}
            facts |= {"best_plan": result.options, "enumerator": enumerator, **counts}
        else:
            try:
                plan = planner.EmbeddingShardingPlanner(usable, self._batch_size, self._constraints).plan(
                    module, sharders
                )
            except NoPlanError as error:
                raise PlannerError(str(error), PlannerErrorType.INSUFFICIENT_STORAGE) from error
        plan = with_rounding(plan, self._constraints)
        for stats in self._stats:
            stats.log(plan, topology, self._batch_size, **facts)
        return plan
