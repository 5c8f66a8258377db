"""Collectives of Python objects, and barriers: for set-up, not for a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from rayrec.distributed.comm.collectives import Group, alone, count

T = TypeVar("T")


def broadcast_object(obj: T, group: Group, src: int = 0) -> T:
    """Returns the object of group rank `src` on every rank."""
    if alone(group):
        return obj
    count("broadcast_object")
    box: list[Any] = [obj]
    dist.broadcast_object_list(box, group=group, group_src=src)
    return box[0]


def all_gather_object(obj: T, group: Group) -> list[T]:
    """Every rank's object, in rank order."""
    if alone(group):
        return [obj]
    assert group is not None
    count("all_gather_object")
    objects: list[Any] = [None] * group.size()
    dist.all_gather_object(objects, obj, group=group)
    return objects


def gather_object(obj: T, group: Group) -> list[T] | None:
    """Every rank's object, in rank order, on group rank 0; None on the others."""
    if alone(group):
        return [obj]
    assert group is not None
    count("gather_object")
    objects: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(obj, objects, group=group, group_dst=0)
    return objects


def scatter_object(objects: list[T] | None, group: Group) -> T:
    """Returns on each rank its object of the list of group rank 0."""
    if alone(group):
        assert objects is not None
        return objects[0]
    count("scatter_object")
    box: list[Any] = [None]
    dist.scatter_object_list(box, objects, group=group, group_src=0)
    return box[0]


def call_on_rank(group: dist.ProcessGroup, rank: int, func: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Calls `func` on rank `rank`. Every rank returns its result, or raises its error."""
    answer: tuple[T | None, Exception | None] = (None, None)
    if group.rank() == rank:
        try:
            answer = (func(*args, **kwargs), None)
        except Exception as error:  # other ranks wait for the answer
            answer = (None, error)
    result, failed = broadcast_object(answer, group, rank)
    if failed is not None:
        raise failed
    return result  # type: ignore[return-value]


def barrier(group: Group) -> None:
    """Returns when every rank has called it."""
    if not alone(group):
        count("barrier")
        dist.barrier(group=group)
