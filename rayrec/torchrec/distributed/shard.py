"""Shards a single collection, or all collections of a model, without wrapping it in DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rayrec.distributed.collections.sharder import default_device
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.model_parallel import default_env, default_plan, materialize, replace_module
from rayrec.distributed.plan.module_sharder import ModuleSharder, modules_to_shard
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.plan.shards import ParameterSharding
from rayrec.torchrec.distributed.sharding_plan import (
    apply_to_all,
    construct_module_sharding_plan,
    get_default_sharders,
    get_module_to_default_sharders,
)


def shard(
    module: nn.Module,
    plan: Mapping[str, Any] | Callable[..., Any],
    env: ShardingEnv | None = None,
    device: torch.device | None = None,
    sharder: ModuleSharder[Any] | None = None,
) -> nn.Module:
    """Returns the sharded version of one collection.

    Args:
        module: the collection.
        plan: its plan; or a generator from `sharding_plan` per table, or one generator for all tables.
        env: the ranks; default: the default process group.
        device: device of this rank; default: its GPU, or the CPU.
        sharder: sharder of the collection; default: the one of `get_default_sharders`.

    Raises:
        ValueError: the plan has other tables, or no default sharder exists.
    """
    env, device = env or default_env(), device or default_device()
    sharder = sharder or get_module_to_default_sharders().get(type(module))
    if sharder is None:
        raise ValueError(f"no default sharder for {type(module).__name__}; pass a sharder")
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
    """Shards the collections of a model in place and leaves other modules unchanged.

    Args:
        module: the model, or a collection.
        env, device: see `shard`.
        plan: the plan; by default the planner creates one.
        sharders: one per type of collection.
        init_params: materialize and initialize parameters on meta.

    Returns:
        The model, or the sharded collection.
    """
    env, device = env or default_env(), device or default_device()
    sharders = list(sharders) if sharders is not None else get_default_sharders()
    if plan is None:
        plan = default_plan(module, sharders, env, device)
    for path, collection, sharder in modules_to_shard(module, sharders):
        sharded = sharder.shard(collection, plan.plan[path], env, device)
        if not path:
            return sharded
        replace_module(module, collection, sharded)
    if init_params:
        materialize(module, device)
    return module
