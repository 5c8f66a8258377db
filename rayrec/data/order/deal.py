"""Divides an epoch among ranks: a pure function of the order, the sample ranges done, and the number of ranks."""

from __future__ import annotations

import heapq

import numpy as np

from rayrec.data.arrays.buffers import I64
from rayrec.data.order.epoch import EpochOrder
from rayrec.data.order.intervals import Intervals, Spans, between, count, inside

_AT_ONCE = 1 << 16


def deal(order: EpochOrder, done: Intervals, world_size: int, span: tuple[int, int] | None = None) -> list[Spans]:
    """Divides the rest of the epoch: for each rank its sample ranges, each inside one group, pass after pass.

    Row counts of ranks differ by at most one, per pass and in total: the extra rows rotate over ranks between passes.

    Args:
        span: the rows of the sequence that the epoch has, of a single pass; None: all.
    """
    edges = order.starts[order.groups]
    if span is not None:
        edges = np.clip(edges, *span)
    groups = (len(edges) - 1) // order.passes
    ranges_by_rank: list[list[Spans]] = [[] for _ in range(world_size)]
    first_rank = 0  # the first rank of this pass continues after the last rank of the previous one
    for number in range(order.passes):
        ranges = between(edges[number * groups : (number + 1) * groups + 1], done)
        for rank, own_ranges in enumerate(_deal(ranges, world_size)):
            ranges_by_rank[(rank + first_rank) % world_size].append(own_ranges)
        first_rank = (first_rank + count(ranges)) % world_size
    return [np.concatenate(own_ranges) for own_ranges in ranges_by_rank]


def deal_steps(
    order: EpochOrder,
    done: Intervals,
    rank: int,
    world_size: int,
    step_rows: int,
    span: tuple[int, int] | None = None,
) -> Spans:
    """The sample ranges of a rank when every global batch is a contiguous range of the sequence.

    Args:
        step_rows: rows of a global batch; the last one may have fewer.
        span: as in `deal`.
    """
    remaining = between(span or (0, order.rows), done)
    firsts = np.arange(0, count(remaining), step_rows)
    sizes = np.minimum(step_rows, count(remaining) - firsts)
    share, extra = sizes // world_size, sizes % world_size
    starts = firsts + rank * share + np.minimum(rank, extra)
    spans = np.stack([starts, starts + share + (rank < extra)], axis=1)
    return inside(remaining, spans[spans[:, 0] < spans[:, 1]])


def _deal(ranges: Spans, world_size: int) -> list[Spans]:
    """Distributes ranges over ranks so that row counts differ by at most one.

    Each range goes to the rank with the most free rows. The few that do not fit anywhere are cut at the end, so that
    one rank reads almost every group alone.
    """
    share, extra = divmod(count(ranges), world_size)
    free_rows = [share + (rank < extra) for rank in range(world_size)]
    owner = _owners(ranges[:, 1] - ranges[:, 0], free_rows)
    by_owner = np.argsort(owner, kind="stable")
    bounds = np.searchsorted(owner[by_owner], np.arange(-1, world_size + 1))
    uncut = [ranges[by_owner[bounds[rank + 1] : bounds[rank + 2]]] for rank in range(world_size)]
    cut: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    rank = 0
    for start, stop in ranges[owner < 0].tolist():
        while start < stop:
            while not free_rows[rank]:
                rank += 1
            end = min(stop, start + free_rows[rank])
            cut[rank].append((start, end))
            free_rows[rank] -= end - start
            start = end
    return [np.concatenate([ranges, pieces]) if pieces else ranges for ranges, pieces in zip(uncut, cut, strict=True)]


def _owners(sizes: I64, free_rows: list[int]) -> I64:
    """The rank of each range, -1 if it does not fit anywhere. Subtracts the rows from `free_rows`."""
    heap = [(-free, rank) for rank, free in enumerate(free_rows)]
    heapq.heapify(heap)
    owner = np.full(len(sizes), -1, dtype=np.int64)
    for start in range(0, len(sizes), _AT_ONCE):
        owners = []
        for rows in sizes[start : start + _AT_ONCE].tolist():
            rank = heap[0][1]
            if rows > free_rows[rank]:
                owners.append(-1)
                continue
            free_rows[rank] -= rows
            heapq.heapreplace(heap, (-free_rows[rank], rank))
            owners.append(rank)
        owner[start : start + len(owners)] = owners
    return owner
