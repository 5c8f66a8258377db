"""Chooses the number of sharding groups and their plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from rayrec.data.order.epoch import dealt
from rayrec.distributed.plan.module_sharder import ModuleSharder
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.planner import EmbeddingShardingPlanner, Topology
from rayrec.distributed.planner.cost.estimate import Estimate
from rayrec.distributed.planner.sharding_groups import Grouped, choose_groups, group_topology, grouped
from rayrec.distributed.replicas import GroupLayout
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.setup import build
from rayrec.train.setup.dynamic_ids import map_bytes


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The sharding that all ranks use.

    Args:
        layout: the sharding groups.
        plan: the plan of every group; ranks are numbered within a group.
        estimate: predicted cost of the plan on each rank of a group.
        sync_s: predicted seconds per step for synchronization between groups.
        sync_bytes: bytes that a rank sends for one synchronization.
    """

    layout: GroupLayout
    plan: ShardingPlan
    estimate: Estimate
    sync_s: float = 0.0
    sync_bytes: float = 0.0

    def plan_entry(self, sync_every: int) -> dict[str, Any]:
        """The entry `replicas` of `plan.json`; empty for a single group."""
        if self.layout.replicas == 1:
            return {}
        facts = {"sync_every": sync_every, "sync_s": self.sync_s, "sync_bytes": self.sync_bytes}
        return {"replicas": {"groups": self.layout.replicas, "workers": self.layout.group_size, **facts}}


def decide(config: TrainConfig, topology: Topology, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> Decision:
    """Groups and plan for a topology; uses `sharding.plan` if set.

    Raises:
        NoPlanError: no plan fits in memory.
        ValueError: the given plan or number of groups does not match the number of workers.
    """
    if config.sharding.plan is not None:
        layout = layout_of(config, topology.world_size, build.given_plan(config, topology.world_size))
        plan = build.given_plan(config, layout.group_size, layout.replicas)
        assert plan is not None
        if layout.replicas == 1:
            planner = _planner(config, topology, topology.world_size)
            return Decision(layout=layout, plan=plan, estimate=planner.estimate(plan, module, sharders))
        groups = plan_groups(config, topology, module, sharders, plan)
    else:
        groups = plan_groups(config, topology, module, sharders)
    return Decision(
        layout=groups.layout,
        plan=groups.result.plan,
        estimate=groups.result.estimate,
        sync_s=groups.sync_s,
        sync_bytes=groups.sync_bytes,
    )


def plan_groups(
    config: TrainConfig,
    topology: Topology,
    module: nn.Module,
    sharders: list[ModuleSharder[Any]],
    plan: ShardingPlan | None = None,
) -> Grouped:
    """Plan one group, for `sharding.replicas` groups; with "auto", for the number of groups with the shortest step.

    Args:
        plan: a plan to estimate; default: search for one.

    Raises:
        NoPlanError: no plan fits in memory.
        ValueError: the number of groups does not divide the workers, or the plan is for another model.
    """
    every, world = config.sharding.sync_every, topology.world_size
    if config.sharding.replicas == "auto" and plan is None:
        return choose_groups(lambda group: _planner(config, group, world).result(module, sharders), topology, every)
    layout = layout_of(config, world, plan)
    planner = _planner(config, group_topology(topology, layout), world)
    result = planner.result(module, sharders) if plan is None else planner.judge(plan, module, sharders)
    return grouped(result, layout, topology, every)


def _planner(config: TrainConfig, topology: Topology, world_size: int) -> EmbeddingShardingPlanner:
    batch = dealt(config.trainer.batch_size, 0, world_size)
    if topology.compute_device == "cpu":  # tables and the maps of dynamic ids share the memory of the host
        topology = topology.less(map_bytes(config) // world_size)
    return EmbeddingShardingPlanner(topology=topology, batch_size=batch, constraints=build.constraints(config))


def layout_of(config: TrainConfig, world_size: int, plan: ShardingPlan | None = None) -> GroupLayout:
    """The groups that the config requests. An elastic run uses fewer if the number does not divide its workers.

    With `replicas: auto`, groups are as small as `plan` allows; without a plan, there is one.

    Raises:
        ValueError: the number of groups does not divide the world size.
    """
    replicas = config.sharding.replicas
    if replicas == "auto":
        size = world_size if plan is None else plan.min_world_size
        return GroupLayout(world_size, next(s for s in range(size, world_size + 1) if world_size % s == 0))
    if config.trainer.elastic:
        return GroupLayout.of_replicas(world_size, max(n for n in range(1, replicas + 1) if world_size % n == 0))
    return GroupLayout.of_replicas(world_size, replicas)
