"""What is left of a model when its tables are sharded, in DistributedDataParallel; modules without their wrappers."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rayrec.distributed.collections.sharded_table import ShardedTable
from rayrec.distributed.comm import mean_of_gradients
from rayrec.distributed.comm.env import ShardingEnv

if TYPE_CHECKING:
    from rayrec.distributed.model_parallel import DistributedModelParallel

# buffers are not trained here; sending them every step would be one more collective. torch 2.13 renames the setting
_SETTINGS = inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {
    ("forward_sync_buffers" if "forward_sync_buffers" in _SETTINGS else "broadcast_buffers"): False
}


class DataParallelWrapper(ABC):
    """Puts what is left of a sharded model in a data-parallel wrapper."""

    @abstractmethod
    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Sets `dmp._dmp_wrapped_module`; leaves it where there is nothing to exchange."""


class DefaultDataParallelWrapper(DataParallelWrapper):
    """DistributedDataParallel around all parameters that are not tables'.

    Args:
        bucket_cap_mb: gradients are exchanged in messages of about this size, in MiB.
        static_graph: the same parameters take part in every step.
        find_unused_parameters: looks in every step which ones do.
        allreduce_comm_precision: "fp16" or "bf16" sends gradients in this format; "bf16" by NCCL only.
        params_to_ignore: names of parameters that are not exchanged.
        ddp_kwargs: further arguments of DistributedDataParallel.

    Raises:
        ValueError: another precision; when it wraps a model on CPUs, "bf16".
    """

    def __init__(
        self,
        bucket_cap_mb: int = 25,
        static_graph: bool = True,
        find_unused_parameters: bool = False,
        allreduce_comm_precision: str | None = None,
        params_to_ignore: Sequence[str] | None = None,
        ddp_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if allreduce_comm_precision not in (None, "fp16", "bf16"):
            raise ValueError(f"allreduce_comm_precision={allreduce_comm_precision!r} must be 'fp16', 'bf16' or None")
        self._precision = allreduce_comm_precision
        self._ignored = list(params_to_ignore or ())
        self._settings: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters,
            **(ddp_kwargs or {}),
        }

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        inner = dmp.data_parallel
        if isinstance(inner, DistributedDataParallel) or env.world_size == 1:
            return
        ignored = [*table_parameters(inner), *self._ignored]
        if not any(param.requires_grad and name not in ignored for name, param in inner.named_parameters()):
            return
        if self._precision == "bf16" and device.type == "cpu":
            raise ValueError("allreduce_comm_precision='bf16' needs GPUs: between CPUs fp16 is sent, or None: fp32")
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ignored)
        wrapped = DistributedDataParallel(
            inner,
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=env.process_group,
            gradient_as_bucket_view=True,
            **(_NO_BUFFER_SYNC | self._settings),
        )
        if self._precision is not None:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            hook = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[self._precision]
            wrapped.register_comm_hook(None, hook)
        elif (mean := mean_of_gradients(env.process_group, device)) is not None:
            wrapped.register_comm_hook(None, mean)
        dmp._dmp_wrapped_module = wrapped


def table_parameters(module: nn.Module) -> list[str]:
    """Names of the tables' parameters, whose gradients meet by the tables' own exchange."""
    return [
        f"{path}.{name}" if path else name
        for path, sub in module.named_modules()
        if isinstance(sub, ShardedTable)
        for name, _ in sub.named_parameters()
    ]


def get_module(module: nn.Module) -> nn.Module:
    """What DistributedModelParallel holds; a data-parallel wrapper around it stays."""
    from rayrec.distributed.model_parallel import DistributedModelParallel

    while isinstance(module, DistributedModelParallel):
        module = module.data_parallel
    return module


def get_unwrapped_module(module: nn.Module) -> nn.Module:
    """The module inside DistributedModelParallel, DistributedDataParallel and FullyShardedDataParallel."""
    while True:
        inner = get_module(module)
        if isinstance(inner, DistributedDataParallel):
            inner = inner.module
        elif type(inner).__name__ == "FullyShardedDataParallel":
            inner = inner._fsdp_wrapped_module  # type: ignore[assignment]
        if inner is module:
            return module
        module = inner
