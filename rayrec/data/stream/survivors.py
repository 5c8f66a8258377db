"""Decides whether filters are read first: how many row groups have a row that passes, as measured in this process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rayrec.data.arrays.buffers import Mask
from rayrec.data.source.filters import Condition
from rayrec.data.source.slices import FileSlice

# Reading the columns of the filters first costs up to a sixth of a window, so few row groups must pass.
_FEW = 0.6
_NEWEST = 0.2  # weight of a window


class Survivors:
    """The share of row groups with a row that passes, as a moving average over windows."""

    def __init__(self) -> None:
        self._share = 1.0

    @property
    def are_few(self) -> bool:
        """Whether it pays to read the columns of the filters first, and the others where a row passes."""
        return self._share < _FEW

    def note(self, passes: npt.NDArray[np.bool_]) -> None:
        """Add a window: whether each of its row groups has a row that passes."""
        if len(passes):
            self._share += _NEWEST * (float(passes.mean()) - self._share)


@lru_cache(64)
def survivors_of(filters: Sequence[Condition], negative_rate: float) -> Survivors:
    """What this process has measured with these filters."""
    return Survivors()


def slices_that_pass(slices: Sequence[FileSlice], mask: Mask) -> npt.NDArray[np.bool_]:
    """[S], whether each slice has a row of the mask, which covers all slices in their order."""
    starts = np.cumsum([0, *(item.rows for item in slices)])[:-1]
    return np.logical_or.reduceat(mask, starts)
