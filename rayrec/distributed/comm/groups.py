"""Groups within a group: some of its ranks, joined by a group of their own."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

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
