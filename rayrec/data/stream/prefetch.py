"""`Prefetcher`: runs a generator in a thread, a bounded number of items ahead of the consumer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, TypeVar

from rayrec.storage.errors import DataError

T = TypeVar("T")

_TICK_S = 0.5
_CLOSE_TIMEOUT_S = 10.0
_CLOSE_STALLED_S = 0.2
_STALLED = TimeoutError()


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    value: T


class Activity:
    """Time of the last item of a source, even if filters left nothing of it."""

    def __init__(self) -> None:
        self.last_s = time.monotonic()

    def watch(self, items: Generator[T]) -> Generator[T]:
        """Yields the items, and records the time of each. Closing this closes their generator."""
        with closing(items):
            for item in items:
                self.last_s = time.monotonic()
                yield item


class Prefetcher(Generic[T]):
    """Runs a generator in a thread, a few items ahead of the consumer.

    Args:
        make: returns the generator; called in the thread.
        depth: items to prepare ahead.
        source: activity of the generator's own source: while it is active, an item may take longer than the timeout.
    """

    def __init__(self, make: Callable[[], Generator[T]], depth: int, source: Activity | None = None) -> None:
        self._source = source
        self._items: queue.Queue[_Item[T] | BaseException | None] = queue.Queue(depth)
        self._stop = threading.Event()
        self._over: BaseException | None = None
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, args=(make,), name="rayrec-data", daemon=True
        )
        self._thread.start()

    def take(self, timeout_s: float) -> T:
        """The next item. Raises the generator's exception, StopIteration at its end, or DataError after a timeout."""
        if self._over is not None:
            raise self._over
        item = self._wait(timeout_s)
        if isinstance(item, _Item):
            return item.value
        self.close(_CLOSE_STALLED_S if item is _STALLED else _CLOSE_TIMEOUT_S)
        if item is _STALLED:
            item = _stalled(timeout_s)
        self._over = item if item is not None else StopIteration()
        raise self._over

    def each(self, timeout_s: float) -> Iterator[T]:
        """Yields the remaining items."""
        while True:
            try:
                item = self.take(timeout_s)
            except StopIteration:
                return
            yield item

    def _wait(self, timeout_s: float) -> _Item[T] | BaseException | None:
        """The next entry of the queue; `_STALLED` after a timeout."""
        start_s = time.monotonic()
        while True:
            try:
                return self._items.get(timeout=min(_TICK_S, timeout_s))
            except queue.Empty:
                active_s = start_s if self._source is None else max(start_s, self._source.last_s)
                if time.monotonic() > active_s + timeout_s:
                    return _STALLED

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Ends the thread and drops its items. A thread that does not end in time is abandoned; it is a daemon."""
        self._stop.set()
        if self._over is None:
            self._over = StopIteration()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        deadline = time.monotonic() + timeout_s
        while thread.is_alive() and time.monotonic() < deadline:
            while not self._items.empty():
                self._items.get_nowait()
            thread.join(0.01)

    def _run(self, make: Callable[[], Generator[T]]) -> None:
        try:
            items = make()
            try:
                for item in items:
                    if not self._put(_Item(item)):
                        return
            finally:
                items.close()
            self._put(None)
        except BaseException as error:  # raised again in the consumer
            self._put(_plain(error))

    def _put(self, item: _Item[T] | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._items.put(item, timeout=_TICK_S)
                return True
            except queue.Full:
                continue
        return False


def _plain(error: BaseException) -> BaseException:
    """The DataError in the chain of causes; for other errors a DataError with one line of it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DataError):
            return cause
        cause = getattr(cause, "cause", None) or cause.__cause__
    if isinstance(error, MemoryError | KeyboardInterrupt | SystemExit):
        return error
    root: BaseException = error
    while isinstance(inner := getattr(root, "cause", None), BaseException):  # Ray task errors have a `cause`
        root = inner
    lines = [line.strip() for line in str(root).splitlines() if line.strip()]
    plain = DataError(f"reading failed: {type(root).__name__}: {lines[0] if lines else 'no message'}")
    plain.__cause__ = error
    return plain


def _stalled(timeout_s: float) -> DataError:
    return DataError(
        f"no data arrived for {timeout_s:g} s",
        fix="leave CPUs free for read tasks (fewer or smaller workers, lower cpus_per_read), set reader: local, or "
        "raise stall_timeout_s if the storage is slow",
    )
