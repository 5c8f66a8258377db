"""Compiled loops that split ids by the ranks that hold their rows. Import through `numba_loops.loops`.

Each id costs one read to find its bucket of rows, and a read and a write to move it. With up to eight buckets of equal
size, the counts of a bag are the bytes of one register, and so are the offsets of the next 255 ids: no loop reads what
it has just written. Suffixes: K keys of the input, V variants (see `routes`), S streams, B bags of a key, N ids. `pos`
is a position in the input's ids, `slot` one in `bucket_N`.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from rayrec._runtime.numba_loops import compiled

_ANY = nb.uint64(2**63 - 1)
_ONE, _BYTE, _FEW = nb.uint64(1), nb.uint64(255), nb.uint64(8)
_BITS = nb.uint64(32)  # ids of tables with equal buckets fit in 32 bits
_TYPES = dict.fromkeys(("values", "rows_K", "block_V", "first_S", "out"), "uint64[::1]")
_TYPES |= dict.fromkeys(("first_K", "key_V", "buckets_V", "first_V", "total_S", "total_K"), "int64[::1]")
_TYPES |= dict.fromkeys(("origins", "shift_V"), "int64[::1]")
_TYPES |= {
    "lengths_KB": "int32[:,::1]",
    "lengths_SB": "int32[:,::1]",
    "edges_VE": "uint64[:,::1]",
    "bucket_N": "uint16[::1]",
}
_TYPES |= {"stream_VE": "int64[:,::1]", "pair_CC": "int64[:,::1]", "start": "int64", "stop": "int64"}
_TYPES |= {"weights": "float32[::1]", "out_weights": "float32[::1]"}


def _check(lengths_KB: Any, rows_K: Any, values: Any, total_K: Any) -> Any:
    """Sums the lengths of each key, and checks ids and lengths.

    Keys whose number of rows is the largest int64 are not checked. Negative ids are larger than any row as unsigned
    numbers.

    Returns:
        -1 if a length is negative; else 1 if an id of some key is not a row, and 0 if not.
    """
    signs, num_ids = nb.int64(0), nb.int64(0)  # `or` is vectorized, a minimum of 64 bits is not
    for key in range(total_K.size):
        total = nb.int64(0)
        for bag in range(lengths_KB.shape[1]):
            length = nb.int64(lengths_KB[key, bag])
            total += length
            signs |= length
        total_K[key] = total
        num_ids += total
    if signs < 0:
        return nb.int64(-1)
    if num_ids != values.size:  # lengths are no positions
        return nb.int64(0)
    start = nb.uint64(0)
    for key in range(total_K.size):
        rows, outside, stop = rows_K[key], False, start + nb.uint64(total_K[key])
        if rows != _ANY:
            for pos in range(start, stop):
                outside |= values[pos] >= rows
            if outside:
                return nb.int64(1)
        start = stop
    return nb.int64(0)


CHECKS = {np.dtype(name): compiled(_TYPES | {"lengths_KB": f"{name}[:,::1]"})(_check) for name in ("int32", "int64")}


@nb.njit
def _divide(values: Any, pos: Any, stop: Any, rows: Any, block: Any, slot: Any, bucket_N: Any) -> Any:
    """Finds the bucket of each id in buckets of `block` rows. Returns whether an id is outside the table's rows."""
    outside = False
    reciprocal = (_ONE << _BITS) // block  # multiplying by it gives the quotient, or 1 less
    for i in range(stop - pos):
        row = values[pos + i]
        outside |= row >= rows
        bucket = (row * reciprocal) >> _BITS
        bucket_N[slot + i] = nb.uint16(bucket + nb.uint64(row - bucket * block >= block))
    return outside


@nb.njit
def _pack(lengths_B: Any, slot: Any, bucket_N: Any, packed_B: Any) -> Any:
    """Packs the counts of each bag in the bytes of a number, 0 for over 255 ids. Returns whether every bag has 1 id."""
    one_each = True
    for bag in range(nb.uint64(lengths_B.size)):
        one_each &= lengths_B[bag] == 1
    if one_each:
        return True
    for bag in range(nb.uint64(lengths_B.size)):
        length, packed = nb.uint64(lengths_B[bag]), nb.uint64(0)
        for pos in range(slot, slot + length):
            packed += _ONE << (nb.uint64(bucket_N[pos]) * _FEW)
        slot += length
        packed_B[bag] = packed if length <= _BYTE else nb.uint64(0)
    return False


