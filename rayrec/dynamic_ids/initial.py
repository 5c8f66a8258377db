"""First weights of an id's row. They depend on the seed, the table and the id; not on row, time or rank."""

from __future__ import annotations

import zlib

import numpy as np

from rayrec.dynamic_ids.layout import mix

_STEP, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def first_weights(ids: np.ndarray, dim: int, *, table: str, seed: int, low: float, high: float) -> np.ndarray:
    """Weights float32 `[ids, dim]`, uniform in `[low, high)`.

    Args:
        ids: int64.
        dim: Width of the table.
        table: Name of the table; another table gives an id other weights.
        seed: Seed of the collection.
    """
    numbers = mix((row_seeds(ids, table, seed)[:, None] + _columns(dim)).view(np.int64))
    share = (numbers >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return np.float32(low) + share * np.float32(high - low)


def row_seeds(ids: np.ndarray, table: str, seed: int) -> np.ndarray:
    """A seed uint64 for each id."""
    key = np.array([(seed * _STEP + zlib.crc32(table.encode()) * 0x100000001B3 + 1) & _MASK], np.uint64)
    return mix(mix(ids) ^ mix(key.view(np.int64)))


def _columns(dim: int) -> np.ndarray:
    return np.arange(1, dim + 1, dtype=np.uint64) * np.uint64(_STEP)
