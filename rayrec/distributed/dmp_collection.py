"""DMPCollection: a model whose tables are sharded over groups of ranks, with one replica of all tables per group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rayrec.distributed.comm.objects import broadcast_object
from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.distributed.plan.module_sharder import ModuleSharder
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.replicas.averaging import AllReduce, average
from rayrec.distributed.replicas.env import ShardingEnv2D
from rayrec.distributed.replicas.gradients import mean_gradient
from rayrec.distributed.replicas.layout import GroupLayout


class DMPCollection(DistributedModelParallel):
    """Shards every collection over the ranks of a sharding group. Each group holds all tables; the other parameters are
    data-parallel over all ranks.

    With `sync_every=1` training is equivalent to one process on the global batch, for every optimizer: gradients of
    touched rows are averaged before the update. With N > 1, and with `sync`, each group trains on the mean gradient of
    its own ranks for N steps; then weights and optimizer state of the touched rows are averaged. For SGD and one step
    this equals a single group; otherwise it is close. Data-parallel tables, and tables with a dense kernel, are
    averaged in every step.

    Args:
        module: any module that contains collections; it is modified in place.
        device: device of this rank.
        plan: a plan for `sharding_group_size` ranks; the planner's by default.
        world_size: number of ranks of all groups.
        sharding_group_size: number of ranks of one group.
        global_pg: process group of all ranks.
        node_group_size: ranks per host in a group; found from hostnames by default.
        sharders: one for each kind of collection.
        init_data_parallel, init_parameters: see `DistributedModelParallel`.
        use_inter_host_allreduce: whether the ranks of a group are consecutive, and replicas are on other hosts; else
            replicas are consecutive, and groups span hosts.
        sync_every: steps after which `after_step` averages the groups; None: only `sync` does.

    Raises:
        ValueError: a world that does not divide into groups, or is not the world of `global_pg`; a plan for a larger
            group.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        plan: ShardingPlan | None,
        world_size: int,
        sharding_group_size: int,
        global_pg: dist.ProcessGroup,
        *,
        node_group_size: int | None = None,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        use_inter_host_allreduce: bool = False,
        sync_every: int | None = None,
    ) -> None:
        if sync_every is not None and sync_every < 1:
            raise ValueError(f"sync_every={sync_every} must be at least 1")
        layout = GroupLayout(world_size, sharding_group_size, strided=not use_inter_host_allreduce)
        if plan is not None and plan.min_world_size > sharding_group_size:
            raise ValueError(
                f"the plan is for {plan.min_world_size} ranks or more, but a sharding group has {sharding_group_size}; "
                "plan for the ranks of one group"
            )
        env = ShardingEnv2D.of_layout(layout, global_pg, device, node_group_size, every_step=sync_every == 1)
        super().__init__(module, env, device, plan, sharders, init_data_parallel, init_parameters)
        self._replica_pg, self._sync_every, self._steps = env.replica_pg, sync_every, 0
        self._all_reduce: AllReduce | None = None
        if self.replicas > 1:
            for table in self.tables().values():
                for item in table.local if table.dense else ():
                    item.parameter.register_hook(partial(mean_gradient, group=env.replica_pg))

    def _default_plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> ShardingPlan:
        return broadcast_object(super()._default_plan(module, sharders), self._env.whole.process_group)

    @property
    def replicas(self) -> int:
        """Number of sharding groups."""
        return self._replica_pg.size()

    def track_changes(self) -> None:
        """As in `DistributedModelParallel`.

        Raises:
            ValueError: there are several sharding groups, which change different rows.
        """
        if self.replicas > 1:
            raise ValueError("changed rows of replicated sharding groups are not tracked: use one sharding group")
        super().track_changes()

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
