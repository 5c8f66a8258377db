"""DistributedModelParallel: shards tables; other parameters are data-parallel."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rayrec.distributed.collections.embedding import default_sharders
from rayrec.distributed.collections.sharded_collection import ShardedCollection
from rayrec.distributed.collections.sharded_table import ShardedTable
from rayrec.distributed.collections.sharder import default_device
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.comm.hosts import ranks_per_host
from rayrec.distributed.comm.objects import all_gather_object
from rayrec.distributed.data_parallel import data_parallel
from rayrec.distributed.kernel.factory import track_changes
from rayrec.distributed.kernel.interface import Kernel
from rayrec.distributed.plan.module_sharder import ModuleSharder, modules_to_shard
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.planner.machine.topology import Topology
from rayrec.distributed.planner.planner import EmbeddingShardingPlanner
from rayrec.optim import CombinedOptimizer, in_backward_optimizer_filter


class DistributedModelParallel(nn.Module):
    """Shards every embedding collection inside a module, and wraps the module in DistributedDataParallel.

    Parameters and state have the names of the unsharded module. A change of the dtype, such as
    `model.to(torch.bfloat16)`, applies to the other parameters only: tables keep the data type of their config. A
    change of the device raises: set `device` instead.

    Args:
        module: any module that contains collections; it is modified in place. A collection that occurs several times
            is sharded once. After sharding, `on_sharded(process_group)` is called on every submodule with that method.
        env: process group and hosts; by default the default process group, or this process alone.
        device: device of this rank; by default its GPU, or the CPU.
        plan: shards of every table; by default the planner's plan for these hosts, with the memory of this one.
        sharders: one for each kind of collection.
        init_data_parallel: wraps the module now; else call `init_data_parallel()`.
        init_parameters: allocates and initializes parameters on meta, and moves the others to the device.

    Raises:
        ValueError: a plan for another model or a larger world; a subclass of a collection that overrides `forward`
            and has no sharder; a table whose weight is also another table's or layer's.
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
    ) -> None:
        super().__init__()
        self._env = env or default_env()
        self.device = device or default_device()
        sharders = list(sharders) if sharders is not None else default_sharders()
        self._plan = plan if plan is not None else self._default_plan(module, sharders)
        min_ranks, num_ranks = self._plan.min_world_size, self._env.world_size
        if min_ranks > num_ranks:
            raise ValueError(f"the plan is for {min_ranks} ranks or more, but there are {num_ranks}; plan again")
        self._sharded: dict[str, Any] = {}
        inner = self._shard(module, sharders)
        self._fused_optimizer = CombinedOptimizer(
            [(path, sharded.fused_optimizer) for path, sharded in self._sharded.items()]
        )
        if init_parameters:
            materialize(inner, self.device)
        self._dmp_wrapped_module = inner  # TorchRec's name: users' wrappers set it
        if init_data_parallel:
            self.init_data_parallel()

    def init_data_parallel(self) -> None:
        """Wraps the module in DistributedDataParallel, unless it is wrapped already."""
        self._dmp_wrapped_module = data_parallel(self._dmp_wrapped_module, self._env.whole, self.device)

    def _default_plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> ShardingPlan:
        return default_plan(module, sharders, self._env, self.device)

    def _shard(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> nn.Module:
        collections = modules_to_shard(module, sharders)
        mismatch = {path for path, _, _ in collections} ^ set(self._plan.plan)
        if mismatch:
            raise ValueError(f"plan and model differ in module {min(mismatch)!r}; plan again for this model")
        paths = all_gather_object([path for path, _, _ in collections], self._env.whole.process_group)
        for rank, others in enumerate(paths):
            if others != paths[0]:
                raise ValueError(
                    f"the collections are {paths[0]} on rank 0, but {others} on rank {rank}: every rank must build the "
                    "same model in the same order (a set of strings has another order in each process)"
                )
        for path, collection, sharder in collections:
            sharded = sharder.shard(collection, self._plan.plan[path], self._env, self.device)
            self._sharded[path] = sharded
            if isinstance(sharded, ShardedCollection):
                sharded.ids_ahead.exchange.name = f"collection {path!r}"
            if not path:
                return sharded
            replace_module(module, collection, sharded)
        for submodule in module.modules():
            on_sharded = getattr(submodule, "on_sharded", None)
            if on_sharded is not None:
                on_sharded(self._env.whole.process_group)
        return module

    @property
    def module(self) -> nn.Module:
        """The sharded model without the data-parallel wrapper."""
        wrapped = self._dmp_wrapped_module
        return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped

    @property
    def data_parallel(self) -> nn.Module:
        """The sharded model with its data-parallel wrapper, if it has one."""
        return self._dmp_wrapped_module

    @property
    def plan(self) -> ShardingPlan:
        return self._plan

    @property
    def env(self) -> ShardingEnv:
        return self._env

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizers inside backward of all collections; always the same object."""
        return self._fused_optimizer

    def sharded_modules(self) -> dict[str, Any]:
        """The sharded collections by path."""
        return dict(self._sharded)

    def tables(self) -> dict[str, ShardedTable]:
        """Every table, by the name of its weight without `.weight`."""
        modules = self.module.named_modules()
        return {name: module for name, module in modules if isinstance(module, ShardedTable)}

    def kernels(self) -> list[Kernel]:
        """This rank's kernels in all collections."""
        return [kernel for sharded in self._sharded.values() for kernel in sharded.kernels()]

    def track_changes(self) -> None:
        """Makes this rank mark the rows that change from now on, in `LocalShard.changed`, for checkpoints of these."""
        track_changes(self.kernels(), self.device)

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters for a dense optimizer, by name, including this rank's shards of tables with a dense kernel."""
        return {n: p for n, p in in_backward_optimizer_filter(self.named_parameters()) if p.requires_grad}

    def other_parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters other than tables, by name."""
        tables = tuple(f"{name}." if name else "" for name in self.tables())
        return {name: p for name, p in self.named_parameters() if p.requires_grad and not name.startswith(tables)}

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        for table in self.tables().values():
            table._apply(fn)  # raises for another device, before parameters move
        return super()._apply(fn, recurse)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._dmp_wrapped_module(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state under the unsharded names; a sharded table is a `ShardedTensor`."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads a result of `state_dict`, or of the unsharded module's `state_dict`."""
        return self.module.load_state_dict(*args, **kwargs)


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replaces every occurrence of `old` in `model` by `new`."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)


def default_plan(
    module: nn.Module, sharders: Sequence[ModuleSharder[Any]], env: ShardingEnv, device: torch.device
) -> ShardingPlan:
    """The planner's plan for the hosts of `env`, with the memory of this one; a collective of all ranks."""
    if device.type == default_device().type:
        topology = Topology.of_this_machine(env.world_size, _ranks_per_host(env), _ranks_per_host(env.whole))
    else:
        topology = Topology(env.world_size, device.type)
    planner = EmbeddingShardingPlanner(topology=topology)
    if env.process_group is None:
        return planner.plan(module, sharders)
    return planner.collective_plan(module, sharders, env.process_group)


def _ranks_per_host(env: ShardingEnv) -> int:
    """Ranks per host; all of them if hosts have different numbers."""
    if env.process_group is None:
        return env.local_world_size or env.world_size
    reports = all_gather_object(env.local_world_size or socket.gethostname(), env.process_group)
    return ranks_per_host(reports) or env.world_size


def default_env() -> ShardingEnv:
    """The environment of the default process group, or of this process alone."""
    if dist.is_available() and dist.is_initialized() and dist.group.WORLD is not None:
        return ShardingEnv.from_process_group(dist.group.WORLD)
    return ShardingEnv.from_local(1, 0)


def materialize(module: nn.Module, device: torch.device) -> None:
    """Moves a module to the device; allocates and initializes tensors on meta. Sharded tables do not move."""
    for path, sub in module.named_modules():
        tensors = [*sub.parameters(recurse=False), *sub.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in tensors):
            continue
        reset = getattr(sub, "reset_parameters", None)
        if reset is None:
            raise ValueError(f"module {path!r} is on meta and has no reset_parameters; create it on a device")
        sub.to_empty(device=device, recurse=False)
        reset()
    module.to(device)
