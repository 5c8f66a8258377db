"""Work behind the answers: a request neither waits nor fails because of it."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")
_QUEUE = 64  # items that may wait
_logger = logging.getLogger(__name__)


class Behind(Generic[T]):
    """A thread of the lowest priority, and a short queue.

    Args:
        work: is called with each item, and with None at the end and whenever none came for a second.
    """

    def __init__(self, name: str, work: Callable[[T | None], None]) -> None:
        self._work, self._items, self._closing = work, queue.Queue[T](_QUEUE), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rayrec-{name}", daemon=True)
        self._thread.start()

    def offer(self, item: T) -> bool:
        """False where the queue is full: the item is dropped."""
        with suppress(queue.Full):
            self._items.put_nowait(item)
            return True
        return False

    def close(self) -> None:
        """Does what waits, and ends."""
        self._closing.set()
        self._thread.join(30)

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # on Linux a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        ended = False
        while not ended:
            item: T | None = None
            try:
                item = self._items.get(timeout=0.01 if self._closing.is_set() else 1.0)
            except queue.Empty:
                ended = self._closing.is_set()
            try:
                self._work(item)
            except Exception as error:  # the next item may be a better one
                _logger.warning("%s failed", threading.current_thread().name, exc_info=error)
