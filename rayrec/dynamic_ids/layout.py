"""Where the rows of an id are: hash, bucket, rank, fallback row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

BUCKET_ROWS = 64
HASHED, ZERO = -2, -1  # rows of unseen ids: the fallback row; none, for a vector of zeros
_MASK = 2**64 - 1
_FACTORS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_LOW, _HALF = np.uint64(2**32 - 1), np.uint64(32)


def mix(ids: Any) -> np.ndarray:
    """The hashes uint64 of int64 ids: the finalizer of MurmurHash3, a bijection that maps 0 to 0."""
    hashes = np.ascontiguousarray(ids, np.int64).view(np.uint64)
    for factor in _FACTORS:
        hashes = (hashes ^ (hashes >> np.uint64(33))) * np.uint64(factor)
    return hashes ^ (hashes >> np.uint64(33))


def unmix(number: int) -> int:
    """The id int64 with this hash."""
    number ^= number >> 33
    for factor in reversed(_FACTORS):
        number = number * pow(factor, -1, 2**64) & _MASK
        number ^= number >> 33
    return number - 2**64 if number >> 63 else number


# An empty row holds an id that belongs to another bucket, so that no id is special and a search compares ids alone:
# the id with the least hash outside the first bucket, and the id with the largest hash in the first one.
EMPTY, EMPTY_IN_FIRST = unmix(0), unmix(_MASK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The rows of a table: equal buckets, each with its own rows first and its fallback rows last.

    A bucket's rows are consecutive, and so are the buckets of a rank: a shard is a rectangle. The bucket of an id
    follows the order of its hash, so that a table with twice as many buckets splits each bucket in two.
    """

    buckets: int
    bucket_rows: int
    own_rows: int

    @classmethod
    def of(cls, rows: int, fallback: float) -> Layout:
        """The layout of a table. Up to 1.6 % of the rows, the last ones, stay unused; of fewer than 128, at most 1."""
        buckets = max(2, rows // BUCKET_ROWS)
        bucket_rows = rows // buckets
        fallback_rows = min(max(1, round(bucket_rows * fallback)), bucket_rows - 1)
        return cls(buckets=buckets, bucket_rows=bucket_rows, own_rows=bucket_rows - fallback_rows)

    @property
    def rows(self) -> int:
        return self.buckets * self.bucket_rows

    def cut(self, rank: int, ranks: int) -> range:
        """The buckets of a rank; none for some ranks if there are fewer buckets than ranks."""
        return range(self.buckets * rank // ranks, self.buckets * (rank + 1) // ranks)

    def bucket(self, ids: Any) -> np.ndarray:
        return ((mix(ids) >> _HALF) * np.uint64(self.buckets) >> _HALF).astype(np.int64)

    def owner(self, ids: Any, ranks: int) -> np.ndarray:
        """The rank that owns each id."""
        firsts = [self.cut(rank, ranks).start for rank in range(ranks)]
        return np.searchsorted(firsts, self.bucket(ids), side="right") - 1

    def fallback_row(self, ids: Any) -> np.ndarray:
        """The row of the whole table that each id shares while it has none of its own."""
        shared = (mix(ids) & _LOW) * np.uint64(self.bucket_rows - self.own_rows) >> _HALF
        return self.bucket(ids) * self.bucket_rows + self.own_rows + shared.astype(np.int64)

    def fallback_rows(self) -> np.ndarray:
        """All rows of the whole table that ids share, in order."""
        return np.arange(self.rows).reshape(self.buckets, -1)[:, self.own_rows :].ravel()

    def empty(self, buckets: range) -> np.ndarray:
        """The identities of empty rows of these buckets."""
        identities = np.full(len(buckets) * self.bucket_rows, EMPTY, np.int64)
        if buckets.start == 0:
            identities[: self.bucket_rows if len(buckets) else 0] = EMPTY_IN_FIRST
        return identities
