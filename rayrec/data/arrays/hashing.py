"""Stable 64-bit hashes of integers and strings, and their spread over table rows.

Every function depends on its arguments only: not on the process, the platform, or a library's version. Which feature is
hashed how is the schema's matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec.data.arrays.buffers import U64, empty

# A version of the law by which everything here maps; a checkpoint keeps it. Another number for any id: raise it.
HASH_LAW = 1

TableRows = npt.NDArray[np.signedinteger[Any]]  # int32 or int64

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB
# A block and its scratch space stay in the second-level cache.
_BLOCK = 16_384
_BLOCK_32 = 32_768

_MASK_32 = (1 << 32) - 1
_32 = np.uint64(32)
_FOLD = np.uint32(0x9E3779B1)
_TEXTS = 0x7E3779B97F4A7C15
_FIRST_BYTES = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)
_ROUNDS = ((np.uint32(16), np.uint32(0x85EBCA6B)), (np.uint32(13), np.uint32(0xC2B2AE35)))


def mix64(value: int) -> int:
    """The splitmix64 finalizer (Steele, Lea, Flood 2014) of one integer, modulo 2**64; a bijection."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MUL_1) & _MASK
    value = ((value ^ (value >> 27)) * _MUL_2) & _MASK
    return value ^ (value >> 31)


def seed_of(*parts: int) -> int:
    """One 64-bit seed made of several integers; their order matters."""
    state = 0
    for part in parts:
        state = mix64(state + _GAMMA + (part & _MASK))
    return state


def mix64_array(values: npt.NDArray[np.integer], seed: int) -> U64:
    """`mix64(value + seed)` of every 64-bit integer; a bijection of the values for one seed.

    Args:
        values: int64 or uint64, [n]; not changed.
        seed: from `seed_of`.
    """
    out = np.empty(len(values), dtype=np.uint64)
    scratch, add = np.empty(min(len(values), _BLOCK), np.uint64), np.uint64(seed & _MASK)
    for start in range(0, len(values), _BLOCK):
        state = out[start : start + _BLOCK]
        other = scratch[: len(state)]
        np.add(values[start : start + _BLOCK].astype(np.int64, copy=False).view(np.uint64), add, out=state)
        np.right_shift(state, np.uint64(30), out=other)
        np.bitwise_xor(state, other, out=state)
        np.multiply(state, np.uint64(_MUL_1), out=state)
        np.right_shift(state, np.uint64(27), out=other)
        np.bitwise_xor(state, other, out=state)
        np.multiply(state, np.uint64(_MUL_2), out=state)
        np.right_shift(state, np.uint64(31), out=other)
        np.bitwise_xor(state, other, out=state)
    return out


def hash_rows(values: npt.NDArray[np.integer], seed: int, num_rows: int) -> TableRows:
    """Table rows of 64-bit integer ids, spread evenly over `[0, num_rows)`; int32 or int64 as `row_type` says.

    This is most of the work of mapping a row, so there are two laws. Up to 2**32 rows: the two halves of an id are
    folded into 32 bits (an id below 2**32 stays as it is), the seed is added, and MurmurHash3's 32-bit finalizer
    (Appleby 2011) mixes them, without its last step, which the high bits do not need; those are scaled as in `to_rows`.
    Half as many bytes and fewer steps make it twice as fast as 64 bits are. For larger tables:
    `to_rows(mix64_array(values, seed), num_rows)`.
    """
    if num_rows > 1 << 32:
        return to_rows(mix64_array(values, seed), num_rows)
    size = min(len(values), _BLOCK_32)
    states, scratch, scaled = np.empty(size, np.uint32), np.empty(size, np.uint32), np.empty(size, np.uint64)
    out: npt.NDArray[Any] = empty(len(values), row_type(num_rows))
    add, rows = np.uint32(seed & _MASK_32), np.uint64(num_rows)
    for start in range(0, len(values), _BLOCK_32):
        block = values[start : start + _BLOCK_32].view(np.uint64)
        state, other, wide = states[: len(block)], scratch[: len(block)], scaled[: len(block)]
        np.copyto(state, block, casting="unsafe")
        if block.max() > _MASK_32:
            np.right_shift(block, _32, out=wide)
            np.copyto(other, wide, casting="unsafe")
            np.multiply(other, _FOLD, out=other)
            np.bitwise_xor(state, other, out=state)
        np.add(state, add, out=state)
        for shift, factor in _ROUNDS:
            np.right_shift(state, shift, out=other)
            np.bitwise_xor(state, other, out=state)
            np.multiply(state, factor, out=state)
        np.copyto(wide, state)
        np.multiply(wide, rows, out=wide)
        np.right_shift(wide, _32, out=wide)
        np.copyto(out[start : start + _BLOCK_32], wide, casting="unsafe")
    return out


def row_type(num_rows: int) -> type[np.int32] | type[np.int64]:
    """What holds a row of a table: 32 bits where they suffice, for what is half as long is moved in half the time."""
    return np.int32 if num_rows <= 1 << 31 else np.int64


def hash_strings(strings: Iterable[bytes], seed: int) -> U64:
    """A 64-bit hash (keyed BLAKE2b) of every string. Costs about a microsecond each: give it distinct strings only."""
    key = (seed & _MASK).to_bytes(8, "little")
    blake2b = hashlib.blake2b
    digests = b"".join(blake2b(text, digest_size=8, key=key).digest() for text in strings)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64, copy=False)


def hash_texts(texts: pa.Array) -> U64:
    """A 64-bit hash of every string or binary value, whole columns at a time: tens of nanoseconds each.

    Eight bytes of all at a time (little-endian, zeros after the end) go into `mix64`, which begins with the length.
    Anything may stand for a null. Chosen strings can be made to collide, unlike with `hash_strings`.
    """
    kind = pa.large_binary()
    texts = texts.cast(kind) if texts.type != kind else texts
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    first, last = (int(bounds[0]), int(bounds[-1])) if len(texts) else (0, 0)
    raw = np.zeros(last - first + 8, np.uint8)
    raw[: last - first] = np.frombuffer(data, np.uint8)[first:last] if last > first else 0
    words: U64 = np.ndarray((last - first + 1,), "<u8", raw.data, strides=(1,))  # at every byte
    out = np.empty(len(texts), np.uint64)
    for start in range(0, len(texts), _BLOCK):
        some = bounds[start : start + _BLOCK + 1] - first
        out[start : start + _BLOCK] = _hash_block(words, some[:-1], np.diff(some))
    return out


def _hash_block(words: U64, at: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> U64:
    states = mix64_array(lengths, _TEXTS)
    done, going = 0, np.flatnonzero(lengths)
    while len(going):
        inside = words[at[going] + done] & _FIRST_BYTES[np.minimum(lengths[going] - done, 8)]
        states[going] = mix64_array(states[going] ^ inside, _TEXTS)
        done += 8
        going = going[lengths[going] > done]
    return states


def to_rows(hashes: U64, num_rows: int) -> npt.NDArray[np.int64]:
    """Hashes spread evenly over the rows `[0, num_rows)`.

    The high 32 bits are scaled rather than divided (Lemire 2019): no slow 64-bit remainder.
    """
    if num_rows > 1 << 32:
        return np.remainder(hashes, np.uint64(num_rows)).astype(np.int64)
    return (((hashes >> _32) * np.uint64(num_rows)) >> _32).astype(np.int64)
