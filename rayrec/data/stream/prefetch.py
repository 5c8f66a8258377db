"""A bounded prefetch thread: it passes errors and the end on to the consumer."""

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
    """When a source last gave something, be it something of which nothing is left for the consumer."""

    def __init__(self) -> None:
        self.last_s = time.monotonic()

    def watch(self, items: Generator[T]) -> Generator[T]:
        """The items, whose arrival is noted; closing this closes their iterator."""
        with closing(items):
            for item in items:
                self.last_s = time.monotonic()
                yield item


class Prefetcher(Generic[T]):
    """Runs a generator in a thread, a few items ahead of who takes them.

    Args:
        source: of what the generator is fed with: an item may take long while that goes on.
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
        """The next item; raises what the generator raised, StopIteration at its end."""
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
        """All items that are left."""
        while True:
            try:
                item = self.take(timeout_s)
            except StopIteration:
                return
            yield item

    def _wait(self, timeout_s: float) -> _Item[T] | BaseException | None:
        """The next of the queue; `_STALLED` when nothing comes."""
        begun_s = time.monotonic()
        while True:
            try:
                return self._items.get(timeout=min(_TICK_S, timeout_s))
            except queue.Empty:
                active_s = begun_s if self._source is None else max(begun_s, self._source.last_s)
                if time.monotonic() > active_s + timeout_s:
                    return _STALLED

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Ends the thread; what it had ready is dropped. A thread that waits for a dead source is left to itself."""
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
        except BaseException as error:  # raised in the consumer, whatever it is
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
    """The error itself where it is ours, else one line about it: a consumer wants no foreign stack traces."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DataError):
            return cause
        cause = getattr(cause, "cause", None) or cause.__cause__
    if isinstance(error, MemoryError | KeyboardInterrupt | SystemExit):
        return error
    root: BaseException = error
    while isinstance(inner := getattr(root, "cause", None), BaseException):  # what failed inside a Ray task
        root = inner
    lines = [line.strip() for line in str(root).splitlines() if line.strip()]
    plain = DataError(f"reading failed: {type(root).__name__}: {lines[0] if lines else 'no message'}")
    plain.__cause__ = error
    return plain


def _stalled(timeout_s: float) -> DataError:
    return DataError(
        f"no data arrived for {timeout_s:g} s",
        fix="leave CPUs free for read tasks (fewer or smaller workers, a lower cpus_per_read), "
        "set reader: local, or raise stall_timeout_s if the storage is slow",
    )
