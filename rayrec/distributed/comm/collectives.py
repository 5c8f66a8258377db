"""Every collective that rayrec issues, one thin function each, and a way to count them.

`count_collectives` is how tests show that a step costs the same number of collectives whatever the plan.
A group of None, or of one rank, costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
Group = dist.ProcessGroup | None
Wait = Callable[[], None]

# torch 2.13 renames it
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_counters: list[Counter[str]] = []
_byte_counters: list[Counter[str]] = []


@contextmanager
def count_collectives() -> Iterator[Counter[str]]:
    """Counts the collectives of this process, by name, while the context is open."""
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


@contextmanager
def count_bytes() -> Iterator[Counter[str]]:
    """Counts the bytes that this process sends to others, by name (not in small words on hosts), while it is open."""
    counter: Counter[str] = Counter()
    _byte_counters.append(counter)
    try:
        yield counter
    finally:
        _byte_counters.remove(counter)


def _count(name: str) -> None:
    for counter in _counters:
        counter[name] += 1


def _count_bytes(name: str, sent: int) -> None:
    for counter in _byte_counters:
        counter[name] += sent


def _alone(group: Group) -> bool:
    return group is None or group.size() == 1


def _done() -> None:
    return None


def all_to_all(
    output: torch.Tensor,
    inputs: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    group: Group,
) -> Wait:
    """Sends `input_splits[r]` leading elements of `inputs` to each rank r, and receives likewise into `output`.

    Returns at once with a function that waits until `output` may be read. None splits mean equal parts.
    """
    if _alone(group):
        output.copy_(inputs)
        return _done
    _count("all_to_all")
    outs = None if output_splits is None else list(output_splits)
    ins = None if input_splits is None else list(input_splits)
    for counter in _byte_counters:
        kept = len(inputs) // dist.get_world_size(group) if ins is None else ins[dist.get_rank(group)]
        counter["all_to_all"] += (len(inputs) - kept) * inputs[:1].nbytes if len(inputs) else 0
    work = dist.all_to_all_single(output, inputs, outs, ins, group=group, async_op=True)

    def wait() -> None:
        work.wait()  # from a frame of this file: where an error was raised tells that it came of an exchange

    return wait


def exchange_on_hosts(inputs: torch.Tensor, group: Group) -> torch.Tensor:
    """Row r of `inputs [W, N]` to each rank r; returns the rows that came, when they are there.

    Counted apart from `all_to_all`: it travels between hosts' memories, while devices do something else.
    """
    if _alone(group):
        return inputs
    _count("exchange_on_hosts")
    output = torch.empty_like(inputs)
    dist.all_to_all_single(output, inputs, group=group)
    return output


def all_gather(inputs: torch.Tensor, group: Group) -> torch.Tensor:
    """`[W, *shape]` of every rank's tensor; all of one shape."""
    if _alone(group):
        return inputs[None]
    assert group is not None
    _count("all_gather")
    _count_bytes("all_gather", (group.size() - 1) * inputs.nbytes)
    output = inputs.new_empty((group.size(), *inputs.shape))
    _all_gather(output.view(-1), inputs.reshape(-1), group=group)
    return output


def all_gather_uneven(inputs: torch.Tensor, group: Group) -> torch.Tensor:
    """`[sum of N]` of every rank's vector `[N]`, one rank after the other; their lengths are read on the host."""
    if _alone(group):
        return inputs
    counts = all_gather(torch.tensor([len(inputs)], device=inputs.device), group).flatten().tolist()
    padded = inputs.new_zeros(max(counts))
    padded[: len(inputs)] = inputs
    return torch.cat([row[:count] for row, count in zip(all_gather(padded, group), counts, strict=True)])


def all_reduce(tensor: torch.Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """Adds up (or otherwise reduces) the tensor over ranks, in place; returns it."""
    if not _alone(group):
        _count("all_reduce")
        size = dist.get_world_size(group)
        _count_bytes("all_reduce", 2 * (size - 1) * tensor.nbytes // size)  # of a ring
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def broadcast(tensor: torch.Tensor, group: Group, src: int = 0) -> torch.Tensor:
    """Group rank `src`'s numbers on every rank, in place; returns the tensor."""
    if not _alone(group):
        _count("broadcast")
        dist.broadcast(tensor, group=group, group_src=src)
    return tensor


def broadcast_object(obj: T, group: Group, src: int = 0) -> T:
    """Group rank `src`'s object on every rank."""
    if _alone(group):
        return obj
    _count("broadcast_object")
    box: list[Any] = [obj]
    dist.broadcast_object_list(box, group=group, group_src=src)
    return box[0]


def all_gather_object(obj: T, group: Group) -> list[T]:
    """Every rank's object, in rank order."""
    if _alone(group):
        return [obj]
    assert group is not None
    _count("all_gather_object")
    objects: list[Any] = [None] * group.size()
    dist.all_gather_object(objects, obj, group=group)
    return objects


def barrier(group: Group) -> None:
    """Returns when every rank has come here."""
    if not _alone(group):
        _count("barrier")
        dist.barrier(group=group)
