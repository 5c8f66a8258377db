"""Compiled loops that split ids by the ranks that hold their rows. Import it through `numba_loops.loops`.

An id costs one read to find its bucket of rows, and a read and a write to move it. With up to eight buckets of equal
size, a bag's counts are the bytes of one register, and so are the places of the next 255 ids: no loop then reads what
it has just written. Suffixes: K keys of the input, V variants (see `routes`), S streams, B bags of a key, N ids.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from rayrec._runtime.numba_loops import compiled

_ANY = nb.uint64(2**63 - 1)
_ONE, _BYTE, _FEW = nb.uint64(1), nb.uint64(255), nb.uint64(8)
_BITS = nb.uint64(32)  # of an id in a table of equal buckets
_TYPES = dict.fromkeys(("values", "rows_K", "block_V", "first_S", "out"), "uint64[::1]")
_TYPES |= dict.fromkeys(("first_K", "key_V", "buckets_V", "first_V", "total_S", "origins", "shift_V"), "int64[::1]")
_TYPES |= {
    "lengths_KB": "int32[:,::1]",
    "lengths_SB": "int32[:,::1]",
    "edges_VE": "uint64[:,::1]",
    "bucket_N": "uint16[::1]",
}
_TYPES |= {"stream_VE": "int64[:,::1]", "pair_CC": "int64[:,::1]", "start": "int64", "stop": "int64"}
_TYPES |= {"weights": "float32[::1]", "out_weights": "float32[::1]"}


@compiled(_TYPES)
def any_outside(values: Any, first_K: Any, rows_K: Any) -> Any:
    """Whether an id of some key is no row number: negative ones are the largest of all as unsigned numbers.

    Keys with the largest int64 as rows may have any ids, and are not read.
    """
    for key in range(rows_K.size):
        rows, outside = rows_K[key], False
        if rows == _ANY:
            continue
        for number in range(nb.uint64(first_K[key]), nb.uint64(first_K[key + 1])):
            outside |= values[number] >= rows
        if outside:
            return True
    return False


@nb.njit
def _divide(values: Any, number: Any, stop: Any, rows: Any, block: Any, place: Any, bucket_N: Any) -> Any:
    """The bucket of each id, where buckets have `block` rows; whether an id is outside the table's rows."""
    outside = False
    reciprocal = (_ONE << _BITS) // block  # a product with it is the quotient, or 1 less
    for each in range(stop - number):
        row = values[number + each]
        outside |= row >= rows
        bucket = (row * reciprocal) >> _BITS
        bucket_N[place + each] = nb.uint16(bucket + nb.uint64(row - bucket * block >= block))
    return outside


@nb.njit
def _pack(lengths_B: Any, place: Any, bucket_N: Any, packed_B: Any) -> Any:
    """Each bag's counts as the bytes of a number, 0 for bags of more than 255 ids; whether each bag has one id."""
    one_each = True
    for bag in range(nb.uint64(lengths_B.size)):
        one_each &= lengths_B[bag] == 1
    if one_each:
        return True
    for bag in range(nb.uint64(lengths_B.size)):
        length, packed = nb.uint64(lengths_B[bag]), nb.uint64(0)
        for number in range(place, place + length):
            packed += _ONE << (nb.uint64(bucket_N[number]) * _FEW)
        place += length
        packed_B[bag] = packed if length <= _BYTE else nb.uint64(0)
    return False


@nb.njit
def _count_long(lengths_B: Any, place: Any, bucket_N: Any, stream_E: Any, lengths_SB: Any, total_S: Any) -> None:
    """Adds bags of more than 255 ids."""
    for bag in range(nb.uint64(lengths_B.size)):
        length = nb.uint64(lengths_B[bag])
        stop = place + length
        while length > _BYTE and place < stop:
            packed = nb.uint64(0)
            for number in range(place, min(stop, place + _BYTE)):
                packed += _ONE << (nb.uint64(bucket_N[number]) * _FEW)
            bucket = nb.uint64(0)
            while packed:
                lengths_SB[stream_E[bucket], bag] += nb.int32(packed & _BYTE)
                total_S[stream_E[bucket]] += nb.int64(packed & _BYTE)
                packed >>= _FEW
                bucket += _ONE
            place += _BYTE
        place = stop