@nb.njit
def _count_long(lengths_B: Any, slot: Any, bucket_N: Any, stream_E: Any, lengths_SB: Any, total_S: Any) -> None:
    """Adds the counts of bags of more than 255 ids."""
    for bag in range(nb.uint64(lengths_B.size)):
        length = nb.uint64(lengths_B[bag])
        stop = slot + length
        while length > _BYTE and slot < stop:
            packed = nb.uint64(0)
            for pos in range(slot, min(stop, slot + _BYTE)):
                packed += _ONE << (nb.uint64(bucket_N[pos]) * _FEW)
            bucket = nb.uint64(0)
            while packed:
                lengths_SB[stream_E[bucket], bag] += nb.int32(packed & _BYTE)
                total_S[stream_E[bucket]] += nb.int64(packed & _BYTE)
                packed >>= _FEW
                bucket += _ONE
            slot += _BYTE
        slot = stop


@nb.njit
def _find(values: Any, pos: Any, stop: Any, edges_E: Any, buckets: Any, slot: Any, bucket_N: Any) -> Any:
    """Finds the bucket of each id by row edges. Returns whether an id is outside them."""
    outside = False
    while pos < stop:
        low, high = nb.uint64(0), nb.uint64(buckets)
        while high - low > _ONE:
            middle = (low + high) >> _ONE
            if values[pos] < edges_E[middle]:
                high = middle
            else:
                low = middle
        outside |= values[pos] >= edges_E[buckets]
        bucket_N[slot] = nb.uint16(low)
        pos += _ONE
        slot += _ONE
    return outside


@compiled(_TYPES)
def count(
    values: Any,
    lengths_KB: Any,
    first_K: Any,
    key_V: Any,
    buckets_V: Any,
    block_V: Any,
    edges_VE: Any,
    stream_VE: Any,
    first_V: Any,
    lengths_SB: Any,
    total_S: Any,
    bucket_N: Any,
    start: Any,
    stop: Any,
) -> Any:
    """Computes lengths and totals of the streams of variants `start` to `stop`, and the bucket of each of their ids.

    Returns the first variant that is cut and has an id outside its table's rows, or -1.
    """
    num_bags = nb.uint64(lengths_KB.shape[1])
    packed_B = np.empty(num_bags, np.uint64)
    for variant in range(start, stop):
        key, buckets = key_V[variant], buckets_V[variant]
        pos, slot = nb.uint64(first_K[key]), nb.uint64(first_V[variant])
        if buckets == 1:
            stream = stream_VE[variant, 0]
            for bag in range(num_bags):
                lengths_SB[stream, bag] = lengths_KB[key, bag]
            total_S[stream] = first_K[key + 1] - first_K[key]
        elif block_V[variant] and buckets <= 8:
            rows = edges_VE[variant, buckets]
            if _divide(values, pos, nb.uint64(first_K[key + 1]), rows, block_V[variant], slot, bucket_N):
                return variant
            one_each = _pack(lengths_KB[key], slot, bucket_N, packed_B)
            for bucket in range(buckets):
                shift, total, out_B = _FEW * nb.uint64(bucket), nb.int32(0), lengths_SB[stream_VE[variant, bucket]]
                if one_each:
                    for bag in range(num_bags):
                        length = nb.int32(bucket_N[slot + bag] == bucket)
                        out_B[bag] = length
                        total += length
                else:
                    for bag in range(num_bags):
                        length = nb.int32((packed_B[bag] >> shift) & _BYTE)
                        out_B[bag] = length
                        total += length
                total_S[stream_VE[variant, bucket]] = total
            if not one_each:
                _count_long(lengths_KB[key], slot, bucket_N, stream_VE[variant], lengths_SB, total_S)
        else:
            if _find(values, pos, nb.uint64(first_K[key + 1]), edges_VE[variant], buckets, slot, bucket_N):
                return variant
            for bucket in range(buckets):
                stream = stream_VE[variant, bucket]
                total_S[stream] = 0
                for bag in range(num_bags):
                    lengths_SB[stream, bag] = 0
            for bag in range(num_bags):
                for _ in range(lengths_KB[key, bag]):
                    stream = stream_VE[variant, bucket_N[slot]]
                    lengths_SB[stream, bag] += 1
                    total_S[stream] += 1
                    slot += _ONE
    return -1


