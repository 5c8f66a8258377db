"""Work that a request must neither wait for nor fail because of."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")
_QUEUE_SIZE = 64
_logger = logging.getLogger(__name__)


class BackgroundWorker(Generic[T]):
    """A thread of the lowest priority that works through a bounded queue.

    Args:
        work: Called with each item. Called with None when the worker closes and after each second without an item.
    """

    def __init__(self, name: str, work: Callable[[T | None], None]) -> None:
        self._work, self._items, self._closing = work, queue.Queue[T](_QUEUE_SIZE), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rayrec-{name}", daemon=True)
        self._thread.start()

    def offer(self, item: T) -> bool:
        """Queues an item; returns False and drops it if the queue is full."""
        with suppress(queue.Full):
            self._items.put_nowait(item)
            return True
        return False

    def close(self) -> None:
        """Processes the queued items, then ends the thread."""
        self._closing.set()
        self._thread.join(30)

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # Linux sets the priority of a single thread
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
            except Exception as error:  # the next item may succeed
                _logger.warning("%s failed", threading.current_thread().name, exc_info=error)
