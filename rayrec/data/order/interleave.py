"""One sequence of the rows of several windows: each window's come in their own order, as evenly as their number allows.

The k-th of n rows stands at (2k + 1) / 2n of the way (Webster, Sainte-Laguë), equal ones in the order of their windows,
so every stretch has its share of each window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def positions(sizes: Sequence[int], number: int) -> I64:
    """Where in the sequence the rows of one window come, ascending.

    Args:
        sizes: rows of each window; number: which of them.
    """
    mine = sizes[number]
    row = np.arange(mine)
    found, odd = row.copy(), 2 * row + 1
    before, after = Counter(sizes[:number]), Counter(sizes[number + 1 :])
    for size in before.keys() | after.keys():
        # Row k of another window comes first where (2k + 1) mine < (2 row + 1) size; where equal, if its window does.
        if size == mine:
            found += row * (before[size] + after[size]) + before[size]
        else:
            over = odd * size - mine
            found += before[size] * (over // (2 * mine) + 1) + after[size] * -(-over // (2 * mine))
    return found
