"""Named spans of a step on the host, for listeners and torch's profiler.

Without listener and profiler, a span costs two clock readings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Listener = Callable[[str, float, float], object]
"""Called with a span's name, start and end, in seconds of `time.perf_counter`."""

# Stages of a collection's step; exchanges between ranks, in or between the stages; parts of a training step.
ROUTE, IDS, LOOKUP, VECTORS = "route", "ids", "lookup", "vectors"
EXCHANGE = "exchange"
ROWS, FORWARD, BACKWARD, UPDATE = "rows", "forward", "backward", "update"

_listeners: list[Listener] = []


@dataclass
class span:
    """A context manager that records its body as a span, `rayrec <name>` in a profile."""

    name: str

    def __enter__(self) -> None:
        self._shown: Any = None
        if torch.autograd._profiler_enabled():
            self._shown = torch.profiler.record_function(f"rayrec {self.name}")
            self._shown.__enter__()
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        if _listeners:
            ended = time.perf_counter()
            for listener in _listeners:
                listener(self.name, self._began, ended)
        if self._shown is not None:
            self._shown.__exit__(*error)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Calls `listener` for every span of this process that ends while the context is open."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
