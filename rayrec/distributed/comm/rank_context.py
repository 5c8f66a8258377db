"""This process among the ranks: what every part of the engine needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayrec.distributed.comm.collectives import Group
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.comm.objects import all_gather_object


@dataclass(frozen=True)
class RankContext:
    """A `ShardingEnv` with devices.

    Args:
        rank: Rank of this process.
        group: Process group of the ranks. None for one rank.
        device: Device of this rank.
        devices: Device of each rank, with an index on CUDA.
        local_world_size: Number of ranks per host, if known.
    """

    rank: int
    group: Group
    device: torch.device
    devices: tuple[str, ...]
    local_world_size: int | None = None

    @classmethod
    def of(cls, env: ShardingEnv, device: torch.device) -> RankContext:
        """The context of this process. Collective on GPUs, where ranks exchange their devices.

        Raises:
            ValueError: There are several ranks and no process group.
        """
        if env.world_size > 1 and env.process_group is None:
            raise ValueError(f"{env.world_size} ranks need a process group: use ShardingEnv.from_process_group")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device.type == "cpu":
            devices = [str(device)] * env.world_size
        else:
            devices = all_gather_object(str(device), env.process_group)
        return cls(env.rank, env.process_group, device, tuple(devices), env.local_world_size)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.devices)
