"""Which rank reads which part of an epoch: a pure function of the order, what is done, and the number of ranks."""

from __future__ import annotations

import heapq

import numpy as np

from rayrec.data.arrays.buffers import I64
from rayrec.data.order.epoch import EpochOrder
from rayrec.data.order.intervals import Intervals, Spans, between, count, inside

_AT_ONCE = 1 << 16


def deal(order: EpochOrder, done: Intervals, world_size: int) -> list[Spans]:
    """What is left of the epoch as one list of pieces per rank, each piece inside one group, pass after pass.

    Ranks' rows differ by at most one, in a pass and in all: who has one more goes round from pass to pass.
    """
    edges = order.starts[order.groups]
    groups = (len(edges) - 1) // order.passes
    parts: list[list[Spans]] = [[] for _ in range(world_size)]
    first = 0  # the rank that begins where the pass before ended
    for number in range(order.passes):
        pieces = between(edges[number * groups : (number + 1) * groups + 1], done)
        for rank, mine in enumerate(_deal(pieces, world_size)):
            parts[(rank + first) % world_size].append(mine)
        first = (first + count(pieces)) % world_size
    return [np.concatenate(mine) for mine in parts]


def deal_steps(order: EpochOrder, done: Intervals, rank: int, world_size: int, step_rows: int) -> Spans:
    """This rank's part of every step when steps go along the sequence: no row of a step comes before one of an earlier.

    Args:
        step_rows: rows of a step, of all ranks together; the last step may have fewer.
    """
    left = between([0, order.rows], done)
    firsts = np.arange(0, count(left), step_rows)
    sizes = np.minimum(step_rows, count(left) - firsts)
    share, extra = sizes // world_size, sizes % world_size
    starts = firsts + rank * share + np.minimum(rank, extra)
    mine = np.stack([starts, starts + share + (rank < extra)], axis=1)
    return inside(left, mine[mine[:, 0] < mine[:, 1]])


def _deal(pieces: Spans, world_size: int) -> list[Spans]:
    """The pieces as one list per rank, whose rows differ by at most one.

    Groups go whole to the rank with the fewest rows while they fit; only the few
    that fit nowhere are cut, so almost every one is read by one rank.
    """
    share, extra = divmod(count(pieces), world_size)
    room = [share + (rank < extra) for rank in range(world_size)]
    owner = _owners(pieces[:, 1] - pieces[:, 0], room)
    by_owner = np.argsort(owner, kind="stable")
    bounds = np.searchsorted(owner[by_owner], np.arange(-1, world_size + 1))
    some = [pieces[by_owner[bounds[rank + 1] : bounds[rank + 2]]] for rank in range(world_size)]
    cut: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    rank = 0
    for start, stop in pieces[owner < 0].tolist():
        while start < stop:
            while not room[rank]:
                rank += 1
            end = min(stop, start + room[rank])
            cut[rank].append((start, end))
            room[rank] -= end - start
            start = end
    return [np.concatenate([mine, more]) if more else mine for mine, more in zip(some, cut, strict=True)]


def _owners(sizes: I64, room: list[int]) -> I64:
    """The rank of each piece, -1 for those that fit nowhere; takes their rows off `room`."""
    heap = [(-free, rank) for rank, free in enumerate(room)]
    heapq.heapify(heap)
    owner = np.full(len(sizes), -1, dtype=np.int64)
    for first in range(0, len(sizes), _AT_ONCE):
        chosen = []
        for rows in sizes[first : first + _AT_ONCE].tolist():
            rank = heap[0][1]
            if rows > room[rank]:
                chosen.append(-1)
                continue
            room[rank] -= rows
            heapq.heapreplace(heap, (-room[rank], rank))
            chosen.append(rank)
        owner[first : first + len(chosen)] = chosen
    return owner
