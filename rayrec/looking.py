"""Threads beside other work: one that looks at something now and then, one that does something once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TypeVar

T = TypeVar("T")


def beside(act: Callable[[], T], name: str) -> Future[T]:
    """Does `act` in a thread that does not keep the process from ending."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


@contextmanager
def looking(look: Callable[[], object], every_s: float, name: str, end_s: float = 5.0) -> Iterator[None]:
    """Calls `look` every so many seconds, from a thread, while the body runs; waits up to `end_s` for the last call.

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
        thread.join(timeout=end_s)
