"""The order of an epoch's rows: a pure function of seed, epoch and windows. `deal.py` deals them to ranks.

An epoch is one sequence of all rows: the windows in a seeded order, the rows of one window, or of several that are
mixed, in a seeded order of their own.
Work, done or to do, is always a set of intervals of that sequence, so nothing depends on a number of ranks for longer
than one deal. Reading rows is `stream/reading.py`'s work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rayrec.data.arrays.buffers import I64
from rayrec.data.arrays.hashing import mix64_array, seed_of

# Seeds of independent draws; 3 is that of `stream/downsampling.py`.
_WINDOWS, _ROWS = 1, 2


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
    passes: int

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    @classmethod
    def of(
        cls,
        window_rows: Sequence[int] | I64,
        *,
        seed: int,
        epoch: int,
        shuffle: bool,
        passes: int = 1,
        interleave: int = 1,
        runs: Sequence[int] | I64 | None = None,
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


def _one_pass(
    runs: I64, seeded: I64 | None, interleave: int
) -> tuple[I64, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """The windows of one pass in order, and for each whether a block, and whether a group begins with it.

    Of `interleave` runs the first windows make the first block, the second ones the next, and so on.
    """
    at = np.arange(len(runs)) if seeded is None else np.argsort(seeded)
    place = np.repeat(at, runs)  # of each window's run
    inside = np.arange(len(place)) - np.repeat(np.cumsum(runs) - runs, runs)
    group = np.searchsorted(_group_ends(len(runs), interleave), place, side="right")
    order = np.lexsort((place, inside, group))
    new_group = np.diff(group[order], prepend=-1) != 0
    return order, new_group | (np.diff(inside[order], prepend=-1) != 0), new_group


def _group_ends(runs: int, interleave: int) -> I64:
    """After how many runs each group ends. Where many groups follow, the first two are smaller: rows come sooner."""
    first = [interleave // 4, interleave // 2] if runs >= 2 * interleave >= 8 else []
    groups = [*first, *[interleave] * -(-runs // interleave)]
    return np.cumsum(groups)


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


def dealt(batch_size: int, rank: int, world_size: int) -> int:
    """The rows of one rank in a batch of all ranks together."""
    return batch_size // world_size + (rank < batch_size % world_size)


def steps_of(rows: int, batch_rows: int) -> Iterator[tuple[int, int]]:
    """Where each step starts, and its rows."""
    return ((first, min(batch_rows, rows - first)) for first in range(0, rows, batch_rows))


def positions(sizes: Sequence[int], number: int) -> I64:
    """Where in one sequence of the rows of several windows the rows of one come, ascending.

    Each window's come in their own order, as evenly as their number allows: the k-th of n rows stands at (2k + 1) / 2n
    of the way (Webster, Sainte-Laguë), equal ones in the order of their windows.

    Args:
        sizes: rows of each window; number: which of them.
    """
    mine = sizes[number]
    found = np.arange(mine)
    before, after = Counter(sizes[:number]), Counter(sizes[number + 1 :])
    for size in before.keys() | after.keys():
        first, last = _passed(mine, size)
        if before[size]:
            found += before[size] * last
        if after[size]:
            found += after[size] * first
    return found


@lru_cache(maxsize=8)  # windows are of few sizes
def _passed(mine: int, size: int) -> tuple[I64, I64]:
    """How many rows of a window of `size` come before each of a window of `mine`; if it is a later one, an earlier one.

    Row k of it comes first where (2k + 1) mine < (2 row + 1) size; where equal, if it is the earlier one.
    """
    row = np.arange(mine)
    if size == mine:
        return row, row + 1
    over = (2 * row + 1) * size - mine
    return -(-over // (2 * mine)), over // (2 * mine) + 1
