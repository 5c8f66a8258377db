"""`torchrec.distributed.comm`: ranks of a host, from the environment that launchers set, and groups of hosts."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from rayrec.distributed.comm import subgroup
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = [
    "get_group_rank",
    "get_local_rank",
    "get_local_size",
    "get_node_group_size",
    "get_num_groups",
    "intra_and_cross_node_pg",
]

DEFAULT_LOCAL_SIZE = 8
SIZES = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
RANKS = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")


def _from_environment(names: tuple[str, ...]) -> int | None:
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


def get_local_size(world_size: int | None = None) -> int:
    """The number of ranks of a host: from the environment if it divides the world size, else 8 or the world size.

    Args:
        world_size: that of the default process group if not given.
    """
    world = dist.get_world_size() if world_size is None else world_size
    size = _from_environment(SIZES) or DEFAULT_LOCAL_SIZE
    return world if world % size else size


def get_node_group_size(world_size: int | None = None) -> int:
    """The same as `get_local_size`."""
    return get_local_size(world_size)


def get_num_groups(world_size: int | None = None) -> int:
    """The number of hosts.

    Args:
        world_size: that of the default process group if not given.
    """
    world = dist.get_world_size() if world_size is None else world_size
    return world // get_local_size(world)


def get_group_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """The number of this process's host.

    Args:
        world_size, rank: those of the default process group if not given.
    """
    return (dist.get_rank() if rank is None else rank) // get_local_size(world_size)


def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """This process's rank on its host: from the environment, else its rank modulo `get_local_size`.

    Args:
        world_size, rank: those of the default process group if not given.
    """
    found = _from_environment(RANKS)
    if found is not None:
        return found
    return (dist.get_rank() if rank is None else rank) % get_local_size(world_size)


def intra_and_cross_node_pg(
    device: torch.device | None = None, backend: str | None = None
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Two groups of the default process group's ranks: those of this host, and those with this local rank on any host.

    Collective.

    Args:
        device: for "meta", there are no groups.
        backend: ignored; groups have the default group's.
    """
    if device is not None and device.type == "meta":
        return None, None
    world = dist.group.WORLD
    assert world is not None, "no process group is initialized"
    size, rank, local = world.size(), world.rank(), get_local_size(world.size())
    on = device or torch.device("cuda" if dist.get_backend(world) == "nccl" else "cpu")
    first = rank // local * local
    return subgroup(world, range(first, first + local), on), subgroup(world, range(rank % local, size, local), on)
