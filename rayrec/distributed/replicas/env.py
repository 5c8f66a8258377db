"""The sharding environment of a group with replicas."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rayrec.distributed import comm
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.replicas.layout import GroupLayout


@dataclass(frozen=True, init=False)
class ShardingEnv2D(ShardingEnv):
    """Process groups of 2D parallelism. `world_size`, `rank` and `process_group` are those of this rank's sharding
    group, over which tables are sharded and vectors are exchanged.

    Args:
        sharding_pg: this rank's group.
        replica_pg: the ranks with the same shards, one per group.
        global_pg: all ranks.
        device_mesh: ignored.
        node_group_size: ranks per host in the group; by default found from hostnames.
        every_step: gradient rows are averaged over the groups before each update.
    """

    sharding_pg: dist.ProcessGroup = field(init=False)
    replica_pg: dist.ProcessGroup = field(init=False)
    global_pg: dist.ProcessGroup = field(init=False)
    every_step: bool = field(init=False)

    def __init__(
        self,
        sharding_pg: dist.ProcessGroup,
        replica_pg: dist.ProcessGroup,
        global_pg: dist.ProcessGroup,
        device_mesh: object = None,
        node_group_size: int | None = None,
        *,
        every_step: bool = False,
    ) -> None:
        super().__init__(sharding_pg.size(), sharding_pg.rank(), sharding_pg, node_group_size)
        for name, value in (("sharding_pg", sharding_pg), ("replica_pg", replica_pg), ("global_pg", global_pg)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "every_step", every_step)

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
        """Makes the process groups of this rank; a collective of all ranks.

        Raises:
            ValueError: the layout is for another world.
        """
        if layout.world_size != global_pg.size():
            raise ValueError(f"world_size={layout.world_size}, but the process group has {global_pg.size()} ranks")
        rank = global_pg.rank()
        sharding = comm.subgroup(global_pg, layout.group_of(rank), device)
        replicas = comm.subgroup(global_pg, layout.replicas_of(rank), device)
        return cls(sharding, replicas, global_pg, node_group_size=local_world_size, every_step=every_step)

    @property
    def whole(self) -> ShardingEnv:
        """All ranks as one group."""
        return ShardingEnv.from_process_group(self.global_pg)

    def num_sharding_groups(self) -> int:
        """Number of groups, and so of replicas of each table."""
        return self.replica_pg.size()
