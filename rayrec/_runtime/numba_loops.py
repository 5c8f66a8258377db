"""numba, which compiles loops over ids and rows that torch has no operator for.

Compiled code is cached next to the sources, or in the user's cache folder if that is read-only, so that only the first
process of a machine compiles.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar, cast

import numpy as np
import torch

F = TypeVar("F", bound=Callable[..., Any])
# Per thread. Starting work on another thread costs about 50 µs, the time in which a loop counts some 20,000 ids; with
# fewer ids per thread, a batch of 200,000 ids takes longer on 14 threads than on 4.
MIN_IDS = 1 << 16
_pool: ThreadPoolExecutor


def _new_pool() -> None:
    global _pool
    _pool = ThreadPoolExecutor(thread_name_prefix="rayrec-loops")  # starts threads on demand


_new_pool()
# A forked child has none of its parent's threads, but the copied pool counts them as idle and would start no others.
os.register_at_fork(after_in_child=_new_pool)


@cache
def loops(module: str) -> Any:
    """The module of this name with functions decorated by `compiled`. Imported on first use: numba is slow to load."""
    return importlib.import_module(module)


def compiled(types: Mapping[str, str], **options: Any) -> Callable[[F], F]:
    """Compiles a function of numbers and arrays, which then runs without the GIL.

    For speed, use unsigned indices, avoid divisions in loops (`range` with a step has one), and keep loops over floats
    out of separate functions, which numba compiles separately.

    Args:
        types: numba types of the parameters, such as "uint64", "float32[::1]" or "int64[:,::1]". May hold more names.
        options: Options of numba's `njit`.
    """
    import numba

    def decorate(function: F) -> F:
        signature = f"({', '.join(types[name] for name in inspect.signature(function).parameters)})"
        try:
            return cast(F, numba.njit([signature], nogil=True, cache=True, **options)(function))
        except (RuntimeError, OSError):  # no writable cache folder, or a full disk
            return cast(F, numba.njit([signature], nogil=True, **options)(function))

    return decorate


def in_threads(loop: Callable[..., int], sizes: np.ndarray, *args: tuple[Any, ...], least: int = MIN_IDS) -> int:
    """Runs `loop` on item ranges of about equal id counts, on up to torch's number of threads.

    Args:
        loop: Called as `loop(*args, start, stop)` for a range of items.
        sizes: Number of ids of each item.
        args: Tuples of arguments, which are concatenated.
        least: Ids per thread that are worth a thread.

    Returns:
        The largest result, at least -1.
    """
    if not len(sizes):
        return -1
    ends, arguments = sizes.cumsum(), [argument for group in args for argument in group]
    threads = min(torch.get_num_threads(), 1 + int(ends[-1]) // least)
    bounds = [0, len(ends)]
    if threads > 1:  # the item edges that are nearest to equal shares
        edges, targets = np.concatenate([[0], ends]), np.arange(1, threads) * (ends[-1] / threads)
        above = np.searchsorted(edges, targets)
        bounds[1:1] = (above - (targets - edges[above - 1] < edges[above] - targets)).tolist()
    ranges = [(start, stop) for start, stop in pairwise(bounds) if stop > start]
    futures = [_pool.submit(loop, *arguments, *item_range) for item_range in ranges[1:]]
    return max(loop(*arguments, *ranges[0]), *(future.result() for future in futures), -1)
