"""Wrappers of a sharded model for data-parallel training, with TorchRec's arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.data_parallel import data_parallel
from rayrec.distributed.model_parallel import DistributedModelParallel

_HOOKS = {None: None, "fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


class DataParallelWrapper(ABC):
    """Interface of wrappers that average the gradients of the parameters that are not sharded."""

    @abstractmethod
    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Wraps `dmp._dmp_wrapped_module` in place, unless it has no gradients to average."""


class DefaultDataParallelWrapper(DataParallelWrapper):
    """Wraps the model in DistributedDataParallel for all parameters except the tables.

    Args:
        bucket_cap_mb: size of a gradient bucket in MiB.
        static_graph: every step uses the same parameters.
        find_unused_parameters: search for unused parameters in every step.
        allreduce_comm_precision: "fp16" or "bf16" sends gradients in this format; "bf16" needs NCCL.
        params_to_ignore: names of parameters with gradients that are not averaged.
        ddp_kwargs: other arguments of DistributedDataParallel.

    Raises:
        ValueError: an unknown precision; `wrap` raises it for "bf16" on several CPU ranks.
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
        if allreduce_comm_precision not in _HOOKS:
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
        if self._precision == "bf16" and device.type == "cpu" and env.world_size > 1:
            raise ValueError("allreduce_comm_precision='bf16' needs GPUs; on CPUs use 'fp16', or None for float32")
        dmp._dmp_wrapped_module = data_parallel(
            dmp._dmp_wrapped_module, env, device, self._ignored, _HOOKS[self._precision], **self._settings
        )
