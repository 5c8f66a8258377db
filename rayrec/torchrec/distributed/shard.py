"""Shards single collections, or those of a model, without DistributedDataParallel for the other parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rayrec.distributed.collections.embedding import default_sharders
from rayrec.distributed.collections.sharder import default_device
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.model_parallel import default_env, materialize, replace_module
from rayrec.distributed.plan.module_sharder import ModuleSharder, modules_to_shard
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.plan.shards import ParameterSharding
from rayrec.torchrec.distributed.sharding_plan import (
    apply_to_all,
    construct_module_sharding_plan,
    get_module_to_default_sharders,
)


def shard(
    module: nn.Module,
    plan: Mapping[str, Any] | Callable[..., Any],
    env: ShardingEnv | None = None,
    device: torch.device | None = None,
    sharder: ModuleSharder[Any] | None = None,
) -> nn.Module:
    """The sharded version of one collection.

    Args:
        module: the collection.
        plan: of the collection; or a generator of `sharding_plan` for each table by name, or one for all.
        env: the ranks; the default process group if not given.
        device: of this rank; its GPU or the CPU if not given.
        sharder: of the collection; its default one if not given.

    Raises:
        ValueError: a plan for other tables, or no sharder.
    """
    env, device = env or default_env(), device or default_device()
    sharder = sharder or get_module_to_default_sharders().get(type(module))
    if sharder is None:
        raise ValueError(f"there is no sharder of {type(module).__name__}; give one")
    tables: dict[str, Any] = apply_to_all(module, plan, sharder) if callable(plan) else dict(plan)
    if not all(isinstance(sharding, ParameterSharding) for sharding in tables.values()):
        world, local = env.world_size, env.local_world_size
        tables = dict(construct_module_sharding_plan(module, tables, sharder, local, world, device.type))
    return sharder.shard(module, tables, env, device)


def shard_modules(
    module: nn.Module,
    env: ShardingEnv | None = None,
    device: torch.device | None = None,
    plan: ShardingPlan | None = None,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
    init_params: bool = False,
) -> nn.Module:
    """Shards the collections inside a model in place; the rest is left as it is.

    Args:
        module: the model, or a collection.
        env, device: as of `shard`.
        plan: by default the planner decides for this world.
        sharders: one for each kind of collection.
        init_params: allocates and fills what is on meta.

    Returns:
        The model, or the sharded collection.
    """
    from rayrec.distributed.planner import EmbeddingShardingPlanner, Topology

    env, device = env or default_env(), device or default_device()
    chosen = list(sharders) if sharders is not None else default_sharders()
    if plan is None:
        planner = EmbeddingShardingPlanner(topology=Topology(env.world_size, device.type))
        group = env.process_group
        plan = planner.plan(module, chosen) if group is None else planner.collective_plan(module, chosen, group)
    for path, collection, sharder in modules_to_shard(module, chosen):
        twin = sharder.shard(collection, plan.plan[path], env, device)
        if not path:
            return twin
        replace_module(module, collection, twin)
    if init_params:
        materialize(module, device)
    return module
