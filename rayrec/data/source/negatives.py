"""Negative down-sampling: training reads all positives and a drawn part of the negatives.

What this does to predictions, and how it is undone, is `rayrec.train`'s matter.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec.data.mapping.arrow_types import floats_of
from rayrec.data.mapping.hashing import mix64_array, seed_of

_NEGATIVES = 3  # keeps these draws apart from the orders of windows and rows for one seed


def draw(
    label: pa.ChunkedArray, rate: float, *, seed: int, epoch: int, window: int, first: int
) -> npt.NDArray[np.bool_]:
    """For every row of (a part of) a window whether it is read.

    A negative is kept with probability `rate`, by a hash of its place in the data set, the seed and the epoch: whatever
    the ranks and wherever a run goes on it is the same rows, and another epoch draws others. Rows whose label is not 0,
    bad ones among them, are all kept.

    Args:
        label: of the rows, any type of number.
        first: the place of the first of them in the window.
    """
    numbers = floats_of(label.combine_chunks())
    draws = mix64_array(np.arange(first, first + len(numbers)), seed_of(seed, epoch, _NEGATIVES, window))
    mask: npt.NDArray[np.bool_] = (numbers != 0) | (draws < np.uint64(int(rate * 2**64)))
    return mask
