"""Stable 64-bit hashes of integers and strings, and their spread over table rows.

Every function depends on its arguments only: not on the process, the platform, or a library's version. Which feature is
hashed how is the schema's matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rayrec.data.buffers import empty

U64 = npt.NDArray[np.uint64]

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
    for start in range(0, len(values), _BLOCK):
        _mix64_block(values[start : start + _BLOCK], seed, out[start : start + _BLOCK])
    return out


def hash_rows(values: npt.NDArray[np.integer], seed: int, num_rows: int) -> npt.NDArray[np.int64]:
    """`to_rows(mix64_array(values, seed), num_rows)`, block by block in the processor's cache."""
    out = empty(len(values), np.uint64)
    for start in range(0, len(values), _BLOCK):
        block = out[start : start + _BLOCK]
        _mix64_block(values[start : start + _BLOCK], seed, block)
        _to_rows_block(block, num_rows)
    return out.view(np.int64)


def _mix64_block(values: npt.NDArray[np.integer], seed: int, out: U64) -> None:
    np.add(values.astype(np.int64, copy=False).view(np.uint64), np.uint64(seed & _MASK), out=out)
    scratch = out >> np.uint64(30)
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
    rows = hashes.copy()
    _to_rows_block(rows, num_rows)
    return rows.view(np.int64)


def _to_rows_block(hashes: U64, num_rows: int) -> None:
    if num_rows > 1 << 32:
        np.remainder(hashes, np.uint64(num_rows), out=hashes)
        return
    np.right_shift(hashes, np.uint64(32), out=hashes)
    np.multiply(hashes, np.uint64(num_rows), out=hashes)
    np.right_shift(hashes, np.uint64(32), out=hashes)
