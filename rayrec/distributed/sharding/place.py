"""Where a process stands among the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayrec.distributed import comm
from rayrec.distributed.types import ShardingEnv


@dataclass(frozen=True)
class Place:
    """This process's rank, the others, its device and theirs, and the ranks of each host if they were told."""

    rank: int
    world_size: int
    group: comm.Group
    device: torch.device
    devices: tuple[str, ...]  # of each rank, with its index
    local_world_size: int | None = None

    @classmethod
    def of(cls, env: ShardingEnv, device: torch.device) -> Place:
        """Where this process stands; on GPUs a collective, by which ranks tell each other their device.

        Raises:
            ValueError: several ranks have no process group to join them.
        """
        if env.world_size > 1 and env.process_group is None:
            raise ValueError(f"{env.world_size} ranks need a process group: use ShardingEnv.from_process_group")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        on_hosts = device.type == "cpu"
        devices = [str(device)] * env.world_size if on_hosts else comm.all_gather_object(str(device), env.process_group)
        return cls(env.rank, env.world_size, env.process_group, device, tuple(devices), env.local_world_size)