@nb.njit
def _find(values: Any, number: Any, stop: Any, edges_E: Any, buckets: Any, place: Any, bucket_N: Any) -> Any:
    """The bucket of each id by its row edges; whether an id is outside of them."""
    outside = False
    while number < stop:
        low, high = nb.uint64(0), nb.uint64(buckets)
        while high - low > _ONE:
            middle = (low + high) >> _ONE
            if values[number] < edges_E[middle]:
                high = middle
            else:
                low = middle
        outside |= values[number] >= edges_E[buckets]
        bucket_N[place] = nb.uint16(low)
        number += _ONE
        place += _ONE
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
    """Lengths and totals of the streams of variants `start` to `stop`, and the bucket of each of their ids.

    Returns the first variant that is cut and has an id outside its table's rows, or -1.
    """
    num_bags = nb.uint64(lengths_KB.shape[1])
    packed_B = np.empty(num_bags, np.uint64)
    for variant in range(start, stop):
        key, buckets = key_V[variant], buckets_V[variant]
        number, place = nb.uint64(first_K[key]), nb.uint64(first_V[variant])
        if buckets == 1:
            stream = stream_VE[variant, 0]
            for bag in range(num_bags):
                lengths_SB[stream, bag] = lengths_KB[key, bag]
            total_S[stream] = first_K[key + 1] - first_K[key]
        elif block_V[variant] and buckets <= 8:
            rows = edges_VE[variant, buckets]
            if _divide(values, number, nb.uint64(first_K[key + 1]), rows, block_V[variant], place, bucket_N):
                return variant
            one_each = _pack(lengths_KB[key], place, bucket_N, packed_B)
            for bucket in range(buckets):
                shift, total, out_B = _FEW * nb.uint64(bucket), nb.int32(0), lengths_SB[stream_VE[variant, bucket]]
                if one_each:
                    for bag in range(num_bags):
                        length = nb.int32(bucket_N[place + bag] == bucket)
                        out_B[bag] = length
                        total += length
                else:
                    for bag in range(num_bags):
                        length = nb.int32((packed_B[bag] >> shift) & _BYTE)
                        out_B[bag] = length
                        total += length
                total_S[stream_VE[variant, bucket]] = total
            if not one_each:
                _count_long(lengths_KB[key], place, bucket_N, stream_VE[variant], lengths_SB, total_S)
        else:
            if _find(values, number, nb.uint64(first_K[key + 1]), edges_VE[variant], buckets, place, bucket_N):
                return variant
            for bucket in range(buckets):
                stream = stream_VE[variant, bucket]
                total_S[stream] = 0
                for bag in range(num_bags):
                    lengths_SB[stream, bag] = 0
            for bag in range(num_bags):
                for _ in range(lengths_KB[key, bag]):
                    stream = stream_VE[variant, bucket_N[place]]
                    lengths_SB[stream, bag] += 1
                    total_S[stream] += 1
                    place += _ONE
    return -1


@nb.njit
def _copy_whole(
    values: Any, weights: Any, number: Any, size: Any, rows: Any, out: Any, out_weights: Any, origins: Any, first: Any,
    shift: Any,
) -> Any:  # fmt: skip
    """A feature's ids to a stream of its own, from place `first`; whether an id is outside the table's rows."""
    outside = False
    for each in range(size):
        row = values[number + each]
        outside |= row >= rows
        out[first + each] = row
    if out_weights.size > 0:
        for each in range(size):
            out_weights[first + each] = weights[number + each]
    if origins.size > 0:
        for each in range(size):
            origins[first + each] = nb.int64(number + each) + shift
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
    """Ids, counted from their bucket's first row, to the streams of variants `start` to `stop`; `weights` with them,
    and to `origins` the places that they come from plus `shift_V`, where these are not empty.

    Returns the first variant that is not cut and has an id outside its table's rows, or -1.
    """
    with_weights, traced = out_weights.size > 0, origins.size > 0
    more = with_weights or traced
    target_C, next_E = np.empty(255, np.uint64), np.empty(edges_VE.shape[1], np.uint64)
    for variant in range(start, stop):
        key, buckets, low_E = key_V[variant], buckets_V[variant], edges_VE[variant]
        number, stop_number = nb.uint64(first_K[key]), nb.uint64(first_K[key + 1])
        place, shift_origin = nb.uint64(first_V[variant]), shift_V[variant]
        for bucket in range(buckets):
            next_E[bucket] = first_S[stream_VE[variant, bucket]]
        if buckets == 1:
            size, rows = stop_number - number, low_E[1]
            if _copy_whole(
                values, weights, number, size, rows, out, out_weights, origins, next_E[0], shift_origin
            ):  # fmt: skip
                return variant
            continue
        while number < stop_number:
            size = min(stop_number - number, nb.uint64(255))
            if buckets <= 8:
                packed = nb.uint64(0)
                for each in range(size):
                    bucket = nb.uint64(bucket_N[place + each])
                    shift = bucket * _FEW
                    target = next_E[bucket] + ((packed >> shift) & _BYTE)
                    out[target] = values[number + each] - low_E[bucket]
                    packed += _ONE << shift
                    if more:
                        target_C[each] = target
                for bucket in range(nb.uint64(buckets)):
                    next_E[bucket] += (packed >> (bucket * _FEW)) & _BYTE
            else:
                for each in range(size):
                    bucket = nb.uint64(bucket_N[place + each])
                    target = next_E[bucket]
                    out[target] = values[number + each] - low_E[bucket]
                    target_C[each] = target
                    next_E[bucket] = target + _ONE
            if with_weights:
                for each in range(size):
                    out_weights[target_C[each]] = weights[number + each]
            if traced:
                for each in range(size):
                    origins[target_C[each]] = nb.int64(number + each) + shift_origin
            number += size
            place += size
    return -1


@compiled(_TYPES)
def repeat(pair_CC: Any, first_S: Any, total_S: Any, lengths_SB: Any, out: Any, out_weights: Any, origins: Any) -> None:
    """Fills each stream `pair_CC[n, 1]` as the stream `pair_CC[n, 0]`."""
    for pair in range(pair_CC.shape[0]):
        given, other = pair_CC[pair, 0], pair_CC[pair, 1]
        source, target, size = first_S[given], first_S[other], nb.uint64(total_S[given])
        for bag in range(nb.uint64(lengths_SB.shape[1])):
            lengths_SB[other, bag] = lengths_SB[given, bag]
        for each in range(size):
            out[target + each] = out[source + each]
        for each in range(min(size, nb.uint64(out_weights.size))):
            out_weights[target + each] = out_weights[source + each]
        for each in range(min(size, nb.uint64(origins.size))):
            origins[target + each] = origins[source + each]
