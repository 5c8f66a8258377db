"""Where a process stands among the ranks, and which of them share a host."""

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
    """This process's rank, the group of all, its device and theirs, and the ranks of each host if they were told."""

    rank: int
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
        return cls(env.rank, env.process_group, device, tuple(devices), env.local_world_size)

    @property
    def world_size(self) -> int:
        """Ranks, this one too."""
        return len(self.devices)


@dataclass(frozen=True, slots=True)
class Hosts:
    """Hosts of equally many ranks, one host's ranks after the other's."""

    world_size: int
    size: int

    @property
    def ranks(self) -> list[range]:
        """The ranks of each host."""
        return [range(first, first + self.size) for first in range(0, self.world_size, self.size)]

    @property
    def peers(self) -> list[range]:
        """For each place on a host the ranks that have it, one a host."""
        return [range(place, self.world_size, self.size) for place in range(self.size)]


def find_hosts(place: Place) -> Hosts | None:
    """The hosts of all ranks; None where there is one, where each has one rank, or where they are unlike.

    A collective: a rank that was told how many ranks its host has says so, the others tell their host's name.
    """
    told = comm.all_gather_object(place.local_world_size or socket.gethostname(), place.group)
    size = _size_of_each(told)
    return None if size is None or size in (1, len(told)) else Hosts(len(told), size)


def _size_of_each(told: Sequence[int | str]) -> int | None:
    """Ranks of each host, of whom `told` says how many they are or what they are called."""
    first = told[0]
    if isinstance(first, int):
        return first if set(told) == {first} and len(told) % first == 0 else None
    runs = [(name, len(list(run))) for name, run in groupby(told)]
    scattered = len({name for name, _ in runs}) < len(runs)
    sizes = {size for _, size in runs}
    return None if scattered or len(sizes) > 1 else sizes.pop()
