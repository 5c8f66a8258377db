"""One sequence of the rows of several windows: each window's come in their own order, as evenly as their number allows.

The k-th of n rows stands at (2k + 1) / 2n of the way (Webster, Sainte-Laguë), equal ones in the order of their windows,
so every stretch has its share of each window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def positions(sizes: Sequence[int], number: int) -> I64:
    """Where in the sequence the rows of one window come, ascending.

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
