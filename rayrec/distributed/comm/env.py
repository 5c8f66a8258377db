"""The ranks that take part in sharding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class ShardingEnv:
    """World size, this process's rank, and the process group of the ranks (None: for planning only).

    Args:
        world_size: number of ranks.
        rank: of this process.
        process_group: of the ranks.
        local_world_size: ranks of each host, if hosts have equally many and their ranks follow each other. Without it
            hosts are found by their names when they matter (see `place.find_hosts`).
    """

    world_size: int
    rank: int
    process_group: dist.ProcessGroup | None = None
    local_world_size: int | None = None

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup, local_world_size: int | None = None) -> ShardingEnv:
        """The environment of an initialized `torch.distributed` group."""
        return cls(pg.size(), pg.rank(), pg, local_world_size)

    @property
    def whole(self) -> ShardingEnv:
        """The environment of all ranks, where this one is of one of several sharding groups; else the same."""
        return self

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """An environment without communication, for one process."""
        return cls(world_size, rank, None)
