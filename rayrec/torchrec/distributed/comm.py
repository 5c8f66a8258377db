"""`torchrec.distributed.comm`: local ranks from the launcher's environment variables, and process groups of hosts."""

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
    """Returns the number of ranks per host.

    It is read from the environment, or else is 8. If it does not divide the world size, returns the world size.

    Args:
        world_size: default: the size of the default process group.
    """
    world = dist.get_world_size() if world_size is None else world_size
    size = _from_environment(SIZES) or DEFAULT_LOCAL_SIZE
    return world if world % size else size


def get_node_group_size(world_size: int | None = None) -> int:
    """Alias of `get_local_size`."""
    return get_local_size(world_size)


def get_num_groups(world_size: int | None = None) -> int:
    """Returns the number of hosts.

    Args:
        world_size: default: the size of the default process group.
    """
    world = dist.get_world_size() if world_size is None else world_size
    return world // get_local_size(world)


def get_group_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Returns the index of this process's host.

    Args:
        world_size, rank: default: from the default process group.
    """
    return (dist.get_rank() if rank is None else rank) // get_local_size(world_size)


def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Returns the rank of this process on its host: from the environment, or else its rank modulo `get_local_size`.

    Args:
        world_size, rank: default: from the default process group.
    """
    local_rank = _from_environment(RANKS)
    if local_rank is not None:
        return local_rank
    return (dist.get_rank() if rank is None else rank) % get_local_size(world_size)


def intra_and_cross_node_pg(
    device: torch.device | None = None, backend: str | None = None
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Creates two process groups: the ranks of this host, and the ranks with this local rank on all hosts. Collective.

    Args:
        device: on "meta", returns (None, None).
        backend: ignored; the groups use the backend of the default group.
    """
    if device is not None and device.type == "meta":
        return None, None
    world = dist.group.WORLD
    assert world is not None, "no process group is initialized"
    size, rank, local = world.size(), world.rank(), get_local_size(world.size())
    device = device or torch.device("cuda" if dist.get_backend(world) == "nccl" else "cpu")
    start = rank // local * local
    intra_node, cross_node = range(start, start + local), range(rank % local, size, local)
    return subgroup(world, intra_node, device), subgroup(world, cross_node, device)
