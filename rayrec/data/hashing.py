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

from rayrec.data.buffers import empty

U64 = npt.NDArray[np.uint64]
TableRows = npt.NDArray[np.signedinteger[Any]]  # int32 or int64

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB
_BLOCK = 16_384  # 128 KiB: a block and its scratch space stay in the second-level cache


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
    scratch = np.empty(min(len(values), _BLOCK), np.uint64)
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        _mix64_block(block, seed, out[start : start + _BLOCK], scratch[: len(block)])
    return out


def hash_rows(values: npt.NDArray[np.integer], seed: int, num_rows: int) -> TableRows:
    """`to_rows(mix64_array(values, seed), num_rows)`, block by block in the processor's cache, as `row_type` says."""
    out: npt.NDArray[Any] = empty(len(values), row_type(num_rows))
    hashes, scratch = np.empty((2, min(len(values), _BLOCK)), np.uint64)
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        _mix64_block(block, seed, hashes[: len(block)], scratch[: len(block)])
        _to_rows_block(hashes[: len(block)], num_rows, out[start : start + _BLOCK])
    return out


def row_type(num_rows: int) -> type[np.int32] | type[np.int64]:
    """What holds a row of a table: 32 bits where they suffice, for what is half as long is moved in half the time."""
    return np.int32 if num_rows <= 1 << 31 else np.int64


def _mix64_block(values: npt.NDArray[np.integer], seed: int, out: U64, scratch: U64) -> None:
    np.add(values.astype(np.int64, copy=False).view(np.uint64), np.uint64(seed & _MASK), out=out)
    np.right_shift(out, np.uint64(30), out=scratch)
    np.bitwise_xor(out, scratch, out=out)
    np.multiply(out, np.uint64(_MUL_1), out=out)
    np.right_shift(out, np.uint64(27), out=scratch)
    np.bitwise_xor(out, scratch, out=out)
    np.multiply(out, np.uint64(_MUL_2), out=out)
    np.right_shift(out, np.uint64(31), out=scratch)
    np.bitwise_xor(out, scratch, out=out)


def hash_strings(strings: Iterable[bytes], seed: int) -> U64:
    """A 64-bit hash (keyed BLAKE2b) of every string. Costs about a microsecond each: give it distinct strings only."""
    key = (seed & _MASK).to_bytes(8, "little")
    blake2b = hashlib.blake2b
    digests = b"".join(blake2b(text, digest_size=8, key=key).digest() for text in strings)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64, copy=False)


def to_rows(hashes: U64, num_rows: int) -> npt.NDArray[np.int64]:
    """Hashes spread evenly over the rows `[0, num_rows)`.

    The high 32 bits are scaled rather than divided (Lemire 2019): no slow 64-bit remainder.
    """
    rows = np.empty(len(hashes), np.int64)
    _to_rows_block(hashes.copy(), num_rows, rows)
    return rows


def _to_rows_block(hashes: U64, num_rows: int, out: npt.NDArray[Any]) -> None:
    if num_rows > 1 << 32:
        np.remainder(hashes, np.uint64(num_rows), out=out, casting="unsafe")
        return
    np.right_shift(hashes, np.uint64(32), out=hashes)
    np.multiply(hashes, np.uint64(num_rows), out=hashes)
    np.right_shift(hashes, np.uint64(32), out=out, casting="unsafe")
