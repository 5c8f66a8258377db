"""Spreads the ids of a vocabulary over the rows of a table.

A vocabulary lists the most frequent id first, and a table that is cut by rows is cut into blocks. In the vocabulary's
order, the first rank would get most lookups. Position k gets row `k * multiplier mod size` instead. The multiplier is
about size / golden ratio: any block of rows then gets its share of the first m ids, for every m, up to a few ids
(Steinhaus' three-gap theorem; Knuth, The Art of Computer Programming, 6.4). It is coprime to size, so no two positions
share a row.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from rayrec.data.arrays.buffers import I64
from rayrec.data.mapping.rules import Vocabulary

# 2^32 / golden ratio, rounded. An integer, so that C++ (deploy/cpp/spread.h) computes the same.
_GOLDEN = 2_654_435_769


@lru_cache(maxsize=1024)
def multiplier(size: int) -> int:
    """The first number from `size` / golden ratio on that is coprime to `size`, which is at most 2^32."""
    number = size * _GOLDEN >> 32
    while math.gcd(number, size) != 1:
        number += 1
    return number


def vocabulary_rows(positions: I64, mapping: Vocabulary) -> I64:
    """The table rows of ids at these positions of a vocabulary. Positions of unknown ids, below 0, stay as they are.

    Positions from `spread_over` on, which a grown table may have, keep their order.
    """
    size = (mapping.spread_over or 0) - mapping.oov_rows
    if size <= 1:
        return positions + np.where(positions < 0, 0, mapping.oov_rows)
    inside = positions.view(np.uint64) < size
    # Both factors are below 2^32, so the product fits 64 bits. The product of an unknown id is discarded.
    spread = (positions.view(np.uint64) * np.uint64(multiplier(size)) % np.uint64(size)).view(np.int64)
    rows = np.where(inside, spread, positions)
    return rows + np.where(positions < 0, 0, mapping.oov_rows)
