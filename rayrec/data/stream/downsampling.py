"""Down-sampling of negatives: `data.negative_rate`."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from rayrec.data.arrays.arrow_types import floats_of
from rayrec.data.arrays.buffers import Mask
from rayrec.data.arrays.hashing import mix64_array, seed_of

# Seed of these draws; the order of an epoch uses 1 and 2.
_NEGATIVES = 3


def keep_mask(label: pa.ChunkedArray, rate: float, *, seed: int, epoch: int, window: int, first: int) -> Mask:
    """True for every row of (a range of) a window that is read: all positives, and negatives with probability `rate`.

    The draw hashes the row's position in the window, the seed and the epoch. It does not depend on the number of ranks
    or on resumption, and differs from epoch to epoch. Rows with a label other than 0 are kept, including
    invalid labels.

    Args:
        label: labels of the rows, numbers of any type.
        first: position of the first row in the window.
    """
    labels = floats_of(label.combine_chunks())
    draws = mix64_array(np.arange(first, first + len(labels)), seed_of(seed, epoch, _NEGATIVES, window))
    mask: Mask = (labels != 0) | (draws < np.uint64(int(rate * 2**64)))
    return mask
