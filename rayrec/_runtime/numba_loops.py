"""The door to numba, which compiles the loops over ids and rows for which torch has no operator.

What is compiled for a machine is kept beside the sources, or in the user's cache folder if that cannot be written, so
that only the first process pays for it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar, cast

import numpy as np
import torch

F = TypeVar("F", bound=Callable[..., Any])
MIN_IDS = 1 << 14  # of a thread: handing work to another one costs about 50 µs
_pool = ThreadPoolExecutor(thread_name_prefix="rayrec-loops")  # starts threads when it has work


@cache
def loops(module: str) -> Any:
    """The module of this name, whose functions `compiled` made. Imported when first needed: numba takes a while."""
    return importlib.import_module(module)


def compiled(types: Mapping[str, str], **options: Any) -> Callable[[F], F]:
    """Compiles a function of numbers and arrays, which then runs without the interpreter's lock.

    Indices that may be negative cost time: use unsigned ones. So do a division in a loop (`range` with a step has one),
    and loops over floats in a function of their own: it is compiled apart.

    Args:
        types: of its parameters, among others: "uint64", "float32[::1]", "int64[:,::1]".
        options: of numba's `njit`.
    """
    import numba

    def decorate(function: F) -> F:
        signature = f"({', '.join(types[name] for name in inspect.signature(function).parameters)})"
        try:
            return cast(F, numba.njit([signature], nogil=True, cache=True, **options)(function))
        except (RuntimeError, OSError):  # there is no folder that can be written, or no room in it
            return cast(F, numba.njit([signature], nogil=True, **options)(function))

    return decorate


def in_threads(loop: Callable[..., int], sizes: np.ndarray, *args: tuple[Any, ...]) -> int:
    """Calls a loop for all items, those of about equally many ids on each of torch's threads, or on fewer.

    Args:
        loop: takes `args`, the first item and the last one's end.
        sizes: ids of each item.

    Returns:
        the largest result, at least -1.
    """
    if not len(sizes):
        return -1
    ends, given = sizes.cumsum(), [arg for some in args for arg in some]
    threads = min(torch.get_num_threads(), 1 + int(ends[-1]) // MIN_IDS)
    bounds = [0, *np.searchsorted(ends, [ends[-1] * n // threads for n in range(1, threads)]).tolist(), len(ends)]
    parts = [(start, stop) for start, stop in pairwise(bounds) if stop > start]
    others = [_pool.submit(loop, *given, *part) for part in parts[1:]]
    return max(loop(*given, *parts[0]), *(other.result() for other in others), -1)
