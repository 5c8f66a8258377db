"""`torchrec.distributed.model_parallel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rayrec.distributed import dmp_collection, model_parallel
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.plan.module_sharder import ModuleSharder
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.replicas.averaging import AllReduce
from rayrec.torchrec.distributed.data_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from rayrec.torchrec.distributed.module_sharder import get_default_sharders
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = [
    "DMPCollection",
    "DataParallelWrapper",
    "DefaultDataParallelWrapper",
    "DistributedModelParallel",
    "get_default_sharders",
    "get_module",
    "get_unwrapped_module",
]


class DistributedModelParallel(model_parallel.DistributedModelParallel):
    """`rayrec.distributed.DistributedModelParallel` with TorchRec's arguments.

    Args:
        module, env, device, plan, sharders, init_data_parallel, init_parameters: see rayrec's class.
        data_parallel_wrapper: DistributedDataParallel by default.
        model_tracker_configs: not supported; must be None.

    Raises:
        ValueError: see rayrec's class; or `model_tracker_configs`.
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        plan: ShardingPlan | None = None,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        model_tracker_configs: None = None,
    ) -> None:
        if model_tracker_configs is not None:
            raise ValueError("model_tracker_configs is not supported: a checkpoint holds every row; leave it out")
        sharders = get_default_sharders() if sharders is None else sharders
        super().__init__(module, env, device, plan, sharders, False, init_parameters)
        self._wrapper = data_parallel_wrapper
        if init_data_parallel:
            self.init_data_parallel()

    def init_data_parallel(self) -> None:
        """Wraps the module for data-parallel training; does nothing if it is wrapped already."""
        if self._wrapper is None:
            super().init_data_parallel()
        elif not isinstance(self._dmp_wrapped_module, DistributedDataParallel):
            self._wrapper.wrap(self, self._env.whole, self.device)

    def bare_named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Returns `named_parameters`; both have the names of the unsharded model."""
        return self.named_parameters(prefix, recurse)

    def sparse_grad_parameter_names(self, destination: list[str] | None = None, prefix: str = "") -> list[str]:
        """Returns the names of unsharded embeddings with sparse gradients, appended to `destination` if not None."""
        names = [] if destination is None else destination
        for path, module in self.module.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                names.append(f"{prefix}{path}.weight" if path else f"{prefix}weight")
        return names


class ShardingStrategy(Enum):
    """Number of ranks over which a table is sharded."""

    DEFAULT = "default"
    PER_MODULE = "per_module"
    FULLY_SHARDED = "fully_sharded"


class DMPCollection(dmp_collection.DMPCollection, DistributedModelParallel):
    """`rayrec.distributed.dmp_collection.DMPCollection` with TorchRec's arguments.

    Args:
        module, device, plan, world_size, sharding_group_size, global_pg, node_group_size, sharders: see rayrec's class.
        sharding_strategy: DEFAULT, or its alias PER_MODULE.
        init_data_parallel, init_parameters, data_parallel_wrapper: see `DistributedModelParallel`.
        use_inter_host_allreduce, sync_every: see rayrec's class.
        custom_all_reduce: function that averages tensors over replicas in place, instead of an all-reduce.
        submodule_configs, rs_awaitable_hook_module, use_sharded_relay: not supported; leave them out.

    Raises:
        ValueError: see rayrec's class; or an option that is not supported.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        plan: ShardingPlan | None,
        world_size: int,
        sharding_group_size: int,
        global_pg: dist.ProcessGroup,
        sharding_strategy: ShardingStrategy = ShardingStrategy.DEFAULT,
        node_group_size: int | None = None,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        use_inter_host_allreduce: bool = False,
        custom_all_reduce: AllReduce | None = None,
        submodule_configs: Sequence[object] | None = None,
        rs_awaitable_hook_module: str | None = None,
        use_sharded_relay: bool = False,
        *,
        sync_every: int | None = None,
    ) -> None:
        _refuse(sharding_strategy, submodule_configs, rs_awaitable_hook_module, use_sharded_relay)
        super().__init__(
            module,
            device,
            plan,
            world_size,
            sharding_group_size,
            global_pg,
            node_group_size=node_group_size,
            sharders=sharders,
            init_data_parallel=False,
            init_parameters=init_parameters,
            use_inter_host_allreduce=use_inter_host_allreduce,
            sync_every=sync_every,
        )
        self._wrapper, self._all_reduce = data_parallel_wrapper, custom_all_reduce
        if init_data_parallel:
            self.init_data_parallel()

    def set_all_reduce_hook(self, reduce_hook: Callable[[list[torch.Tensor]], None]) -> None:
        """Sets the function that averages tensors over replicas in place; `sync` uses it instead of an all-reduce."""
        self._all_reduce = reduce_hook


def _refuse(
    strategy: ShardingStrategy, submodule_configs: Sequence[object] | None, hook_module: str | None, relay: bool
) -> None:
    if strategy is ShardingStrategy.FULLY_SHARDED:
        raise ValueError(
            "sharding_strategy=FULLY_SHARDED is not supported: if the replicas of a table do not fit, raise "
            "sharding_group_size, which shards it over more ranks"
        )
    options = {
        "submodule_configs": submodule_configs,
        "rs_awaitable_hook_module": hook_module,
        "use_sharded_relay": relay or None,
    }
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"DMPCollection: {name} is not supported, as all collections have the same group size; leave it out"
            )


def get_module(module: nn.Module) -> nn.Module:
    """Returns the module inside DistributedModelParallel, with its data-parallel wrapper."""
    while isinstance(module, model_parallel.DistributedModelParallel):
        module = module.data_parallel
    return module


def get_unwrapped_module(module: nn.Module) -> nn.Module:
    """Returns the module inside DistributedModelParallel, DistributedDataParallel and FullyShardedDataParallel."""
    while True:
        inner = get_module(module)
        if isinstance(inner, DistributedDataParallel):
            inner = inner.module
        elif type(inner).__name__ == "FullyShardedDataParallel":
            inner = inner._fsdp_wrapped_module  # type: ignore[assignment]
        if inner is module:
            return module
        module = inner
