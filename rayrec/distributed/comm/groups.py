"""Process groups of some ranks of a group, created once each."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

_created: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def subgroup(group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup:
    """The process group of some ranks of `group`, with its backend and timeout.

    The first call with these ranks is collective among exactly these ranks, which create all subgroups in one order.

    Args:
        group: The group that numbers the ranks.
        ranks: Ascending, including this process's rank.
        device: Device of the tensors that `group` exchanges.
    """
    world_ranks = dist.get_process_group_ranks(group)
    return _create_once(
        group, tuple(ranks), [world_ranks[rank] for rank in ranks], dist.get_backend_config(group), device
    )


def _create_once(
    group: dist.ProcessGroup, key: tuple[int, ...], ranks: list[int], backend: str, device: torch.device
) -> dist.ProcessGroup:
    groups = _created.setdefault(group, {})
    if key not in groups:
        timeout = timeout_of(group, device)
        groups[key] = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
    return groups[key]


def world_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    """Rank in the default process group of a rank of `group`."""
    return rank if group is None else dist.get_global_rank(group, rank)


def host_group(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup | None:
    """A gloo group of all ranks of `group`, for use by one thread other than the main one.

    The first call is collective.
    """
    if group is None or group.size() == 1:
        return group
    return _create_once(group, (), dist.get_process_group_ranks(group), "gloo", device)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Timeout of a group's collectives on `device`. torch has no public accessor."""
    return group._get_backend(device).options._timeout


def leave() -> None:
    """Destroys all process groups. Call it at the end of a rank's program, after dropping references to models.

    Threads of a group that is still alive may free a tensor while the interpreter exits, which aborts the process.
    """
    gc.collect()
    dist.destroy_process_group()
