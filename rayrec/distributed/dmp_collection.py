"""DMPCollection: a model with tables sharded over groups of ranks, one replica of all tables per group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rayrec.distributed.comm import broadcast_object
from rayrec.distributed.data_parallel import DataParallelWrapper
from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.distributed.plan.module_sharder import ModuleSharder
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.replicas.averaging import AllReduce, average
from rayrec.distributed.replicas.env import ShardingEnv2D
from rayrec.distributed.replicas.gradients import mean_gradient
from rayrec.distributed.replicas.layout import GroupLayout


class ShardingStrategy(Enum):
    """How much of a table each group holds."""

    DEFAULT = "default"
    PER_MODULE = "per_module"
    FULLY_SHARDED = "fully_sharded"


class DMPCollection(DistributedModelParallel):
    """Shards every collection over the ranks of a sharding group; each group holds all tables, and the other
    parameters are data-parallel over all ranks.

    With `sync_every=1` training equals that of one process on the global batch, for every optimizer: gradients of
    touched rows are averaged before the update. With N > 1, and with `sync`, each group trains on the mean gradient of
    its own ranks for N steps; then weights and optimizer state of the touched rows are averaged. For SGD and one step
    this equals a single group; otherwise it is close. Data-parallel tables, and tables with a dense kernel, are
    averaged in every step.

    Args:
        module: any module with collections anywhere inside it; it is changed in place.
        device: of this rank.
        plan: for `sharding_group_size` ranks; by default the planner decides.
        world_size: ranks of all groups.
        sharding_group_size: ranks of one group.
        global_pg: all ranks.
        sharding_strategy: DEFAULT, or PER_MODULE, which is the same here.
        node_group_size: ranks per host in a group; by default found from hostnames.
        sharders: one for each kind of collection.
        init_data_parallel, init_parameters, data_parallel_wrapper: as of `DistributedModelParallel`.
        use_inter_host_allreduce: the ranks of a group are consecutive, and replicas are on other hosts; else replicas
            are consecutive, and groups span hosts.
        custom_all_reduce: averages tensors over replicas in place, instead of an all-reduce.
        submodule_configs, rs_awaitable_hook_module, use_sharded_relay: not offered; leave them out.
        sync_every: steps after which `after_step` averages the groups; None: only `sync` does.

    Raises:
        ValueError: a world that does not divide into groups, or is not that of `global_pg`; a plan for a larger group;
            an option that is not offered.
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
        if sync_every is not None and sync_every < 1:
            raise ValueError(f"sync_every={sync_every} must be at least 1")
        layout = GroupLayout(world_size, sharding_group_size, strided=not use_inter_host_allreduce)
        if plan is not None and plan.min_world_size > sharding_group_size:
            raise ValueError(
                f"the plan is for {plan.min_world_size} ranks or more, but a sharding group has {sharding_group_size}; "
                "plan for the ranks of one group"
            )
        env = ShardingEnv2D.of_layout(layout, global_pg, device, node_group_size, every_step=sync_every == 1)
        super().__init__(
            module, env, device, plan, sharders, init_data_parallel, init_parameters, data_parallel_wrapper
        )
        self._replica_pg, self._sync_every, self._steps = env.replica_pg, sync_every, 0
        self._all_reduce = custom_all_reduce
        if env.num_sharding_groups() > 1:
            for table in self.tables().values():
                for item in table.local if table.dense else ():
                    item.parameter.register_hook(partial(mean_gradient, group=env.replica_pg))

    def _default_plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> ShardingPlan:
        return broadcast_object(super()._default_plan(module, sharders), self._env.whole.process_group)

    @property
    def replicas(self) -> int:
        """Number of sharding groups."""
        return self._replica_pg.size()

    def sync(self, include_optimizer_state: bool = True) -> None:
        """Averages tables and their optimizer state over the groups; a collective of all ranks, between two steps."""
        self._steps = 0
        if self.replicas > 1:
            average(self.kernels(), self._replica_pg, include_optimizer_state, self._all_reduce)

    def after_step(self) -> None:
        """Call it after each step of the optimizer: synchronizes in every `sync_every`-th step."""
        self._steps += 1
        if self._sync_every is not None and self._steps >= self._sync_every:
            self.sync()

    def set_all_reduce_hook(self, reduce_hook: Callable[[list[torch.Tensor]], None]) -> None:
        """Sets the function that averages tensors over replicas in place, instead of an all-reduce in `sync`."""
        self._all_reduce = reduce_hook


def _refuse(
    strategy: ShardingStrategy, submodule_configs: Sequence[object] | None, hook_module: str | None, relay: bool
) -> None:
    if strategy is ShardingStrategy.FULLY_SHARDED:
        raise ValueError(
            "sharding_strategy=FULLY_SHARDED is not offered: for tables that R copies of do not fit, raise "
            "sharding_group_size, which shards them over more ranks"
        )
    given = {"submodule_configs": submodule_configs, "rs_awaitable_hook_module": hook_module}
    for name, value in {**given, "use_sharded_relay": relay or None}.items():
        if value is not None:
            raise ValueError(f"DMPCollection: {name} is not offered; leave it out: all collections have one group size")
