"""The order of an epoch's rows and how they are dealt to ranks: pure functions of seed, epoch, windows, what is done.

An epoch is one sequence of all rows: the windows in a seeded order, each window's rows in a seeded order of their own.
Work, done or to do, is always a set of intervals of that sequence, so nothing here depends on a number of ranks for
longer than one deal. Reading rows is `stream/reading.py`'s work.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rayrec.data.mapping.hashing import mix64_array, seed_of

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]
I64 = npt.NDArray[np.int64]

_WINDOWS, _ROWS = 1, 2  # keep the two kinds of shuffle apart for one seed


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The sequence of one epoch.

    Args:
        windows: window numbers in the order of the epoch, [W].
        starts: where each of them starts in the sequence, and its end, [W + 1].
        passes: how often the sequence goes over all windows; in pass `p` window `w` of `n` has the number `p * n + w`.
    """

    windows: I64
    starts: I64
    passes: int = 1

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    @classmethod
    def of(cls, window_rows: Sequence[int], *, seed: int, epoch: int, shuffle: bool, passes: int = 1) -> EpochOrder:
        """The order of `epoch` over windows of these sizes; the given order unless `shuffle`. Each pass has an order of
        its own, which does not depend on how many passes follow."""
        sizes = np.asarray(window_rows, dtype=np.int64)
        n = len(sizes)

        def one(number: int) -> I64:
            later = [number] if number else []
            return _permutation(n, seed_of(seed, epoch, _WINDOWS, *later)) if shuffle else np.arange(n)

        order = np.concatenate([one(number) + number * n for number in range(passes)])
        starts = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(sizes[order % n], out=starts[1:])
        return cls(order, starts, passes)

    def place(self, position: int) -> tuple[int, int]:
        """(window number, offset inside it) of a position in the sequence."""
        index = int(np.searchsorted(self.starts, position, side="right")) - 1
        return int(self.windows[index]), position - int(self.starts[index])


def row_order(window: int, rows: int, *, seed: int, epoch: int) -> I64:
    """The seeded order of one window's rows: `order[k]` is the row that comes k-th."""
    return _permutation(rows, seed_of(seed, epoch, _ROWS, window))


def _permutation(size: int, seed: int) -> I64:
    """Indices sorted by 32 bits of their hashes, equal ones in their order: two stable radix sorts of 16 bits each."""
    hashes = mix64_array(np.arange(size, dtype=np.int64), seed) >> np.uint64(32)
    by_low = np.argsort(hashes.astype(np.uint16), kind="stable")
    high = (hashes >> np.uint64(16)).astype(np.uint16)
    return by_low[np.argsort(high[by_low], kind="stable")]


def union(intervals: Iterable[Interval]) -> Intervals:
    """The same positions as sorted intervals that neither overlap nor touch; empty ones vanish."""
    merged: list[Interval] = []
    for start, stop in sorted(i for i in intervals if i[0] < i[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def subtract(pieces: Iterable[Interval], done: Intervals) -> list[Interval]:
    """The parts of `pieces`, in their order, that `done` (from `union`) does not cover."""
    stops = [stop for _, stop in done]
    rest: list[Interval] = []
    for start, stop in pieces:
        index = int(np.searchsorted(stops, start, side="right"))
        while start < stop:
            hole = done[index] if index < len(done) else (stop, stop)
            if start < hole[0]:
                rest.append((start, min(stop, hole[0])))
            start, index = max(start, hole[1]), index + 1
    return rest


def count(intervals: Iterable[Interval]) -> int:
    """How many positions the intervals hold together."""
    return sum(stop - start for start, stop in intervals)


def deal(order: EpochOrder, done: Intervals, world_size: int) -> list[list[Interval]]:
    """What is left of the epoch as one list of pieces per rank, each piece inside one window, pass after pass.

    Ranks' rows differ by at most one, in a pass and in all: who has one more goes round from pass to pass.
    """
    windows = len(order.windows) // order.passes
    dealt: list[list[Interval]] = [[] for _ in range(world_size)]
    first = 0  # the rank that begins where the pass before ended
    for number in range(order.passes):
        starts = order.starts[number * windows : (number + 1) * windows + 1].tolist()
        pieces = subtract(((a, b) for a, b in pairwise(starts) if a < b), done)
        for rank, mine in enumerate(_deal(pieces, world_size)):
            dealt[(rank + first) % world_size] += mine
        first = (first + count(pieces)) % world_size
    return dealt


def _deal(pieces: Sequence[Interval], world_size: int) -> list[list[Interval]]:
    """The pieces as one list per rank, whose rows differ by at most one.

    Windows go whole to the rank with the fewest rows while they fit; only the few
    that fit nowhere are cut, so almost every window is read by one rank.
    """
    share, extra = divmod(count(pieces), world_size)
    room = [share + (rank < extra) for rank in range(world_size)]
    dealt: list[list[Interval]] = [[] for _ in range(world_size)]
    heap = [(-free, rank) for rank, free in enumerate(room)]
    heapq.heapify(heap)
    left_over: list[Interval] = []
    for start, stop in pieces:
        rank = heap[0][1]
        if stop - start > room[rank]:
            left_over.append((start, stop))
            continue
        dealt[rank].append((start, stop))
        room[rank] -= stop - start
        heapq.heapreplace(heap, (-room[rank], rank))
    rank = 0
    for start, stop in left_over:
        while start < stop:
            while not room[rank]:
                rank += 1
            cut = min(stop, start + room[rank])
            dealt[rank].append((start, cut))
            room[rank] -= cut - start
            start = cut
    return dealt


def dealt(batch_size: int, rank: int, world_size: int) -> int:
    """The rows of one rank in a batch of all ranks together."""
    return batch_size // world_size + (rank < batch_size % world_size)
