"""Groups within a group: some of its ranks, joined by a group of their own."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from rayrec.distributed.comm.local_ranks import get_local_size

_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def subgroup(group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup:
    """The group of some ranks of `group`, with its backend and timeout; made once, when it is first asked for.

    Its members, and only they, must all ask for it, in the same order as for others.

    Args:
        group: whose ranks are meant.
        ranks: ascending; this process's own is among them.
        device: where the tensors lie that `group` exchanges.
    """
    made = _made.setdefault(group, {})
    key = tuple(ranks)
    if key not in made:
        of_world = dist.get_process_group_ranks(group)
        made[key] = dist.new_group(
            [of_world[rank] for rank in ranks],
            timeout=group._get_backend(device).options._timeout,
            backend=dist.get_backend_config(group),
            use_local_synchronization=True,
        )
    return made[key]


def world_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    """The rank in the default process group of a rank of `group`."""
    return rank if group is None else dist.get_global_rank(group, rank)


def intra_and_cross_node_pg(
    device: torch.device | None = None, backend: str | None = None
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Of the default process group: the ranks of this process's host, and those with its place on every host.

    All ranks must ask for it.

    Args:
        device: on "meta" there are no groups.
        backend: taken and not needed: it is the default group's.
    """
    if device is not None and device.type == "meta":
        return None, None
    world = dist.group.WORLD
    assert world is not None, "no process group is initialized"
    size, rank, local = world.size(), world.rank(), get_local_size(world.size())
    on = device or torch.device("cuda" if dist.get_backend(world) == "nccl" else "cpu")
    first = rank // local * local
    return subgroup(world, range(first, first + local), on), subgroup(world, range(rank % local, size, local), on)


def host_group(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup | None:
    """The ranks of `group`, joined on their hosts by gloo, for one thread that is not the main one; made once.

    All of its ranks must ask for it.
    """
    if group is None or group.size() == 1:
        return group
    made = _made.setdefault(group, {})
    if () not in made:
        made[()] = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=group._get_backend(device).options._timeout,
            backend="gloo",
            use_local_synchronization=True,
        )
    return made[()]


def leave() -> None:
    """Ends this process's part in all groups, at the end of a rank's program; models should be out of reach by then.

    What keeps a group alive up to the end of the interpreter keeps its threads: one that lets go of a tensor then
    aborts the process.
    """
    gc.collect()
    dist.destroy_process_group()
