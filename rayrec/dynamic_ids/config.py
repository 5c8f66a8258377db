"""What a user says about a dynamic table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from rayrec.dynamic_ids.layout import Layout

LATEST = 2**32 - 1  # seconds, in the year 2106
BYTES_PER_ROW, BYTES_PER_BUCKET = 16, 4
HINTS_PER_64_ROWS = 56  # bytes that speed up searches; not saved
CELLS_PER_ROW = 3  # bytes of the filter that counts ids that wait


class Evict(IntEnum):
    """Which id loses its row in a full bucket."""

    LFU = 0  # the one looked up least often; among these, the one seen longest ago
    LRU = 1  # the one seen longest ago; among these, the one looked up least often
    LFU_DECAY = 2  # as LFU, but counts halve at every multiple of the half-life
    LFU_AGED = 3  # as LFU, but an id that keeps its row against a newcomer loses as many counts as the newcomer has


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicIds:
    """Rows of a table for ids that come and go.

    Args:
        rows: Rows of the table, at least 4. Fallback rows are among them.
        evict: Which id loses its row in a full bucket.
        half_life_s: Half-life of counts in seconds of event time, for `Evict.LFU_DECAY`.
        ttl_s: An id that was not looked up for more than this many seconds of event time loses its row. None: never.
        min_count: Number of lookups after which an id is admitted to a row of its own, at most 255.
        probability: Each lookup admits an id with this probability. Needs no memory for ids that wait.
        fallback: Share of rows that ids without a row of their own share by hash. A bucket of 64 has at least one.
        seed: Seed of admission at random.

    Raises:
        ValueError: Names the argument and a value that works.
    """

    rows: int
    evict: Evict = Evict.LFU
    half_life_s: int | None = None
    ttl_s: int | None = None
    min_count: int = 1
    probability: float = 1.0
    fallback: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rows < 4:
            raise ValueError(f"rows={self.rows}: a dynamic table has at least 4 rows, in 2 buckets")
        if self.ttl_s is not None and not 0 < self.ttl_s <= LATEST:
            raise ValueError(f"ttl_s={self.ttl_s} must be from 1 to {LATEST}; leave it out to keep ids for ever")
        if (self.evict is Evict.LFU_DECAY) != (self.half_life_s is not None):
            raise ValueError("half_life_s and evict=LFU_DECAY belong together: set both or neither")
        if self.half_life_s is not None and not 0 < self.half_life_s <= LATEST:
            raise ValueError(f"half_life_s={self.half_life_s} must be from 1 to {LATEST}")
        if not 1 <= self.min_count <= 255:
            raise ValueError(f"min_count={self.min_count} must be from 1 to 255; for rarer ids use probability")
        if not 0 < self.probability <= 1:
            raise ValueError(f"probability={self.probability} must be above 0 and at most 1")
        if self.min_count > 1 and self.probability < 1:
            raise ValueError("min_count and probability are two ways to admit an id: set one of them")
        if not 0 <= self.fallback < 1:
            raise ValueError(f"fallback={self.fallback} must be at least 0 and below 1")

    @property
    def nbytes(self) -> int:
        """Bytes of the map of the whole table."""
        layout = self.layout
        cells = CELLS_PER_ROW * layout.rows if self.min_count > 1 else 0
        hints = HINTS_PER_64_ROWS * layout.rows // 64
        return BYTES_PER_ROW * layout.rows + BYTES_PER_BUCKET * layout.buckets + hints + cells

    @property
    def layout(self) -> Layout:
        return Layout.of(self.rows, self.fallback)
