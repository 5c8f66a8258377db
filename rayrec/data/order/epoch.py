"""The order of an epoch: a pure function of seed, epoch and windows. `deal.py` divides it among ranks.

An epoch is one sequence of all rows: windows in a seeded order, and the rows of a window, or of several interleaved
windows, in a seeded order. Progress is a set of sample ranges of that sequence, so it does not depend on the number of
ranks.
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

# Seeds of independent draws; `stream/downsampling.py` uses 3.
_WINDOWS, _ROWS = 1, 2


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The sequence of an epoch.

    A block is one or more windows with interleaved rows. A group is one or more blocks that one rank should read.

    Args:
        windows: window numbers in the order of the epoch, [W].
        blocks: offsets of the blocks in `windows`, [B + 1].
        starts: offsets of the blocks in the sequence of rows, [B + 1].
        groups: offsets of the groups in `blocks`, [G + 1].
        passes: passes over all windows; in pass `p`, window `w` of `n` has the number `p * n + w`.
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
        """The order of `epoch` over windows of these sizes; in file order unless `shuffle`.

        Each pass has another order, which does not depend on the number of passes.

        Args:
            interleave: number of runs to interleave.
            runs: lengths of the runs of windows inside one row group. A row group is decoded from its start, so the
                windows of a run follow each other in one group. Default: each window is a run.
        """
        sizes = np.asarray(window_rows, dtype=np.int64)
        lengths = np.ones(len(sizes), np.int64) if runs is None else np.asarray(runs, dtype=np.int64)
        orders, blocks, groups = [], [], []
        for number in range(passes):
            pass_seed = [number] if number else []
            seeded = _permutation(len(lengths), seed_of(seed, epoch, _WINDOWS, *pass_seed)) if shuffle else None
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
    """The windows of a pass in order, and masks of the windows that start a block, and a group.

    The k-th windows of `interleave` runs form the k-th block of a group.
    """
    run_order = np.arange(len(runs)) if seeded is None else np.argsort(seeded)
    run_position = np.repeat(run_order, runs)  # of each window
    index_in_run = np.arange(len(run_position)) - np.repeat(np.cumsum(runs) - runs, runs)
    group = np.searchsorted(_group_ends(len(runs), interleave), run_position, side="right")
    order = np.lexsort((run_position, index_in_run, group))
    new_group = np.diff(group[order], prepend=-1) != 0
    return order, new_group | (np.diff(index_in_run[order], prepend=-1) != 0), new_group


def _group_ends(runs: int, interleave: int) -> I64:
    """End of each group, in runs. With many groups, the first two are smaller, so that the first rows arrive sooner."""
    small_groups = [interleave // 4, interleave // 2] if runs >= 2 * interleave >= 8 else []
    groups = [*small_groups, *[interleave] * -(-runs // interleave)]
    return np.cumsum(groups)


def _with_end(mask: npt.NDArray[np.bool_]) -> I64:
    """The offsets of the marked positions, and the end."""
    return np.append(np.flatnonzero(mask), len(mask))


def row_order(window: int, rows: int, *, seed: int, epoch: int) -> I64:
    """The seeded order of the rows of a window: `order[k]` is the k-th row."""
    return _permutation(rows, seed_of(seed, epoch, _ROWS, window))


def _permutation(size: int, seed: int) -> I64:
    """A pseudo-random permutation: a stable sort by 32-bit hashes, in two radix passes of 16 bits."""
    hashes = mix64_array(np.arange(size, dtype=np.int64), seed) >> np.uint64(32)
    by_low = np.argsort(hashes.astype(np.uint16), kind="stable")
    high = (hashes >> np.uint64(16)).astype(np.uint16)
    return by_low[np.argsort(high[by_low], kind="stable")]


def dealt(batch_size: int, rank: int, world_size: int) -> int:
    """The rows of a rank in a global batch."""
    return batch_size // world_size + (rank < batch_size % world_size)


def steps_of(rows: int, batch_rows: int) -> Iterator[tuple[int, int]]:
    """The first row and the number of rows of each step."""
    return ((first, min(batch_rows, rows - first)) for first in range(0, rows, batch_rows))


def positions(sizes: Sequence[int], number: int) -> I64:
    """Positions of the rows of a window in the interleaved sequence of several windows, ascending.

    Windows are interleaved evenly: the k-th of n rows is at the fraction (2k + 1) / 2n of the sequence (Webster,
    Sainte-Laguë); ties are in the order of windows.

    Args:
        sizes: rows of each window.
        number: index of the window.
    """
    own_size = sizes[number]
    result = np.arange(own_size)
    earlier_sizes, later_sizes = Counter(sizes[:number]), Counter(sizes[number + 1 :])
    for size in earlier_sizes.keys() | later_sizes.keys():
        rows_if_later, rows_if_earlier = _passed(own_size, size)
        if earlier_sizes[size]:
            result += earlier_sizes[size] * rows_if_earlier
        if later_sizes[size]:
            result += later_sizes[size] * rows_if_later
    return result


@lru_cache(maxsize=8)  # windows have few distinct sizes
def _passed(own_size: int, size: int) -> tuple[I64, I64]:
    """Rows of another window of `size` rows before each row of a window of `own_size` rows.

    Returns two arrays: for another window that is later, and for one that is earlier. Row k of the other window
    precedes `row` if (2k + 1) own_size < (2 row + 1) size; with equality, if the other window is earlier.
    """
    row = np.arange(own_size)
    if size == own_size:
        return row, row + 1
    over = (2 * row + 1) * size - own_size
    return -(-over // (2 * own_size)), over // (2 * own_size) + 1
