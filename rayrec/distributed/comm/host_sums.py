"""Sums over the ranks of one host, of counts and of a model's gradients; bitwise equal on all ranks.

Annotations are not strings here: DistributedDataParallel compares those of its hook with types.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from rayrec.distributed.comm.host_connect import link_of
from rayrec.distributed.comm.host_link import HostLink, Wait

SMALL_BYTES = 1 << 16  # up to this size every rank adds up all: one exchange instead of two


def begin_sum(link: HostLink, tensor: torch.Tensor) -> Wait:
    """Begins to add up a contiguous tensor over ranks, in place; do not change it before the wait has returned."""
    world, flat = link.world_size, tensor.view(-1)
    if world == 2 or tensor.nbytes <= SMALL_BYTES:
        return _finished(_sum_of_all(link, flat))
    return _finished(_sum_by_parts(link, flat))


def _finished(steps: Iterator[None]) -> Wait:
    next(steps)

    def wait() -> None:
        for _ in steps:
            pass

    return wait


def _sum_of_all(link: HostLink, flat: torch.Tensor) -> Iterator[None]:
    gathered = flat.new_empty(link.world_size * flat.numel())
    wait = link.all_gather(gathered, flat, [flat.nbytes] * link.world_size)
    yield
    wait()
    torch.sum(gathered.view(link.world_size, -1), 0, out=flat)


def _sum_by_parts(link: HostLink, flat: torch.Tensor) -> Iterator[None]:
    """Each rank adds up one part, and sends its sum to the others.

    A rank's CPU time against `_sum_of_all`, on 4 ranks: 1.5 times for 32 KiB, 0.6 for 256 KiB, 0.4 for 2 MiB; on 3
    ranks 0.7 for 256 KiB and 0.6 for 2 MiB.
    """
    world = link.world_size
    parts = flat.tensor_split(world)
    sizes = [part.nbytes for part in parts]
    own = parts[link.rank]
    gathered = flat.new_empty(world * own.numel())
    wait = link.all_to_all(gathered, flat, [own.nbytes] * world, sizes)
    yield
    wait()
    link.all_gather(flat, gathered.view(world, -1).sum(0), sizes)()


def mean_of_gradients(group: dist.ProcessGroup | None, device: torch.device) -> Callable[..., Any] | None:
    """A hook for DistributedDataParallel that averages gradients among the CPU ranks of one host; else None.

    DistributedDataParallel calls it with each full bucket. A bucket is sent at once; with the last one, the hook waits
    for all. Collective at the first call for a group.
    """
    link = None if group is None or group.size() == 1 else link_of(group, torch.empty(0, device=device))
    if link is None:
        return None
    under_way: list[Callable[[], None]] = []

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        gradients = bucket.buffer()
        wait = begin_sum(link, gradients)

        def finish() -> None:
            wait()
            future.set_result(gradients.div_(link.world_size))

        under_way.append(finish)
        if bucket.is_last():
            for end in under_way:
                end()
            under_way.clear()
        return future

    return hook
