"""DistributedDataParallel around a model whose tables are sharded."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rayrec.distributed.collections.sharded_table import ShardedTable
from rayrec.distributed.comm import mean_of_gradients
from rayrec.distributed.comm.env import ShardingEnv

# buffers are not trained; broadcasting them would be one more collective per step. torch 2.13 renamed the setting
_SETTINGS = inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {
    ("forward_sync_buffers" if "forward_sync_buffers" in _SETTINGS else "broadcast_buffers"): False
}


class ShardedModel(Protocol):
    """The part of DistributedModelParallel that a wrapper reads and sets."""

    _dmp_wrapped_module: nn.Module


class DataParallelWrapper(ABC):
    """Wraps a model whose collections are sharded, so that gradients of its other parameters are averaged."""

    @abstractmethod
    def wrap(self, dmp: ShardedModel, env: ShardingEnv, device: torch.device) -> None:
        """Replaces `dmp._dmp_wrapped_module` by its wrapper, unless there is nothing to exchange."""


class DefaultDataParallelWrapper(DataParallelWrapper):
    """DistributedDataParallel, for all parameters but the tables.

    Args:
        bucket_cap_mb: size of a gradient bucket in MiB.
        static_graph: the same parameters are used in every step.
        find_unused_parameters: finds in every step those that are not used.
        allreduce_comm_precision: "fp16" or "bf16" sends gradients in this format; "bf16" needs NCCL.
        params_to_ignore: names of parameters whose gradients are not averaged.
        ddp_kwargs: further arguments of DistributedDataParallel.

    Raises:
        ValueError: another precision; "bf16" on CPUs, when the model is wrapped.
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

    def wrap(self, dmp: ShardedModel, env: ShardingEnv, device: torch.device) -> None:
        inner = dmp._dmp_wrapped_module
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
    """Names of the tables' parameters, whose gradients the tables exchange themselves."""
    return [
        f"{path}.{name}" if path else name
        for path, sub in module.named_modules()
        if isinstance(sub, ShardedTable)
        for name, _ in sub.named_parameters()
    ]
