"""Runs a function over many inputs, in this process or side by side on Ray: for scripts that prepare data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rayrec.data.source.parallel import on_ray as in_tasks

A = TypeVar("A")
T = TypeVar("T")


def each(function: Callable[[A], T], inputs: Iterable[A], *, on_ray: bool) -> Iterator[T]:
    """The results in the order of the inputs.

    Args:
        on_ray: one Ray task an input, on a CPU of its own; a local Ray is started where there is none.

    Raises:
        DataError: the one that the function raised, wherever it ran.
    """
    if not on_ray:
        return map(function, inputs)
    start_ray()
    return in_tasks(function, inputs, cpus=1.0)


def start_ray() -> None:
    """Connects the Ray that RAY_ADDRESS names, or starts a local one, unless one is connected."""
    import ray

    ray.init(ignore_reinit_error=True, logging_level=logging.ERROR)
