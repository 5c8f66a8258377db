"""Functions that run on one rank and broadcast their result."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as dist

from rayrec.distributed.comm import call_on_rank
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

T = TypeVar("T")


def is_leader(pg: dist.ProcessGroup | None, leader_rank: int = 0) -> bool:
    """Whether this process is rank `leader_rank` of the group. Without a group, this process is rank 0."""
    return leader_rank == (0 if pg is None else pg.rank())


def run_on_leader(pg: dist.ProcessGroup, rank: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorator: rank `rank` calls the function, and every rank gets its result."""

    def decorate(func: Callable[..., T]) -> Callable[..., T]:
        @wraps(func)
        def wrapped(*args: Any, **kwargs: Any) -> T:
            return call_on_rank(pg, rank, func, *args, **kwargs)

        return wrapped

    return decorate


invoke_on_rank_and_broadcast_result = call_on_rank