@nb.njit
def _copy_whole(
    values: Any, weights: Any, pos: Any, size: Any, rows: Any, out: Any, out_weights: Any, origins: Any, first: Any,
    shift: Any,
) -> Any:  # fmt: skip
    """Copies a feature's ids to one stream, from index `first`. Returns whether an id is outside the table's rows."""
    outside = False
    for i in range(size):
        row = values[pos + i]
        outside |= row >= rows
        out[first + i] = row
    if out_weights.size > 0:
        for i in range(size):
            out_weights[first + i] = weights[pos + i]
    if origins.size > 0:
        for i in range(size):
            origins[first + i] = nb.int64(pos + i) + shift
    return outside


@compiled(_TYPES)
def move(
    values: Any,
    weights: Any,
    first_K: Any,
    key_V: Any,
    buckets_V: Any,
    edges_VE: Any,
    stream_VE: Any,
    first_V: Any,
    first_S: Any,
    bucket_N: Any,
    out: Any,
    out_weights: Any,
    origins: Any,
    shift_V: Any,
    start: Any,
    stop: Any,
) -> Any:
    """Moves ids, relative to their bucket's first row, to the streams of variants `start` to `stop`. Moves `weights`
    with them, and writes the ids' positions plus `shift_V` to `origins`, if these are not empty.

    Returns the first variant that is not cut and has an id outside its table's rows, or -1.
    """
    with_weights, traced = out_weights.size > 0, origins.size > 0
    keeps_targets = with_weights or traced
    target_C, next_E = np.empty(255, np.uint64), np.empty(edges_VE.shape[1], np.uint64)
    for variant in range(start, stop):
        key, buckets, low_E = key_V[variant], buckets_V[variant], edges_VE[variant]
        pos, stop_number = nb.uint64(first_K[key]), nb.uint64(first_K[key + 1])
        slot, shift_origin = nb.uint64(first_V[variant]), shift_V[variant]
        for bucket in range(buckets):
            next_E[bucket] = first_S[stream_VE[variant, bucket]]
        if buckets == 1:
            size, rows = stop_number - pos, low_E[1]
            if _copy_whole(
                values, weights, pos, size, rows, out, out_weights, origins, next_E[0], shift_origin
            ):  # fmt: skip
                return variant
            continue
        while pos < stop_number:
            size = min(stop_number - pos, nb.uint64(255))
            if buckets <= 8:
                packed = nb.uint64(0)
                for i in range(size):
                    bucket = nb.uint64(bucket_N[slot + i])
                    shift = bucket * _FEW
                    target = next_E[bucket] + ((packed >> shift) & _BYTE)
                    out[target] = values[pos + i] - low_E[bucket]
                    packed += _ONE << shift
                    if keeps_targets:
                        target_C[i] = target
                for bucket in range(nb.uint64(buckets)):
                    next_E[bucket] += (packed >> (bucket * _FEW)) & _BYTE
            else:
                for i in range(size):
                    bucket = nb.uint64(bucket_N[slot + i])
                    target = next_E[bucket]
                    out[target] = values[pos + i] - low_E[bucket]
                    target_C[i] = target
                    next_E[bucket] = target + _ONE
            if with_weights:
                for i in range(size):
                    out_weights[target_C[i]] = weights[pos + i]
            if traced:
                for i in range(size):
                    origins[target_C[i]] = nb.int64(pos + i) + shift_origin
            pos += size
            slot += size
    return -1


@compiled(_TYPES)
def repeat(pair_CC: Any, first_S: Any, total_S: Any, lengths_SB: Any, out: Any, out_weights: Any, origins: Any) -> None:
    """Copies stream `pair_CC[n, 0]` to stream `pair_CC[n, 1]`."""
    for pair in range(pair_CC.shape[0]):
        original, copy = pair_CC[pair, 0], pair_CC[pair, 1]
        source, target, size = first_S[original], first_S[copy], nb.uint64(total_S[original])
        for bag in range(nb.uint64(lengths_SB.shape[1])):
            lengths_SB[copy, bag] = lengths_SB[original, bag]
        for i in range(size):
            out[target + i] = out[source + i]
        for i in range(min(size, nb.uint64(out_weights.size))):
            out_weights[target + i] = out_weights[source + i]
        for i in range(min(size, nb.uint64(origins.size))):
            origins[target + i] = origins[source + i]
