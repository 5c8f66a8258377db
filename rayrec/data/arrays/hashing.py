"""Stable 64-bit hashes of integers and strings, and their distribution over table rows.

The results depend on the arguments only, not on the process, the platform or a library's version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec.data.arrays.buffers import I64, U32, U64, empty

# Version of the hash functions, saved in checkpoints. Raise it with any change that gives an id another number.
HASH_LAW = 1

TableRows = npt.NDArray[np.signedinteger[Any]]  # int32 or int64

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB
# A block and its scratch space fit the L2 cache.
_BLOCK = 16_384
_BLOCK_32 = 32_768

_MASK_32 = (1 << 32) - 1
MOST_ROWS_32 = 1 << 32  # rows of a table for which 32 bits of an id's hash suffice
_32 = np.uint64(32)
_FOLD = np.uint32(0x9E3779B1)
_TEXTS = 0x7E3779B97F4A7C15
_FIRST_BYTES = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)
_ROUNDS = ((np.uint32(16), np.uint32(0x85EBCA6B)), (np.uint32(13), np.uint32(0xC2B2AE35)))


def mix64(value: int) -> int:
    """The splitmix64 finalizer (Steele, Lea, Flood 2014) modulo 2**64; a bijection."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MUL_1) & _MASK
    value = ((value ^ (value >> 27)) * _MUL_2) & _MASK
    return value ^ (value >> 31)


def seed_of(*values: int) -> int:
    """Combines integers to one 64-bit seed; their order matters."""
    state = 0
    for value in values:
        state = mix64(state + _GAMMA + (value & _MASK))
    return state


def mix64_array(values: npt.NDArray[np.integer], seed: int) -> U64:
    """`mix64(value + seed)` of every value; for each seed a bijection.

    Args:
        values: int64 or uint64, [n]; not modified.
        seed: as `seed_of` returns it.
    """
    out = np.empty(len(values), dtype=np.uint64)
    scratch, add = np.empty(min(len(values), _BLOCK), np.uint64), np.uint64(seed & _MASK)
    for start in range(0, len(values), _BLOCK):
        state = out[start : start + _BLOCK]
        shifted = scratch[: len(state)]
        np.add(values[start : start + _BLOCK].astype(np.int64, copy=False).view(np.uint64), add, out=state)
        np.right_shift(state, np.uint64(30), out=shifted)
        np.bitwise_xor(state, shifted, out=state)
        np.multiply(state, np.uint64(_MUL_1), out=state)
        np.right_shift(state, np.uint64(27), out=shifted)
        np.bitwise_xor(state, shifted, out=state)
        np.multiply(state, np.uint64(_MUL_2), out=state)
        np.right_shift(state, np.uint64(31), out=shifted)
        np.bitwise_xor(state, shifted, out=state)
    return out


def hash_rows(values: npt.NDArray[np.integer], seed: int, num_rows: int) -> TableRows:
    """Table rows of 64-bit integer ids, uniform over `[0, num_rows)`, as int32 or int64 (see `row_type`).

    Hashing dominates the cost of mapping a row, so tables of up to 2**32 rows use a 32-bit hash, which is twice as
    fast: the halves of an id are folded into 32 bits (ids below 2**32 do not change), the seed is added, and
    MurmurHash3's 32-bit finalizer (Appleby 2011) mixes the bits. Its last step is left out: it changes low bits only,
    and the high bits select the row as in `to_rows`. Larger tables use `to_rows(mix64_array(values, seed), num_rows)`.
    """
    if num_rows > MOST_ROWS_32:
        return to_rows(mix64_array(values, seed), num_rows)
    size = min(len(values), _BLOCK_32)
    states, scratch, scaled = np.empty(size, np.uint32), np.empty(size, np.uint32), np.empty(size, np.uint64)
    out: npt.NDArray[Any] = empty(len(values), row_type(num_rows))
    add, rows = np.uint32(seed & _MASK_32), np.uint64(num_rows)
    for start in range(0, len(values), _BLOCK_32):
        block = values[start : start + _BLOCK_32].view(np.uint64)
        wide = scaled[: len(block)]
        _hashed_rows(block, add, rows, states[: len(block)], scratch[: len(block)], wide)
        np.copyto(out[start : start + _BLOCK_32], wide, casting="unsafe")
    return out


def hash_rows_of_each(values_FN: I64, seeds_F: Sequence[int], num_rows_F: Sequence[int]) -> I64:
    """`hash_rows` of each line, with a seed and a table of at most `MOST_ROWS_32` rows of its own; for few values."""
    add = np.array([[seed & _MASK_32] for seed in seeds_F], np.uint32)
    wide, state = np.empty(values_FN.shape, np.uint64), np.empty(values_FN.shape, np.uint32)
    _hashed_rows(values_FN.view(np.uint64), add, np.array(num_rows_F, np.uint64)[:, None], state, state.copy(), wide)
    return wide.view(np.int64)


