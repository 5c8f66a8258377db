"""A thread that looks at something now and then while other work goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def looking(look: Callable[[], object], every_s: float, name: str) -> Iterator[None]:
    """Calls `look` every so many seconds, from a thread, while the body runs.

    An error costs only that look: the cluster is busy or away, and the next one may find it.
    """
    closed = threading.Event()

    def watch() -> None:
        while not closed.wait(every_s):
            with suppress(Exception):
                look()

    thread = threading.Thread(target=watch, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join(timeout=5)
