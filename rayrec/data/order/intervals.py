"""Sets of positions of an epoch's sequence, as intervals `[start, stop)`: few as tuples, many as columns [N, 2]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]
Spans = npt.NDArray[np.int64]  # [N, 2]: start, stop


def spans(intervals: Iterable[Interval]) -> Spans:
    """The intervals in columns."""
    return np.array(list(intervals), dtype=np.int64).reshape(-1, 2)


def union(intervals: Iterable[Interval] | Spans) -> Intervals:
    """The same positions as sorted intervals that neither overlap nor touch; empty ones vanish."""
    found = intervals if isinstance(intervals, np.ndarray) else spans(intervals)
    found = found[found[:, 0] < found[:, 1]]
    if not len(found):
        return ()
    found = found[np.argsort(found[:, 0], kind="stable")]
    reached = np.maximum.accumulate(found[:, 1])
    begins = np.concatenate([[True], found[1:, 0] > reached[:-1]])
    ends = np.append(np.flatnonzero(begins)[1:], len(found)) - 1
    return tuple(zip(found[begins, 0].tolist(), reached[ends].tolist(), strict=True))


def between(edges: Sequence[int] | npt.NDArray[np.int64], done: Intervals) -> Spans:
    """What lies from the first edge to the last, cut at every edge, without what is done (from `union`)."""
    ascending = np.asarray(edges, dtype=np.int64)
    covered = spans(done)
    cuts = np.unique(np.concatenate([ascending, np.clip(covered.ravel(), ascending[0], ascending[-1])]))
    starts, stops = cuts[:-1], cuts[1:]
    last = np.searchsorted(covered[:, 0], starts, side="right") - 1
    left = (last < 0) | (starts >= np.append(covered[:, 1], 0)[last])
    return np.stack([starts[left], stops[left]], axis=1)


def count(intervals: Iterable[Interval] | Spans) -> int:
    """How many positions the intervals hold together."""
    if isinstance(intervals, np.ndarray):
        return int((intervals[:, 1] - intervals[:, 0]).sum())
    return sum(stop - start for start, stop in intervals)


def inside(sequence: Spans, wanted: Spans) -> Spans:
    """Those positions that come `wanted`-th, counted from 0, among those of `sequence`; cut where either is.

    Args:
        wanted: ascending, without overlaps.
    """
    ends = np.cumsum(sequence[:, 1] - sequence[:, 0])
    if not len(ends) or not len(wanted):
        return np.empty((0, 2), np.int64)
    begins = np.concatenate([np.zeros(1, np.int64), ends])
    cuts = np.unique(np.concatenate([begins, wanted.ravel()]))
    starts, stops = cuts[:-1], cuts[1:]
    last = np.searchsorted(wanted[:, 0], starts, side="right") - 1
    kept = (last >= 0) & (starts < wanted[last, 1]) & (starts < ends[-1])
    starts, stops = starts[kept], stops[kept]
    piece = np.searchsorted(ends, starts, side="right")
    shift = sequence[piece, 0] - begins[piece]
    return np.stack([starts + shift, stops + shift], axis=1)


def cut(sequence: Spans, rows: int) -> tuple[Spans, Spans]:
    """The first so many positions, and the others."""
    ends = np.cumsum(sequence[:, 1] - sequence[:, 0])
    place = int(np.searchsorted(ends, rows, side="right"))
    first, rest = sequence[:place].copy(), sequence[place:].copy()
    left = rows - (int(ends[place - 1]) if place else 0)
    if left and len(rest):
        cut = int(rest[0, 0]) + left
        first = np.concatenate([first, [[rest[0, 0], cut]]])
        rest[0, 0] = cut
    return first, rest
