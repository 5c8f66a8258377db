"""Compiled loops: a step of the map, which defines the rule, and the search. Import through `numba_loops.loops`.

Suffixes of array dimensions: N lookups; M lookups of ids without a row; R rows of the owned buckets; B owned buckets; S
rows of a bucket; H hints; D distinct ids of one bucket without a row.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from rayrec._runtime.numba_loops import compiled
from rayrec._runtime.numba_prefetch import prefetch
from rayrec.dynamic_ids.layout import BUCKET_ROWS, EMPTY, EMPTY_IN_FIRST

CELLS = 4  # cells of a filter per id
BLOCK = 512  # ids that are searched by hint before those that hints miss
# Bits of a change: an id took the row; an id lost the row; it lost it by age. Or none of these: its id lost counts.
TAKEN, LEFT, EXPIRED, AGED = 1, 2, 4, 8
LARGEST_COUNT = 2**31 - 1  # the highest bit of a score marks rows that this step looked up

_ZERO, _ONE, _HALF, _LOW = nb.uint64(0), nb.uint64(1), nb.uint64(32), nb.uint64(2**32 - 1)
_SHIFT, _FIRST, _SECOND = nb.uint64(33), nb.uint64(0xFF51AFD7ED558CCD), nb.uint64(0xC4CEB9FE1A85EC53)
_MARK, _COUNT = nb.uint32(2**31), nb.uint32(2**31 - 1)
_USUAL = nb.uint64(BUCKET_ROWS)  # of nearly all tables
_FREE, _USED = nb.int64(-(2**63)), nb.int64(2**63 - 1)
_TYPES = dict.fromkeys(("id_N", "identity_R", "row_N", "changed_row", "changed_old", "changed_new"), "int64[::1]")
_TYPES |= dict.fromkeys(("count_N", "sighted_B"), "uint32[::1]")
_TYPES |= dict.fromkeys(("last_seen_R", "score_R"), "uint32[:]")  # every second number of one array
_TYPES |= {
    "cell_BC": "uint8[:,::1]",
    "hint_H": "uint8[::1]",
    "changed_kind": "uint8[::1]",
    "statistics": "int64[::1]",
    "chance": "uint64[::1]",
}
_TYPES |= dict.fromkeys(("buckets", "first", "bucket_rows", "own_rows", "clock", "ttl", "half_life"), "uint64")
_TYPES |= {"evict": "int64", "min_count": "uint64", "seed": "uint64", "unseen": "int64"}


@nb.njit(inline="always")
def _mix(number: Any) -> Any:
    number = (number ^ (number >> _SHIFT)) * _FIRST
    number = (number ^ (number >> _SHIFT)) * _SECOND
    return number ^ (number >> _SHIFT)


@nb.njit(inline="always")
def _slot(identity_R: Any, base: Any, bucket_rows: Any, key: Any) -> Any:
    """The slot of an id in its bucket, counted from 1; 0 if the bucket does not have the id.

    Compares all rows, because fallback rows never have an id, and without branches, so that the compiler compares 4 or
    8 rows at once."""
    slot = _ZERO
    for number in range(bucket_rows):
        slot += number + _ONE if identity_R[base + number] == key else _ZERO
    return slot


@nb.njit
def _search(
    id_N: Any, start: Any, stop: Any, identity_R: Any, score_R: Any, writes: Any, hint_H: Any, buckets: Any, first: Any,
    bucket_rows: Any, row_N: Any, miss_W: Any,
) -> Any:  # fmt: skip
    """Sets the row that has each id of a block, or -1. Returns the number of ids without a row.

    A row that has the id at the hinted slot is the row of the id, whoever wrote the hint, so hints need no upkeep and
    cannot be wrong. They save most of the memory accesses: a bucket's identities are eight cache lines. A block of ids
    passes three loops, for hints, identities, and ids that hints missed. None of them has a branch that the processor
    would mispredict or one memory access that waits for another, so it overlaps the accesses of many ids. The first one
    starts to load what the others read: without that, a search takes 1.4 times as long, and a step twice.

    Args:
        writes: Whether the caller writes the score of the rows next.
        miss_W: Room for a block's ids that hints missed.
    """
    hints, missing, misses = nb.uint64(hint_H.size), _ZERO, _ZERO
    for n in range(start, stop):
        hashed = _mix(nb.uint64(id_N[n]))
        base = (((hashed >> _HALF) * buckets >> _HALF) - first) * bucket_rows
        row = base + nb.uint64(hint_H[(hashed & _LOW) * hints >> _HALF])
        row_N[n] = nb.int64(row)
        prefetch(identity_R, row)
        if writes:
            prefetch(score_R, row)
    for n in range(start, stop):
        miss_W[misses] = n
        misses += _ONE if identity_R[nb.uint64(row_N[n])] != id_N[n] else _ZERO
    for m in range(misses):
        n = miss_W[m]
        hashed = _mix(nb.uint64(id_N[n]))
        base = (((hashed >> _HALF) * buckets >> _HALF) - first) * bucket_rows
        if bucket_rows == _USUAL:  # unrolled, with no rest to compare singly
            slot = _slot(identity_R, base, _USUAL, id_N[n])
        else:
            slot = _slot(identity_R, base, bucket_rows, id_N[n])
        row_N[n] = nb.int64(base + slot) - 1 if slot else -1
        missing += _ONE if slot == _ZERO else _ZERO
        if slot:
            hint_H[(hashed & _LOW) * hints >> _HALF] = nb.uint8(slot - _ONE)
    return missing


@nb.njit(inline="always")
def _fallback(base: Any, own_rows: Any, bucket_rows: Any, hashed: Any) -> Any:
    return base + own_rows + ((hashed & _LOW) * (bucket_rows - own_rows) >> _HALF)


@compiled(_TYPES)
def find(
    id_N: Any, identity_R: Any, last_seen_R: Any, hint_H: Any, buckets: Any, first: Any, bucket_rows: Any,
    own_rows: Any, clock: Any, ttl: Any, unseen: Any, row_N: Any,
) -> None:  # fmt: skip
    """Finds the rows of ids without changing the map.

    Args:
        last_seen_R: Empty if no row can have expired.
        unseen: Result for an id without a row; -2: its fallback row.
    """
    size, start, missing, expires = nb.uint64(id_N.size), _ZERO, _ZERO, ttl and last_seen_R.size
    miss_W = np.empty(BLOCK, np.uint64)
    while start < size:
        stop = min(size, start + nb.uint64(BLOCK))
        missing += _search(
            id_N, start, stop, identity_R, last_seen_R, False, hint_H, buckets, first, bucket_rows, row_N, miss_W
        )
        start = stop
    if not missing and not expires:
        return
    for n in range(size):
        row = row_N[n]
        if row >= 0 and not (expires and clock - last_seen_R[nb.uint64(row)] > ttl):
            continue
        if unseen == -2:
            hashed = _mix(nb.uint64(id_N[n]))
            base = (((hashed >> _HALF) * buckets >> _HALF) - first) * bucket_rows
            row_N[n] = _fallback(base, own_rows, bucket_rows, hashed)
        else:
            row_N[n] = unseen


@nb.njit
def _by_upper_half(key_M: Any, size: Any, largest: Any) -> Any:
    """Stable radix sort of the first `size` keys by their upper 32 bits.

    Args:
        largest: Upper bound of the upper 32 bits; higher digits are skipped.
    """
    other_M, count_V, shift = np.empty(size, np.uint64), np.empty(2048, np.uint64), _HALF
    while shift < nb.uint64(64) and (largest >> (shift - _HALF)) > 0:
        count_V[:] = _ZERO
        for m in range(size):
            count_V[(key_M[m] >> shift) & nb.uint64(2047)] += _ONE
        total = _ZERO
        for value in range(2048):
            count = count_V[value]
            count_V[value] = total
            total += count
        for m in range(size):
            value = (key_M[m] >> shift) & nb.uint64(2047)
            other_M[count_V[value]] = key_M[m]
            count_V[value] += _ONE
        key_M, other_M = other_M, key_M
        shift += nb.uint64(11)
    return key_M


@nb.njit
def _sort_together(hash_M: Any, lookup_M: Any, size: Any) -> None:
    """Sorts the lookups of a bucket by hash."""
    if size > 128:
        order = np.argsort(hash_M[:size])
        hash_M[:size] = hash_M[:size][order]
        lookup_M[:size] = lookup_M[:size][order]
        return
    for n in range(1, size):
        hashed, lookup, m = hash_M[n], lookup_M[n], n
        while m > 0 and hash_M[m - 1] > hashed:
            hash_M[m], lookup_M[m] = hash_M[m - 1], lookup_M[m - 1]
            m -= 1
        hash_M[m], lookup_M[m] = hashed, lookup


@nb.njit(inline="always")
def _decayed(score: Any, seen: Any, clock: Any, half_life: Any) -> Any:
    if half_life and seen != clock:
        return score >> nb.uint32(min(nb.uint64(31), clock // half_life - seen // half_life))
    return score


@nb.njit(inline="always")
def _rank(score: Any, seen: Any, evict: Any) -> Any:
    """The rank of a row. The id with the lowest rank loses its row."""
    if evict == 1:
        return ((nb.int64(seen) - nb.int64(2**31)) << nb.int64(32)) | nb.int64(score)
    return (nb.int64(score) << nb.int64(32)) | nb.int64(seen)


@nb.njit(inline="always")
def _cell(hashed: Any, number: Any, cells: Any) -> Any:
    return ((_mix(hashed ^ _FIRST) >> nb.uint64(16 * number)) & nb.uint64(65535)) * cells >> nb.uint64(16)


@compiled(_TYPES)
def step(
    id_N: Any, count_N: Any, identity_R: Any, last_seen_R: Any, score_R: Any, cell_BC: Any, sighted_B: Any,
    hint_H: Any, chance: Any, buckets: Any, first: Any, bucket_rows: Any, own_rows: Any, clock: Any, ttl: Any,
    half_life: Any, evict: Any, min_count: Any, seed: Any, row_N: Any, changed_row: Any, changed_old: Any,
    changed_new: Any, changed_kind: Any, statistics: Any,
) -> Any:  # fmt: skip
    """One step of the owned buckets.

    Args:
        hint_H: By the lower half of the hash, the slot of an id that was found there last, or any other.
        count_N: Number of lookups that each id represents, at least 1. Empty: 1 each.
        chance: Probability times 2³² of admitting an id at random, for each count from 0 to 255. Empty: always.
        half_life, ttl: 0 for none.

    Returns:
        Number of changes, with those of counts.
    """
    size, missing, changes = nb.uint64(id_N.size), _ZERO, _ZERO
    # 1. Find the rows of ids that have one and have not expired. The result does not depend on the order of lookups.
    lookups, own, start, counted = size, _ZERO, _ZERO, count_N.size > 0
    key_M, miss_W = np.empty(id_N.size, np.uint64), np.empty(BLOCK, np.uint64)
    while start < size:
        stop = min(size, start + nb.uint64(BLOCK))
        _search(id_N, start, stop, identity_R, score_R, True, hint_H, buckets, first, bucket_rows, row_N, miss_W)
        for n in range(start, stop):
            row = row_N[n]
            if row >= 0 and (ttl == 0 or clock - last_seen_R[nb.uint64(row)] <= ttl):
                row, count = nb.uint64(row), nb.uint64(count_N[n]) if counted else _ONE
                score = _decayed(score_R[row], nb.uint64(last_seen_R[row]), clock, half_life)
                score_R[row] = nb.uint32(min(nb.uint64(score) + count, nb.uint64(_COUNT)))
                last_seen_R[row] = clock
                own += count
            else:
                bucket = ((_mix(nb.uint64(id_N[n])) >> _HALF) * buckets >> _HALF) - first
                key_M[missing] = (bucket << _HALF) | n
                missing += _ONE
        start = stop
    if counted:
        lookups = _ZERO
        for n in range(size):
            lookups += nb.uint64(count_N[n])
    statistics[0] += nb.int64(lookups)
    statistics[1] += nb.int64(own)
    if missing == _ZERO:
        return changes
    # Rows that this step looked up keep their ids. Only buckets of ids without a row need to know them.
    asked_B = np.zeros(sighted_B.size, np.uint8)
    for m in range(missing):
        asked_B[key_M[m] >> _HALF] = 1
    for n in range(size):
        if row_N[n] >= 0:
            row = nb.uint64(row_N[n])
            bucket = row >> nb.uint64(6) if bucket_rows == _USUAL else row // bucket_rows
            if asked_B[bucket]:
                score_R[row] |= _MARK
    key_M = _by_upper_half(key_M, missing, nb.uint64(sighted_B.size - 1))
    longest, members = _ZERO, _ZERO  # of the lookups in a bucket
    for m in range(missing):
        members = members + _ONE if m and (key_M[m] >> _HALF) == (key_M[m - 1] >> _HALF) else _ONE
        longest = max(longest, members)
    hash_M, lookup_M = np.empty(longest, np.uint64), np.empty(longest, np.uint64)
    begin_D, count_D = np.empty(longest + _ONE, np.uint64), np.empty(longest, np.uint64)
    want_D, order_D, row_D = np.empty(longest, np.uint64), np.empty(longest, np.uint64), np.empty(longest, np.uint64)
    rank_S, cells, period = np.empty(own_rows, np.int64), nb.uint64(cell_BC.shape[1]), bucket_rows * min_count // 4
    begin = _ZERO
    while begin < missing:
        bucket, members = key_M[begin] >> _HALF, _ZERO
        base, empty = bucket * bucket_rows, nb.int64(EMPTY_IN_FIRST) if bucket + first == _ZERO else nb.int64(EMPTY)
        while begin < missing and key_M[begin] >> _HALF == bucket:
            lookup_M[members] = key_M[begin] & _LOW
            hash_M[members] = _mix(nb.uint64(id_N[lookup_M[members]]))
            members += _ONE
            begin += _ONE
        # 2. Group the lookups of the bucket by id, in the order of the hash. Free expired rows with one of these ids.
        _sort_together(hash_M, lookup_M, members)
        distinct = _ZERO
        for m in range(members):
            if m == _ZERO or hash_M[m] != hash_M[m - _ONE]:
                begin_D[distinct], count_D[distinct] = m, _ZERO
                distinct += _ONE
                key = id_N[lookup_M[m]]
                slot = _slot(identity_R, base, bucket_rows, key)
                if slot:
                    row = base + slot - _ONE
                    identity_R[row], last_seen_R[row], score_R[row] = empty, nb.uint32(0), nb.uint32(0)
                    changed_row[changes], changed_old[changes], changed_new[changes] = row, key, nb.int64(0)
                    changed_kind[changes] = nb.uint8(LEFT | EXPIRED)
                    changes += _ONE
                    statistics[4] += 1
            count_D[distinct - _ONE] += nb.uint64(count_N[lookup_M[m]]) if count_N.size else _ONE
        begin_D[distinct] = members
        # 3. Decide admission. Read the filter for all ids before updating it, so that their order does not matter.
        if cells and sighted_B[bucket] >= period:
            for cell in range(cells):
                cell_BC[bucket, cell] >>= 1
            sighted_B[bucket] = nb.uint32(0)
        admitted, in_order = _ZERO, True
        for d in range(distinct):
            hashed, count = hash_M[begin_D[d]], min(count_D[d], nb.uint64(_COUNT))
            row_D[d] = _fallback(base, own_rows, bucket_rows, hashed)
            enters, want_D[d] = True, count
            if cells:
                least = nb.uint64(255)
                for number in range(CELLS):
                    least = min(least, nb.uint64(cell_BC[bucket, _cell(hashed, number, cells)]))
                want_D[d] = min(least + count, nb.uint64(255))
                enters = want_D[d] >= min_count
            elif chance.size:
                draw = _mix(hashed ^ _mix(seed ^ _mix(nb.uint64(sighted_B[bucket]) + _ONE))) >> _HALF
                enters = draw < chance[min(count, nb.uint64(255))]
            if enters:
                order_D[admitted] = ((nb.uint64(_COUNT) - max(want_D[d], count)) << _HALF) | d
                in_order &= admitted == _ZERO or order_D[admitted] > order_D[admitted - _ONE]
                admitted += _ONE
            else:
                statistics[5] += 1
        if cells:
            for d in range(distinct):
                for number in range(CELLS):
                    cell = _cell(hash_M[begin_D[d]], number, cells)
                    cell_BC[bucket, cell] = max(nb.uint64(cell_BC[bucket, cell]), want_D[d])
        sighted_B[bucket] += nb.uint32(distinct)
        # 4. Give rows to admitted ids, in order of count: first free rows, then rows with the lowest rank.
        if admitted:
            if not in_order:
                order_D[:admitted].sort()
            for slot in range(own_rows):
                row = base + slot
                score, seen = score_R[row], nb.uint64(last_seen_R[row])
                if score == 0 or (ttl and clock - seen > ttl):
                    rank_S[slot] = _FREE
                elif score & _MARK:
                    rank_S[slot] = _USED
                else:
                    rank_S[slot] = _rank(_decayed(score, seen, clock, half_life), seen, evict)
        for number in range(admitted):
            lowest, slot = _USED, _ZERO
            for other in range(own_rows):
                lowest = min(lowest, rank_S[other])
            while rank_S[slot] != lowest:
                slot += _ONE
            score, d = nb.uint64(_COUNT) - (order_D[number] >> _HALF), order_D[number] & _LOW
            if lowest == _USED or _rank(score, clock, evict) <= lowest:
                if evict == 3 and lowest != _USED:  # the id that stays loses as many counts
                    row = base + slot
                    score_R[row] -= nb.uint32(min(nb.uint64(score_R[row] - nb.uint32(1)), score))
                    changed_row[changes], changed_kind[changes] = row, nb.uint8(AGED)
                    changes += _ONE
                    rank_S[slot] = _USED
                    statistics[6] += 1
                    continue
                statistics[6] += nb.int64(admitted - number)
                break
            row = base + slot
            changed_row[changes], changed_old[changes] = row, identity_R[row]
            kind, new = TAKEN, id_N[lookup_M[begin_D[d]]]
            if score_R[row]:
                expired = lowest == _FREE
                kind |= LEFT | EXPIRED if expired else LEFT
                statistics[4 if expired else 3] += 1
            else:
                changed_old[changes] = 0
            changed_new[changes], changed_kind[changes] = new, nb.uint8(kind)
            changes += _ONE
            identity_R[row], last_seen_R[row], score_R[row] = new, nb.uint32(clock), nb.uint32(score)
            rank_S[slot], row_D[d] = _USED, row
            statistics[1] += nb.int64(count_D[d])
            statistics[2] += 1
        for d in range(distinct):
            for m in range(begin_D[d], begin_D[d + _ONE]):
                row_N[lookup_M[m]] = row_D[d]
        for slot in range(own_rows):
            score_R[base + slot] &= _COUNT
    return changes
