"""The compiled loop that counts the ids of each bucket of rows. Import through `numba_loops.loops`.

Suffixes as in `split_loops`.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from rayrec._runtime.numba_loops import compiled

_MAX_COMPARED = 16  # buckets up to which comparisons, vectorized over ids, are faster than a division
_CHUNK = nb.uint64(1024)  # ids that fit in the L1 cache
_BITS, _ONE = nb.uint64(32), nb.uint64(1)
_TYPES = dict.fromkeys(("first_K", "key_V", "buckets_V", "total_S"), "int64[::1]")
_TYPES |= {"values": "uint64[::1]", "block_V": "uint64[::1]", "edges_VE": "uint64[:,::1]"}
_TYPES |= {"stream_VE": "int64[:,::1]", "start": "int64", "stop": "int64"}


@nb.njit
def _compare(values: Any, pos: Any, stop: Any, edges_E: Any, buckets: Any, above_E: Any) -> None:
    """Counts the ids at or above each edge."""
    above_E[: buckets + 1] = 0
    while pos < stop:
        size = min(stop - pos, _CHUNK)
        for edge in range(1, buckets + 1):
            row, above = edges_E[edge], nb.int64(0)
            for i in range(size):
                above += nb.int64(values[pos + i] >= row)
            above_E[edge] += above
        pos += size


@nb.njit
def _divide(values: Any, pos: Any, stop: Any, rows: Any, block: Any, count_E: Any) -> Any:
    """Counts the ids of each bucket of `block` rows. Returns whether an id is outside the table's rows."""
    reciprocal = (_ONE << _BITS) // block  # multiplying by it gives the quotient, or 1 less
    while pos < stop:
        row = values[pos]
        if row >= rows:
            return True
        bucket = (row * reciprocal) >> _BITS
        count_E[bucket + nb.uint64(row - bucket * block >= block)] += 1
        pos += _ONE
    return False


@compiled(_TYPES)
def count(
    values: Any,
    first_K: Any,
    key_V: Any,
    buckets_V: Any,
    block_V: Any,
    edges_VE: Any,
    stream_VE: Any,
    total_S: Any,
    start: Any,
    stop: Any,
) -> Any:
    """Computes totals of the streams of variants `start` to `stop`, whose buckets have equal sizes.

    Returns the first variant that has an id outside its table's rows, or -1.
    """
    count_E = np.empty(edges_VE.shape[1] + 1, np.int64)
    for variant in range(start, stop):
        key, buckets = key_V[variant], buckets_V[variant]
        low, high = nb.uint64(first_K[key]), nb.uint64(first_K[key + 1])
        if buckets <= _MAX_COMPARED:
            _compare(values, low, high, edges_VE[variant], buckets, count_E)
            if count_E[buckets] > 0:
                return variant
            count_E[0] = nb.int64(high - low)
            for bucket in range(buckets):
                total_S[stream_VE[variant, bucket]] = count_E[bucket] - count_E[bucket + 1]
        else:
            count_E[:] = 0
            if _divide(values, low, high, edges_VE[variant, buckets], block_V[variant], count_E):
                return variant
            for bucket in range(buckets):
                total_S[stream_VE[variant, bucket]] = count_E[bucket]
    return -1
