"""`row_share`: a column of every file, by which filters divide rows at random, e.g. into training and evaluation."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa

from rayrec.data.arrays.buffers import I64
from rayrec.data.arrays.hashing import mix64_array, seed_of

ROW_SHARE = "row_share"
# Seed that distinguishes these draws from other hashes.
_SEED = 4
_BITS = 53  # of a double


def row_shares(uri: str, size_bytes: int, rows: I64) -> pa.Array:
    """Numbers in [0, 1), drawn by a hash of the file's name, its size, and the rows' numbers in it.

    They do not change if the data set moves to another folder, or grows by files.

    Args:
        size_bytes: size of the file.
        rows: numbers of the rows, [n].
    """
    name = hashlib.blake2b(uri.rpartition("/")[2].encode(), digest_size=8).digest()
    draws = mix64_array(rows, seed_of(_SEED, int.from_bytes(name, "little"), size_bytes))
    return pa.array((draws >> np.uint64(64 - _BITS)) / 2.0**_BITS)


def with_row_share(arrow: pa.Schema) -> pa.Schema:
    """The columns of a file and `row_share`, unless the file has a column of this name."""
    return arrow if ROW_SHARE in arrow.names else arrow.append(pa.field(ROW_SHARE, pa.float64()))
