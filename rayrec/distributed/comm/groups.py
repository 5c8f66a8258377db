"""Process groups of some ranks of a group, each made once."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def subgroup(group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup:
    """The process group of some ranks of `group`, with its backend and timeout.

    Collective at the first call with these ranks: exactly they call it, in the same order as for other subgroups.

    Args:
        group: the group that numbers the ranks.
        ranks: ascending; this process's rank is among them.
        device: of the tensors that `group` exchanges.
    """
    of_world = dist.get_process_group_ranks(group)
    return _made_once(group, tuple(ranks), [of_world[rank] for rank in ranks], dist.get_backend_config(group), device)


def _made_once(
    group: dist.ProcessGroup, key: tuple[int, ...], ranks: list[int], backend: str, device: torch.device
) -> dist.ProcessGroup:
    made = _made.setdefault(group, {})
    if key not in made:
        timeout = timeout_of(group, device)
        made[key] = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
    return made[key]


def world_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    """The default process group's rank for a rank of `group`."""
    return rank if group is None else dist.get_global_rank(group, rank)


def host_group(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup | None:
    """A gloo group of all ranks of `group`, for one thread other than the main one.

    Collective at its first call.
    """
    if group is None or group.size() == 1:
        return group
    return _made_once(group, (), dist.get_process_group_ranks(group), "gloo", device)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long collectives of a group wait for tensors on `device`; torch has no public way to ask."""
    return group._get_backend(device).options._timeout


def leave() -> None:
    """Destroys all process groups, at the end of a rank's program; drop references to models first.

    A group that is alive at the interpreter's exit has threads that may free a tensor then, which aborts the process.
    """
    gc.collect()
    dist.destroy_process_group()
