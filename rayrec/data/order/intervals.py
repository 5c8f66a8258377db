"""Sample ranges: positions `[start, stop)` in the sequence of an epoch. Few as tuples, many as an array [N, 2]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]
Spans = npt.NDArray[np.int64]  # [N, 2]: start, stop


def spans(intervals: Iterable[Interval]) -> Spans:
    """The ranges as an array [N, 2]."""
    return np.array(list(intervals), dtype=np.int64).reshape(-1, 2)


def union(intervals: Iterable[Interval] | Spans) -> Intervals:
    """Merges ranges to sorted ones that neither overlap nor touch; drops empty ranges."""
    ranges = intervals if isinstance(intervals, np.ndarray) else spans(intervals)
    ranges = ranges[ranges[:, 0] < ranges[:, 1]]
    if not len(ranges):
        return ()
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    max_stop = np.maximum.accumulate(ranges[:, 1])
    is_start = np.concatenate([[True], ranges[1:, 0] > max_stop[:-1]])
    last = np.append(np.flatnonzero(is_start)[1:], len(ranges)) - 1
    return tuple(zip(ranges[is_start, 0].tolist(), max_stop[last].tolist(), strict=True))


def between(edges: Sequence[int] | npt.NDArray[np.int64], done: Intervals) -> Spans:
    """The range from the first edge to the last without `done` (from `union`), cut at every edge."""
    ascending = np.asarray(edges, dtype=np.int64)
    done_ranges = spans(done)
    cuts = np.unique(np.concatenate([ascending, np.clip(done_ranges.ravel(), ascending[0], ascending[-1])]))
    starts, stops = cuts[:-1], cuts[1:]
    preceding = np.searchsorted(done_ranges[:, 0], starts, side="right") - 1
    remaining = (preceding < 0) | (starts >= np.append(done_ranges[:, 1], 0)[preceding])
    return np.stack([starts[remaining], stops[remaining]], axis=1)


def count(intervals: Iterable[Interval] | Spans) -> int:
    """Total number of positions in the ranges."""
    if isinstance(intervals, np.ndarray):
        return int((intervals[:, 1] - intervals[:, 0]).sum())
    return sum(stop - start for start, stop in intervals)


def inside(sequence: Spans, selected: Spans) -> Spans:
    """Selects positions by rank: the ranges of `selected`, counted along the ranges of `sequence`.

    Args:
        selected: ascending, without overlaps.
    """
    ends = np.cumsum(sequence[:, 1] - sequence[:, 0])
    if not len(ends) or not len(selected):
        return np.empty((0, 2), np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), ends])
    cuts = np.unique(np.concatenate([offsets, selected.ravel()]))
    starts, stops = cuts[:-1], cuts[1:]
    preceding = np.searchsorted(selected[:, 0], starts, side="right") - 1
    mask = (preceding >= 0) & (starts < selected[preceding, 1]) & (starts < ends[-1])
    starts, stops = starts[mask], stops[mask]
    source = np.searchsorted(ends, starts, side="right")
    shift = sequence[source, 0] - offsets[source]
    return np.stack([starts + shift, stops + shift], axis=1)


def cut(sequence: Spans, rows: int) -> tuple[Spans, Spans]:
    """Splits the ranges after the first `rows` positions."""
    ends = np.cumsum(sequence[:, 1] - sequence[:, 0])
    index = int(np.searchsorted(ends, rows, side="right"))
    head, tail = sequence[:index].copy(), sequence[index:].copy()
    remaining = rows - (int(ends[index - 1]) if index else 0)
    if remaining and len(tail):
        position = int(tail[0, 0]) + remaining
        head = np.concatenate([head, [[tail[0, 0], position]]])
        tail[0, 0] = position
    return head, tail
