"""Runs a function over many inputs, in this process or side by side on Ray: for scripts that prepare data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from rayrec.data.errors import DataError

A = TypeVar("A")
T = TypeVar("T")


def each(function: Callable[[A], T], inputs: Sequence[A], *, on_ray: bool) -> Iterator[T]:
    """The results in the order of the inputs.

    Args:
        on_ray: one Ray task an input; a local Ray is started where there is none.

    Raises:
        DataError: the one that the function raised, wherever it ran.
    """
    if not on_ray:
        yield from map(function, inputs)
        return
    import ray

    start_ray()
    task: Any = ray.remote(_call)
    refs = [task.remote(function, item) for item in inputs]
    for ref in refs:
        try:
            yield ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, DataError):
                raise error.cause from None
            raise


def start_ray() -> None:
    """Connects the Ray that RAY_ADDRESS names, or starts a local one, unless one is connected."""
    import ray

    ray.init(ignore_reinit_error=True, logging_level=logging.ERROR)


def _call(function: Callable[[A], T], item: A) -> T:
    return function(item)  # Ray wants a plain function, ours may be a partial one
