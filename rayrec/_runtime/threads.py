"""Background threads with errors that do not end the process: one call, or a call at an interval."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TypeVar

T = TypeVar("T")


def run_in_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Calls `function` in a daemon thread; the future holds its result or error."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


@contextmanager
def call_every(function: Callable[[], object], every_s: float, name: str, end_s: float = 5.0) -> Iterator[None]:
    """Calls `function` every `every_s` seconds in a daemon thread while the body runs.

    Errors of a call are ignored; the next call tries again. On exit, waits up to `end_s` seconds for a running call.
    """
    closed = threading.Event()

    def loop() -> None:
        while not closed.wait(every_s):
            # The cluster or the storage may be busy or away for a moment.
            with suppress(Exception):
                function()

    thread = threading.Thread(target=loop, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join(timeout=end_s)
