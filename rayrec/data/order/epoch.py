"""The order of an epoch's rows and how they are dealt to ranks: pure functions of seed, epoch, windows, what is done.

An epoch is one sequence of all rows: the windows in a seeded order, the rows of one window, or of several that are
mixed, in a seeded order of their own.
Work, done or to do, is always a set of intervals of that sequence, so nothing here depends on a number of ranks for
longer than one deal. Reading rows is `stream/reading.py`'s work.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
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
    """The sequence of one epoch: blocks of windows whose rows come mixed, in groups that one rank reads as a whole.

    Args:
        windows: window numbers in the order of the epoch, [W].
        blocks: where each block starts in `windows`, and their end, [B + 1].
        starts: where each block starts in the sequence of rows, and its end, [B + 1].
        groups: where each group starts in `blocks`, and their end, [G + 1].
        passes: how often the sequence goes over all windows; in pass `p` window `w` of `n` has the number `p * n + w`.
    """

    windows: I64
    blocks: I64
    starts: I64
    groups: I64
    passes: int = 1

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    @classmethod
    def of(
        cls,
        window_rows: Sequence[int],
        *,
        seed: int,
        epoch: int,
        shuffle: bool,
        passes: int = 1,
        interleave: int = 1,
        runs: Sequence[int] | None = None,
    ) -> EpochOrder:
        """The order of `epoch` over windows of these sizes; the given order unless `shuffle`. Each pass has an order of
        its own, which does not depend on how many passes follow.

        Args:
            interleave: runs of windows whose rows come mixed.
            runs: lengths of the runs of windows that lie in one row group, which is decoded from its start: they follow
                each other in one group. Each window is a run of its own without.
        """
        sizes = np.asarray(window_rows, dtype=np.int64)
        lengths = np.ones(len(sizes), np.int64) if runs is None else np.asarray(runs, dtype=np.int64)
        orders, blocks, groups = [], [], []
        for number in range(passes):
            later = [number] if number else []
            seeded = _permutation(len(lengths), seed_of(seed, epoch, _WINDOWS, *later)) if shuffle else None
            order, new_block, new_group = _one_pass(lengths, seeded, interleave if shuffle else 1)
            orders.append(order + number * len(sizes))
            blocks.append(new_block)
            groups.append(new_group[new_block])
        windows = np.concatenate(orders)
        block_starts = _with_end(np.concatenate(blocks))
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[windows % max(1, len(sizes))])])
        return cls(windows, block_starts, ends[block_starts], _with_end(np.concatenate(groups)), passes)

    def place(self, position: int) -> Place:
        """Where a position of the sequence lies."""
        block = int(np.searchsorted(self.starts, position, side="right")) - 1
        group = int(np.searchsorted(self.groups, block, side="right")) - 1
        windows = self.windows[self.blocks[block] : self.blocks[block + 1]].tolist()
        return Place(tuple(windows), group, int(self.starts[block]), int(self.starts[block + 1]))


@dataclass(frozen=True, slots=True)
class Place:
    """A block: its windows, the group it belongs to, and its positions `[start, stop)` in the sequence."""

    windows: tuple[int, ...]
    group: int
    start: int
    stop: int


def _one_pass(
    runs: I64, seeded: I64 | None, interleave: int
) -> tuple[I64, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """The windows of one pass in order, and for each whether a block, and whether a group begins with it.

    Of `interleave` runs the first windows make the first block, the second ones the next, and so on.
    """
    at = np.arange(len(runs)) if seeded is None else np.argsort(seeded)
    place = np.repeat(at, runs)  # of each window's run
    inside = np.arange(len(place)) - np.repeat(np.cumsum(runs) - runs, runs)
    group = place // interleave
    order = np.lexsort((place, inside, group))
    new_group = np.diff(group[order], prepend=-1) != 0
    return order, new_group | (np.diff(inside[order], prepend=-1) != 0), new_group


def _with_end(begins: npt.NDArray[np.bool_]) -> I64:
    """The places that are true, and the end."""
    return np.append(np.flatnonzero(begins), len(begins))


def row_order(window: int, rows: int, *, seed: int, epoch: int) -> I64:
    """The seeded order of the rows of a block that starts with this window: `order[k]` is the row that comes k-th."""
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
    """What is left of the epoch as one list of pieces per rank, each piece inside one group, pass after pass.

    Ranks' rows differ by at most one, in a pass and in all: who has one more goes round from pass to pass.
    """
    edges = order.starts[order.groups]
    groups = (len(edges) - 1) // order.passes
    dealt: list[list[Interval]] = [[] for _ in range(world_size)]
    first = 0  # the rank that begins where the pass before ended
    for number in range(order.passes):
        starts = edges[number * groups : (number + 1) * groups + 1].tolist()
        pieces = subtract(((a, b) for a, b in pairwise(starts) if a < b), done)
        for rank, mine in enumerate(_deal(pieces, world_size)):
            dealt[(rank + first) % world_size] += mine
        first = (first + count(pieces)) % world_size
    return dealt


def deal_steps(order: EpochOrder, done: Intervals, rank: int, world_size: int, batch_rows: int) -> list[Interval]:
    """This rank's part of every step when steps go along the sequence: no row of a step comes before one of an earlier.

    Args:
        batch_rows: rows of a step, of all ranks together; the last step may have fewer.
    """
    left = subtract([(0, order.rows)], done)
    mine: list[Interval] = []
    for first, size in steps_of(count(left), batch_rows):
        start = first + sum(dealt(size, other, world_size) for other in range(rank))
        mine += _inside(left, start, start + dealt(size, rank, world_size))
    return mine


def steps_of(rows: int, batch_rows: int) -> Iterator[tuple[int, int]]:
    """Where each step starts, and its rows."""
    return ((first, min(batch_rows, rows - first)) for first in range(0, rows, batch_rows))


def _inside(pieces: Sequence[Interval], start: int, stop: int) -> Iterator[Interval]:
    """The positions `[start, stop)` of those that the pieces hold, counted from 0."""
    at = 0
    for first, last in pieces:
        a, b = max(start - at, 0), min(stop - at, last - first)
        if a < b:
            yield first + a, first + b
        at += last - first


def _deal(pieces: Sequence[Interval], world_size: int) -> list[list[Interval]]:
    """The pieces as one list per rank, whose rows differ by at most one.

    Groups go whole to the rank with the fewest rows while they fit; only the few
    that fit nowhere are cut, so almost every one is read by one rank.
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
