"""Compiled loops that sort rows. Import through `numba_loops.loops`. Suffixes: N ids, D values of a digit."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from rayrec._runtime.numba_loops import compiled

_ONE, _ZERO, _HALF, _LOW = nb.uint64(1), nb.uint64(0), nb.uint64(32), nb.uint64(2**32 - 1)
_DIGIT = 11  # bits that are sorted in one pass: the counts fit in the L1 cache
_TYPES = dict.fromkeys(("rows", "distinct", "order", "starts"), "int64[::1]") | {"num_rows": "int64"}
_TYPES |= dict.fromkeys(("values", "starts_L", "stops_L", "first_L"), "uint64[::1]")
_WORD, _BIT = nb.uint64(6), nb.uint64(63)  # a row's word of 64 bits, and its bit in the word


@nb.njit
def sort(key_N: Any, other_N: Any, size: Any, bits: Any, digit: Any) -> Any:
    """Sorts keys stably by `bits` bits of their upper halves; returns one of the two arrays."""
    count_D = np.empty(nb.int64(1) << digit, np.uint64)
    mask, done = (_ONE << nb.uint64(digit)) - _ONE, nb.int64(0)
    while done < bits:
        shift = _HALF + nb.uint64(done)
        count_D[:] = _ZERO
        for number in range(size):
            count_D[(key_N[number] >> shift) & mask] += _ONE
        total = _ZERO
        for value in range(count_D.size):
            count = count_D[value]
            count_D[value] = total
            total += count
        for number in range(size):
            value = (key_N[number] >> shift) & mask
            other_N[count_D[value]] = key_N[number]
            count_D[value] += _ONE
        key_N, other_N = other_N, key_N
        done += digit
    return key_N


@compiled(_TYPES)
def group(rows: Any, distinct: Any, order: Any, starts: Any) -> Any:
    """Computes the fields of `DistinctRows`, and returns the number of distinct rows.

    Args:
        rows: Fewer than 2**32 numbers below 2**32.
        distinct, order, starts: Results, as long as `rows`.
    """
    size = nb.uint64(rows.size)
    key_N, spare_N, seen = np.empty(size, np.uint64), np.empty(size, np.uint64), _ZERO
    for number in range(size):
        row = nb.uint64(rows[number])
        seen |= row
        key_N[number] = (row << _HALF) | number
    bits: Any = 0
    while seen >> nb.uint64(bits):
        bits += 1
    passes = max(1, (bits + _DIGIT - 1) // _DIGIT)
    sorted_N = sort(key_N, spare_N, size, bits, max(1, (bits + passes - 1) // passes))
    found, last = _ZERO, _LOW + _ONE  # no row
    for number in range(size):
        row = sorted_N[number] >> _HALF
        order[number] = nb.int64(sorted_N[number] & _LOW)
        if row != last:
            distinct[found], starts[found] = nb.int64(row), nb.int64(number)
            found += _ONE
            last = row
    return nb.int64(found)


@compiled(_TYPES)
def num_distinct(values: Any, starts_L: Any, stops_L: Any, first_L: Any, num_rows: Any) -> Any:
    """The number of distinct rows below `num_rows` that lookups read: ids plus the first row of their table."""
    seen, found = np.zeros((num_rows >> 6) + 1, np.uint64), _ZERO
    for lookup in range(starts_L.size):
        for pos in range(starts_L[lookup], stops_L[lookup]):
            row = values[pos] + first_L[lookup]
            word, bit = seen[row >> _WORD], row & _BIT
            found += _ONE ^ ((word >> bit) & _ONE)
            seen[row >> _WORD] = word | (_ONE << bit)
    return nb.int64(found)
