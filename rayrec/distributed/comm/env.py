"""The ranks among which tables are sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class ShardingEnv:
    """The ranks among which tables are sharded.

    Args:
        world_size: Number of ranks.
        rank: Rank of this process.
        process_group: Process group of the ranks. None for planning only.
        local_world_size: Ranks per host, if hosts have equal numbers of consecutive ranks. By default hosts are found
            by their names when they matter (see `hosts.find_hosts`).
    """

    world_size: int
    rank: int
    process_group: dist.ProcessGroup | None = None
    local_world_size: int | None = None

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup, local_world_size: int | None = None) -> ShardingEnv:
        """From an initialized `torch.distributed` group."""
        return cls(pg.size(), pg.rank(), pg, local_world_size)

    @property
    def whole(self) -> ShardingEnv:
        """All ranks. Equal to this environment unless 2D."""
        return self

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """Without communication, for one process."""
        return cls(world_size, rank, None)
