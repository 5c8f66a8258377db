"""TorchRec's search with exchangeable components: enumerate, propose, partition, rate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rayrec.distributed.plan.module_sharder import ModuleSharder
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.plan.shards import Shard as Rectangle
from rayrec.distributed.plan.shards import Span
from rayrec.torchrec.distributed.parameter_sharding import EmbeddingModuleShardingPlan, ParameterSharding
from rayrec.torchrec.distributed.planner.bases import Enumerator, Partitioner, PerfModel, Proposer
from rayrec.torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from rayrec.torchrec.distributed.planner.parts import PlannerError, PlannerErrorType, Proposal, Shard, ShardingOption
from rayrec.torchrec.distributed.planner.perf_models import NoopPerfModel
from rayrec.torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from rayrec.torchrec.distributed.planner.topology import Topology

Callback = Callable[[Proposal], Proposal]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Components of a planner; None: TorchRec's default.

    Args:
        callbacks: functions applied to the best options, in order.
    """

    enumerator: Enumerator | None = None
    proposer: Proposer | Sequence[Proposer] | None = None
    partitioner: Partitioner | None = None
    performance_model: PerfModel | None = None
    callbacks: Sequence[Callback] = field(default=())

    def __bool__(self) -> bool:
        return any((self.enumerator, self.proposer, self.partitioner, self.performance_model, self.callbacks))


@dataclass(frozen=True)
class Best:
    """The best options, and the numbers of proposals and of plans that fit."""

    options: Proposal
    num_proposals: int
    num_plans: int


def search(
    parts: Parts, enumerator: Enumerator, topology: Topology, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> Best:
    """Return the best proposal.

    Raises:
        PlannerError: no proposal fits.
    """
    space = enumerator.enumerate(module, list(sharders))
    proposers: Iterable[Proposer]
    match parts.proposer:
        case None:
            proposers = (GridSearchProposer(), GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer())
        case Proposer() as proposer:
            proposers = [proposer]
        case several:
            proposers = several
    partitioner = parts.partitioner or GreedyPerfPartitioner()
    rating = parts.performance_model or NoopPerfModel(topology)
    best: tuple[float, Proposal] | None = None
    tried = fitted = 0
    for proposer in proposers:
        proposer.load(space, enumerator)
        while (proposal := proposer.propose()) is not None:
            tried += 1
            try:
                plan = partitioner.partition([_fresh(option) for option in proposal], topology)
            except PlannerError:
                proposer.feedback(False, proposal, None, topology)
                continue
            fitted += 1
            rate = rating.rate(plan)
            proposer.feedback(True, plan, rate, topology)
            if best is None or rate < best[0]:
                best = (rate, plan)
    if best is None:
        raise PlannerError(
            f"none of {tried} proposals for {topology.world_size} ranks fits; plan with rayrec's planner, without "
            "components of your own, for a detailed error",
            PlannerErrorType.STRICT_CONSTRAINTS,
        )
    options = best[1]
    for callback in parts.callbacks:
        options = callback(options)
    return Best(options, tried, fitted)


def _fresh(option: ShardingOption) -> ShardingOption:
    """Return a copy without ranks."""
    fresh = copy.copy(option)
    fresh.shards = [Shard(shard.size, shard.offset, shard.storage, shard.perf) for shard in option.shards]
    return fresh


def to_sharding_plan(sharding_options: Proposal, topology: Topology) -> ShardingPlan:
    """Return the plan of options with ranks."""
    plan: dict[str, Any] = {}
    local = topology.local_world_size
    for option in sharding_options:
        rectangles = []
        for shard in option.shards:
            (row, col), (rows, cols) = shard.offset, shard.size
            assert shard.rank is not None, f"{option.fqn}: a shard has no rank; call the partitioner first"
            cut = {"rows": Span(row, row + rows), "cols": Span(col, col + cols)}
            rectangles.append(Rectangle(table=option.name, rank=shard.rank, **cut))
        on_gpu = topology.compute_device != "cpu"
        plan.setdefault(option.path, EmbeddingModuleShardingPlan())[option.name] = ParameterSharding(
            option.sharding_type,
            option.compute_kernel,
            cache_params=option.cache_params,
            shards=tuple(rectangles),
            device=topology.compute_device,
            local_ranks={r.rank: r.rank % local for r in rectangles if on_gpu and r.rank >= local},
        )
    return ShardingPlan(plan)
