"""How the ids of a table are distributed over its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BUCKETS = 4096


@dataclass(frozen=True, slots=True)
class RowLoad:
    """Shares of the lookups of equal blocks of rows.

    Args:
        cumulated: `cumulated[k]` is the share of the first k of n blocks, from 0 to 1; n + 1 numbers.
    """

    cumulated: tuple[float, ...]

    @classmethod
    def of(cls, loads: Sequence[NDArray[np.float64]]) -> RowLoad | None:
        """The load of features that have equally many ids; None without ids.

        Args:
            loads: for each feature, the number of its ids in each of equally many blocks; without ids, it is left out.
        """
        shares = [load / load.sum() for load in loads if load.sum() > 0]
        if not shares:
            return None
        return cls((0.0, *np.minimum(np.mean(shares, axis=0).cumsum(), 1.0).tolist()))

    def share(self, start: int, stop: int, rows: int) -> float:
        """The share of the rows `[start, stop)` of a table with `rows` rows. Inside a block, ids are taken as even."""
        n = len(self.cumulated) - 1
        first, last = np.interp([start / rows * n, stop / rows * n], np.arange(n + 1), self.cumulated)
        return float(last - first)

    def worst(self, block: int, rows: int) -> float:
        """The highest share of a block, if the rows are cut into blocks of `block` rows."""
        return max(self.share(start, min(rows, start + block), rows) for start in range(0, rows, block))
