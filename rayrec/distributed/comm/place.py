"""This process among the ranks, and the ranks that share a host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from rayrec.distributed import comm
from rayrec.distributed.comm.env import ShardingEnv


@dataclass(frozen=True)
class Place:
    """This process's rank, group and device, the devices of all ranks, and the number of ranks of a host if known."""

    rank: int
    group: comm.Group
    device: torch.device
    devices: tuple[str, ...]  # of each rank, with an index on CUDA
    local_world_size: int | None = None

    @classmethod
    def of(cls, env: ShardingEnv, device: torch.device) -> Place:
        """The place of this process. Collective on GPUs, where ranks exchange their devices.

        Raises:
            ValueError: there are several ranks and no process group.
        """
        if env.world_size > 1 and env.process_group is None:
            raise ValueError(f"{env.world_size} ranks need a process group: use ShardingEnv.from_process_group")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        on_hosts = device.type == "cpu"
        devices = [str(device)] * env.world_size if on_hosts else comm.all_gather_object(str(device), env.process_group)
        return cls(env.rank, env.process_group, device, tuple(devices), env.local_world_size)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.devices)


@dataclass(frozen=True, slots=True)
class Hosts:
    """Hosts of equally many ranks each; ranks of a host follow each other."""

    world_size: int
    size: int

    @property
    def ranks(self) -> list[range]:
        """The ranks of each host."""
        return [range(first, first + self.size) for first in range(0, self.world_size, self.size)]

    @property
    def peers(self) -> list[range]:
        """For each local rank, the ranks that have it, one of each host."""
        return [range(place, self.world_size, self.size) for place in range(self.size)]


def find_hosts(place: Place) -> Hosts | None:
    """The hosts of all ranks; None if there is one, if each has one rank, or if they have unlike numbers of ranks.

    Collective. Ranks of a known `local_world_size` report it; the others report their hostname.
    """
    reports = comm.all_gather_object(place.local_world_size or socket.gethostname(), place.group)
    size = _ranks_of_a_host(reports)
    return None if size is None or size in (1, len(reports)) else Hosts(len(reports), size)


def _ranks_of_a_host(reports: Sequence[int | str]) -> int | None:
    """The number of ranks of each host, from each rank's report of it or of its hostname; None if they differ."""
    first = reports[0]
    if isinstance(first, int):
        return first if set(reports) == {first} and len(reports) % first == 0 else None
    runs = [(name, len(list(run))) for name, run in groupby(reports)]
    scattered = len({name for name, _ in runs}) < len(runs)
    sizes = {size for _, size in runs}
    return None if scattered or len(sizes) > 1 else sizes.pop()
