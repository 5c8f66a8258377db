"""Named spans of a step as the host sees them: shown by torch's profiler, and told to who listens.

While nobody listens and no profiler runs, a span costs two readings of the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Listener = Callable[[str, float, float], object]
"""Takes a span's name, its start and its end, in seconds of `time.perf_counter`."""

# Within a collection's step, beside it, and around both.
ROUTE, IDS, LOOKUP, VECTORS = "route", "ids", "lookup", "vectors"
EXCHANGE = "exchange"
ROWS, FORWARD, BACKWARD, UPDATE = "rows", "forward", "backward", "update"

_listeners: list[Listener] = []


class span:
    """The body is a span of this name; `rayrec <name>` in a profile."""

    __slots__ = ("_began", "_name", "_shown")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._shown: Any = None
        if torch.autograd._profiler_enabled():
            self._shown = torch.profiler.record_function(f"rayrec {self._name}")
            self._shown.__enter__()
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        if _listeners:
            ended = time.perf_counter()
            for listener in _listeners:
                listener(self._name, self._began, ended)
        if self._shown is not None:
            self._shown.__exit__(*error)


def within(name: str, act: Callable[[], T]) -> Callable[[], T]:
    """The same act as a span of this name."""

    def acted() -> T:
        with span(name):
            return act()

    return acted


@contextmanager
def told(listener: Listener) -> Iterator[None]:
    """Every span of this process that ends within the body is told to `listener`."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