def _hashed_rows(block: U64, add: Any, rows: Any, state: U32, shifted: U32, wide: U64) -> None:
    """Writes the table rows of the ids into `wide`; `state` and `shifted` are scratch space of the same shape."""
    np.copyto(state, block, casting="unsafe")
    if block.max() > _MASK_32:
        np.right_shift(block, _32, out=wide)
        np.copyto(shifted, wide, casting="unsafe")
        np.multiply(shifted, _FOLD, out=shifted)
        np.bitwise_xor(state, shifted, out=state)
    np.add(state, add, out=state)
    for shift, factor in _ROUNDS:
        np.right_shift(state, shift, out=shifted)
        np.bitwise_xor(state, shifted, out=state)
        np.multiply(state, factor, out=state)
    np.copyto(wide, state)
    np.multiply(wide, rows, out=wide)
    np.right_shift(wide, _32, out=wide)


def row_type(num_rows: int) -> type[np.int32] | type[np.int64]:
    """The integer type of a table's row numbers: int32 if it suffices, because it halves the memory traffic."""
    return np.int32 if num_rows <= 1 << 31 else np.int64


def hash_strings(strings: Iterable[bytes], seed: int) -> U64:
    """A 64-bit hash (keyed BLAKE2b) of every string. Costs about 1 µs each: pass distinct strings only."""
    key = (seed & _MASK).to_bytes(8, "little")
    blake2b = hashlib.blake2b
    digests = b"".join(blake2b(text, digest_size=8, key=key).digest() for text in strings)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64, copy=False)


def bytes_of(texts: pa.Array) -> list[bytes]:
    """The bytes of every string or binary value; no bytes for a null."""
    values: list[bytes] = texts.cast(pa.large_binary()).fill_null(b"").to_pylist()
    return values


def text_rows(texts: pa.Array, seed: int, num_rows: int, law: int) -> TableRows:
    """Table rows of strings, uniform over `[0, num_rows)`, by a version of the hash that never changes.

    Version 1 scales the keyed `hash_strings` with `to_rows`. Version 2 maps `hash_texts` as an integer id with
    `hash_rows`; it is about ten times as fast. The row of a null is undefined.
    """
    if law == 1:
        return to_rows(hash_strings(bytes_of(texts), seed), num_rows)
    return hash_rows(hash_texts(texts).view(np.int64), seed, num_rows)


def hash_texts(texts: pa.Array) -> U64:
    """A 64-bit hash of every string or binary value, vectorized: tens of nanoseconds each.

    `mix64` absorbs the length, then eight bytes at a time (little-endian, zero-padded). The hash of a null is
    undefined. An attacker can construct collisions, which `hash_strings` prevents.
    """
    kind = pa.large_binary()
    texts = texts.cast(kind) if texts.type != kind else texts
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    first_byte, last_byte = (int(bounds[0]), int(bounds[-1])) if len(texts) else (0, 0)
    raw = np.zeros(last_byte - first_byte + 8, np.uint8)
    raw[: last_byte - first_byte] = np.frombuffer(data, np.uint8)[first_byte:last_byte] if last_byte > first_byte else 0
    words: U64 = np.ndarray((last_byte - first_byte + 1,), "<u8", raw.data, strides=(1,))  # one word at every byte
    out = np.empty(len(texts), np.uint64)
    for start in range(0, len(texts), _BLOCK):
        starts_and_end = bounds[start : start + _BLOCK + 1] - first_byte
        out[start : start + _BLOCK] = _hash_block(words, starts_and_end[:-1], np.diff(starts_and_end))
    return out


def _hash_block(words: U64, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> U64:
    states = mix64_array(lengths, _TEXTS)
    done, unfinished = 0, np.flatnonzero(lengths)
    while len(unfinished):
        word = words[starts[unfinished] + done] & _FIRST_BYTES[np.minimum(lengths[unfinished] - done, 8)]
        states[unfinished] = mix64_array(states[unfinished] ^ word, _TEXTS)
        done += 8
        unfinished = unfinished[lengths[unfinished] > done]
    return states


def to_rows(hashes: U64, num_rows: int) -> npt.NDArray[np.int64]:
    """Maps hashes uniformly to rows `[0, num_rows)`.

    Scales the high 32 bits (Lemire 2019), which avoids the slow 64-bit remainder.
    """
    if num_rows > 1 << 32:
        return np.remainder(hashes, np.uint64(num_rows)).astype(np.int64)
    return (((hashes >> _32) * np.uint64(num_rows)) >> _32).astype(np.int64)
