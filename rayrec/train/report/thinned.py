"""Lines of a log of any length in bounded memory: all of a short one, an even choice of a long one and its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Thinned(Generic[T]):
    """Takes items one by one; keeps up to `most` evenly spaced ones, the first among them, and the last `tail`."""

    def __init__(self, most: int, tail: int = 1) -> None:
        self._most, self._stride, self.seen = most, 1, 0
        self._kept: list[tuple[int, T]] = []
        self._last: deque[tuple[int, T]] = deque(maxlen=tail)

    def add(self, item: T) -> None:
        if self.seen % self._stride == 0:
            self._kept.append((self.seen, item))
            if len(self._kept) > self._most:
                self._kept, self._stride = self._kept[::2], 2 * self._stride
        self._last.append((self.seen, item))
        self.seen += 1

    def __iter__(self) -> Iterator[T]:
        tail = self._last[0][0] if self._last else 0
        yield from (item for place, item in self._kept if place < tail)
        yield from (item for _, item in self._last)
