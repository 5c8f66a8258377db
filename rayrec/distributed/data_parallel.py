"""Wraps a model with sharded tables in DistributedDataParallel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rayrec.distributed.collections.sharded_table import ShardedTable
from rayrec.distributed.comm.collectives import mean_of_gradients
from rayrec.distributed.comm.env import ShardingEnv

# Buffers are not trained; broadcasting them would be one more collective per step. torch 2.13 renamed the setting.
# Without a bucket size torch starts with a small bucket, which is one more all-reduce per step.
_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
_SETTINGS: dict[str, Any] = {
    ("forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"): False,
    "bucket_cap_mb": 25,
}


def data_parallel(
    module: nn.Module,
    env: ShardingEnv,
    device: torch.device,
    ignored: Sequence[str] = (),
    hook: Callable[..., Any] | None = None,
    **settings: Any,
) -> nn.Module:
    """Wraps the module in DistributedDataParallel, for all parameters except the tables. Returns the module itself if
    it is wrapped already or has nothing to exchange.

    Args:
        module: a module with sharded collections.
        env, device: environment and device of this rank.
        ignored: names of further parameters whose gradients are not averaged.
        hook: a communication hook that averages gradients; by default the fastest for this device.
        settings: further arguments of DistributedDataParallel.
    """
    if isinstance(module, DistributedDataParallel) or env.world_size == 1:
        return module
    excluded = [*table_parameters(module), *ignored]
    if not any(param.requires_grad and name not in excluded for name, param in module.named_parameters()):
        return module
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, excluded)
    wrapped = DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=env.process_group,
        gradient_as_bucket_view=True,
        **(_SETTINGS | settings),
    )
    if (hook := hook or mean_of_gradients(env.process_group, device)) is not None:
        wrapped.register_comm_hook(None, hook)
    return wrapped


def table_parameters(module: nn.Module) -> list[str]:
    """Names of the tables' parameters; the tables exchange their gradients themselves."""
    return [
        f"{path}.{name}" if path else name
        for path, sub in module.named_modules()
        if isinstance(sub, ShardedTable)
        for name, _ in sub.named_parameters()
    ]
