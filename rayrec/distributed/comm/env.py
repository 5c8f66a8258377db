"""The ranks that take part in sharding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class ShardingEnv:
    """Who takes part: world size, own rank, and the process group that joins them (None: plan only).

    `local_world_size` is the number of ranks of each host, where hosts have equally many and come one after the other;
    None: their names tell, when it matters (see `sharding/place.py`).
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
        """All ranks: the same, but where this is one of several sharding groups."""
        return self

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """An environment without communication, for one process."""
        return cls(world_size, rank, None)
