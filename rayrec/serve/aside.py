"""Work that a request does not wait for: a bounded queue and a thread of the lowest priority."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")
_logger = logging.getLogger(__name__)


class Aside(Generic[T]):
    """Calls `work` with each item, one after the other.

    Args:
        most: items that may wait.
        idle: called when nothing has come for `idle_s` seconds, and at the end.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[T], None],
        most: int,
        idle: Callable[[], None] = lambda: None,
        idle_s: float = 1.0,
    ) -> None:
        self._work, self._idle, self._idle_s = work, idle, idle_s
        self._items: queue.Queue[T | None] = queue.Queue(most)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def offer(self, item: T) -> bool:
        """False: the queue is full, and nothing will be done."""
        try:
            self._items.put_nowait(item)
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Does what waits, and ends."""
        self._items.put(None)
        self._thread.join(30)

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # on Linux a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while True:
            try:
                item = self._items.get(timeout=self._idle_s)
            except queue.Empty:
                self._attempt(self._idle)
                continue
            if item is None:
                self._attempt(self._idle)
                return
            work = self._work
            self._attempt(lambda: work(item))  # noqa: B023

    def _attempt(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # requests go on, whatever happens here
            _logger.error("%s: %s: %s", self._thread.name, type(error).__name__, error)
