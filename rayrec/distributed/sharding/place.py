"""Where a process stands among the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayrec.distributed import comm
from rayrec.distributed.types import ShardingEnv


@dataclass(frozen=True)
class Place:
    """This process's rank, the others, its device, and the ranks of each host if they were told."""

    rank: int
    world_size: int
    group: comm.Group
    device: torch.device
    local_world_size: int | None = None

    @classmethod
    def of(cls, env: ShardingEnv, device: torch.device) -> Place:
        """Raises ValueError where several ranks have no process group to join them."""
        if env.world_size > 1 and env.process_group is None:
            raise ValueError(f"{env.world_size} ranks need a process group: use ShardingEnv.from_process_group")
        return cls(env.rank, env.world_size, env.process_group, device, env.local_world_size)
