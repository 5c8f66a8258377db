"""The sharding environment of 2D parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from rayrec.distributed import comm
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.replicas.layout import GroupLayout


@dataclass(frozen=True, kw_only=True)
class ShardingEnv2D(ShardingEnv):
    """Process groups of 2D parallelism. `world_size`, `rank` and `process_group` describe this rank's sharding group,
    over which tables are sharded and vectors are exchanged.

    Args:
        replica_pg: the ranks with the same shards, one per group.
        global_pg: all ranks.
        every_step: whether gradient rows are averaged over the groups before each update.
    """

    replica_pg: dist.ProcessGroup
    global_pg: dist.ProcessGroup
    every_step: bool = False

    @classmethod
    def of_layout(
        cls,
        layout: GroupLayout,
        global_pg: dist.ProcessGroup,
        device: torch.device,
        local_world_size: int | None = None,
        *,
        every_step: bool = False,
    ) -> ShardingEnv2D:
        """Creates the process groups of this rank; a collective of all ranks.

        Raises:
            ValueError: the layout is for another world.
        """
        if layout.world_size != global_pg.size():
            raise ValueError(f"world_size={layout.world_size}, but the process group has {global_pg.size()} ranks")
        rank = global_pg.rank()
        sharding = comm.subgroup(global_pg, layout.group_of(rank), device)
        replicas = comm.subgroup(global_pg, layout.replicas_of(rank), device)
        return cls(
            sharding.size(),
            sharding.rank(),
            sharding,
            local_world_size,
            replica_pg=replicas,
            global_pg=global_pg,
            every_step=every_step,
        )

    @property
    def whole(self) -> ShardingEnv:
        """The environment of all ranks."""
        return ShardingEnv.from_process_group(self.global_pg)
