"""A function that one rank calls for all."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as dist

from rayrec.distributed.comm import broadcast_object

T = TypeVar("T")


def is_leader(pg: dist.ProcessGroup | None, leader_rank: int = 0) -> bool:
    """Whether this process is rank `leader_rank` of the group; without a group it is rank 0."""
    return leader_rank == (0 if pg is None else pg.rank())


def invoke_on_rank_and_broadcast_result(
    pg: dist.ProcessGroup, rank: int, func: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """What `func` returns on rank `rank`, on every rank; an error of it is raised on every rank."""
    answer: tuple[T | None, Exception | None] = (None, None)
    if pg.rank() == rank:
        try:
            answer = (func(*args, **kwargs), None)
        except Exception as error:  # any error must reach the ranks that wait for the answer
            answer = (None, error)
    result, failed = broadcast_object(answer, pg, rank)
    if failed is not None:
        raise failed
    return result  # type: ignore[return-value]


def run_on_leader(pg: dist.ProcessGroup, rank: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorates a function: rank `rank` calls it, every rank gets the result."""

    def decorate(func: Callable[..., T]) -> Callable[..., T]:
        @wraps(func)
        def wrapped(*args: Any, **kwargs: Any) -> T:
            return invoke_on_rank_and_broadcast_result(pg, rank, func, *args, **kwargs)

        return wrapped

    return decorate
