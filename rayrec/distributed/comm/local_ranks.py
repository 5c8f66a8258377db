"""How many ranks a host has, and which of them this process is, as the launcher's environment says."""

from __future__ import annotations

import os

import torch.distributed as dist

DEFAULT_LOCAL_SIZE = 8
SIZES = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
RANKS = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")


def _from_environment(names: tuple[str, ...]) -> int | None:
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


def get_local_size(world_size: int | None = None) -> int:
    """Ranks of a host: from the environment if that divides the world, else 8, or the world where 8 does not.

    Args:
        world_size: that of the default process group if not given.
    """
    world = dist.get_world_size() if world_size is None else world_size
    size = _from_environment(SIZES) or DEFAULT_LOCAL_SIZE
    return world if world % size else size


def get_node_group_size(world_size: int | None = None) -> int:
    """`get_local_size`: hosts are the only groups."""
    return get_local_size(world_size)


def get_num_groups(world_size: int | None = None) -> int:
    """Hosts.

    Args:
        world_size: that of the default process group if not given.
    """
    world = dist.get_world_size() if world_size is None else world_size
    return world // get_local_size(world)


def get_group_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """The place of this process's host.

    Args:
        world_size, rank: those of the default process group if not given.
    """
    return (dist.get_rank() if rank is None else rank) // get_local_size(world_size)


def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """This process's place on its host: from the environment, else its rank within `get_local_size`.

    Args:
        world_size, rank: those of the default process group if not given.
    """
    found = _from_environment(RANKS)
    if found is not None:
        return found
    return (dist.get_rank() if rank is None else rank) % get_local_size(world_size)
