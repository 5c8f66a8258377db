"""The map of the buckets that a rank owns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rayrec._runtime.numba_loops import loops
from rayrec.dynamic_ids.config import CELLS_PER_ROW, HINTS_PER_64_ROWS, LATEST, DynamicIds
from rayrec.dynamic_ids.layout import EMPTY, EMPTY_IN_FIRST, HASHED, ZERO, Layout

LOOPS = "rayrec.dynamic_ids.loops"
# State by row, and by bucket: a rank's rows of each array are those of its buckets.
BY_ROW = {"identity": np.int64, "last_seen": np.uint32, "score": np.uint32}
# What a step counts, in the order of the numbers.
COUNTED = ("lookups", "own", "admitted", "evicted", "expired", "waiting", "refused")
_NO_COUNTS = np.empty(0, np.uint32)
BY_BUCKET = {"cells": np.uint8, "sighted": np.uint32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Rows that an id took or left, in the order in which it happened.

    Args:
        row: Local rows.
        old: The ids that left, where `left`.
        new: The ids that came, where `taken`.
        kind: Bits `loops.TAKEN`, `LEFT`, `EXPIRED`.
    """

    row: np.ndarray
    old: np.ndarray
    new: np.ndarray
    kind: np.ndarray

    @property
    def taken(self) -> np.ndarray:
        """Whether an id took the row. Its weights and optimizer state must be reset before the lookup of the step."""
        return (self.kind & loops(LOOPS).TAKEN).astype(bool)

    @property
    def left(self) -> np.ndarray:
        """Whether an id lost the row: a delta tells readers to delete it."""
        return (self.kind & loops(LOOPS).LEFT).astype(bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """A step's result.

    Args:
        rows: Local row of each lookup, int64 `[N]`.
        changes: Rows to reset before the lookup.
        aged: Local rows whose id lost counts to a newcomer, under `Evict.LFU_AGED`.
        counted: Counts of this step, in the order of `COUNTED`; ranks' counts add up to the table's.
    """

    rows: np.ndarray
    changes: Changes
    aged: np.ndarray
    counted: np.ndarray

    @property
    def statistics(self) -> dict[str, int]:
        """The counts by name."""
        return dict(zip(COUNTED, self.counted.tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Ids that have a row, in the order of their rows.

    Args:
        rows: Rows of the whole table.
    """

    ids: np.ndarray
    rows: np.ndarray
    counts: np.ndarray
    last_seen: np.ndarray


class IdMap:
    """The ids of some consecutive buckets of a table, and what decides about their rows.

    Rows are local: row 0 is the first one of the first bucket. An id whose bucket is not among them is the caller's
    error, which is not checked: split ids by `Layout.owner`.

    Args:
        config: The table's rules.
        rank, ranks: Which buckets: those of this rank among as many.
    """

    def __init__(self, config: DynamicIds, rank: int = 0, ranks: int = 1) -> None:
        self.config, self.layout, self.clock = config, config.layout, 0
        self.buckets = self.layout.cut(rank, ranks)
        rows = len(self.buckets) * self.layout.bucket_rows
        cells = CELLS_PER_ROW * self.layout.bucket_rows if config.min_count > 1 else 0
        self.identity = self.layout.empty(self.buckets)
        # Side by side in memory, because a step reads and writes both.
        self.last_seen, self.score = np.zeros((rows, 2), np.uint32).T
        self.cells = np.zeros((len(self.buckets), cells), np.uint8)
        self.sighted = np.zeros(len(self.buckets), np.uint32)
        self._hints, layout = hints_of(rows), self.layout
        self._rules = (
            chances(config), layout.buckets, self.buckets.start, layout.bucket_rows, layout.own_rows,
            config.ttl_s or 0, config.half_life_s or 0, int(config.evict), config.min_count, config.seed % 2**64,
        )  # fmt: skip
        self._row = self._old = self._new = np.empty(0, np.int64)
        self._kind = np.empty(0, np.uint8)

    @property
    def first_row(self) -> int:
        return self.buckets.start * self.layout.bucket_rows

    def step(
        self, ids: np.ndarray, clock: int, counts: np.ndarray | None = None, out: np.ndarray | None = None
    ) -> Mapped:
        """Maps the ids that ranks look up in this step, and learns from them.

        Args:
            ids: int64, each of the owned buckets, with repetitions, in any order.
            clock: See `clock.advance`; without event times the number of the step. Earlier than before: as before.
            counts: uint32, the lookups that each id stands for, at least 1, where ranks sent distinct ids.
            out: int64 `[N]` that the rows are written to; may not be `ids`.
        """
        if not 0 <= clock <= LATEST:
            raise ValueError(f"clock={clock} must be seconds from 0 to {LATEST}")
        ids = np.require(ids, np.int64, ["C", "W"])  # the loops take no read-only array
        size = len(ids)
        self.clock = max(self.clock, clock)
        module, rows = loops(LOOPS), np.empty(size, np.int64) if out is None else out
        if len(self._kind) < 2 * size:
            self._row, self._old, self._new = (np.empty(2 * size, np.int64) for _ in range(3))
            self._kind = np.empty(2 * size, np.uint8)
        statistics = np.zeros(len(COUNTED), np.int64)
        changes = module.step(
            ids, _NO_COUNTS if counts is None else counts, self.identity, self.last_seen, self.score, self.cells,
            self.sighted, self._hints, *self._rules[:5], self.clock, *self._rules[5:], rows, self._row, self._old,
            self._new, self._kind, statistics,
        )  # fmt: skip
        arrays = (self._row, self._old, self._new, self._kind)
        is_aged = self._kind[:changes] == module.AGED
        row, old, new, kind = (array[:changes][~is_aged] for array in arrays)
        return Mapped(
            rows=rows,
            changes=Changes(row=row, old=old, new=new, kind=kind),
            aged=self._row[:changes][is_aged],
            counted=statistics,
        )

    def find(self, ids: np.ndarray, unseen: int = HASHED) -> np.ndarray:
        """The local row of each id, for evaluation: inserts, counts and touches nothing.

        Args:
            unseen: Row of an id without one: `HASHED`, its fallback row as in training; `ZERO`; or a row.
        """
        return find(ids, self.identity, self.layout, self._hints, self.buckets.start, unseen, self.last_seen,
                    self.clock, self.config.ttl_s or 0)  # fmt: skip

    def used(self) -> np.ndarray:
        """Whether each row has an id that has not expired."""
        ttl = self.config.ttl_s
        return (self.score > 0) & (True if ttl is None else self.clock - self.last_seen.astype(np.int64) <= ttl)

    def listing(self) -> Listing:
        rows = np.flatnonzero(self.used())
        return Listing(ids=self.identity[rows], rows=rows + self.first_row, counts=self.counts()[rows],
                       last_seen=self.last_seen[rows])  # fmt: skip

    def counts(self) -> np.ndarray:
        """The count of each row as of the clock: halved where it decays."""
        half_life = self.config.half_life_s
        if half_life is None:
            return self.score
        return self.score >> np.minimum(31, self.clock // half_life - self.last_seen // half_life).astype(np.uint32)

    def sweep(self) -> Changes:
        """Frees expired rows, for a checkpoint or an export. What later steps do is the same with and without it."""
        return self._free((self.score > 0) & ~self.used(), loops(LOOPS).EXPIRED)

    def forget(self, ids: np.ndarray) -> Changes:
        """Frees the rows of ids, so that they are unseen again. The filter, which holds no ids, keeps their counts."""
        rows = find(ids, self.identity, self.layout, self._hints, self.buckets.start, ZERO)
        return self._free(np.isin(np.arange(len(self.identity)), rows[rows >= 0]), 0)

    def _free(self, which: np.ndarray, kind: int) -> Changes:
        rows = np.flatnonzero(which)
        old, kinds = self.identity[rows], np.full(len(rows), kind | loops(LOOPS).LEFT, np.uint8)
        in_first = rows + self.first_row < self.layout.bucket_rows
        self.identity[rows] = np.where(in_first, EMPTY_IN_FIRST, EMPTY)
        self.last_seen[rows] = self.score[rows] = 0
        return Changes(row=rows, old=old, new=np.zeros_like(old), kind=kinds)

    @property
    def nbytes(self) -> int:
        """Bytes of the state and of the hints of searches."""
        return self._hints.nbytes + sum(array.nbytes for array in self.state().values())

    def statistics(self) -> dict[str, int]:
        """How full the owned buckets are: rows with an id, rows that could have one, full buckets, buckets."""
        used = self.used().reshape(-1, self.layout.bucket_rows).sum(1)
        own_rows, buckets = self.layout.own_rows, len(self.buckets)
        full = int((used == own_rows).sum())
        return {"rows_used": int(used.sum()), "rows": buckets * own_rows, "full_buckets": full, "buckets": buckets}

    def state(self) -> dict[str, np.ndarray]:
        """The arrays, not copied: `BY_ROW` `[rows]`, `BY_BUCKET` `[buckets, ...]`. A checkpoint also holds `clock`."""
        return {name: getattr(self, name) for name in (*BY_ROW, *BY_BUCKET)}

    def load(self, state: Mapping[str, np.ndarray], clock: int) -> None:
        """Takes a saved state of the same buckets.

        Raises:
            ValueError: An array's shape is that of other buckets. `fallback` must be that of the saved map; it is not
                checked.
        """
        for name, own in self.state().items():
            if state[name].shape != own.shape:
                raise ValueError(
                    f"dynamic ids: saved {name} has shape {list(state[name].shape)}, this table needs"
                    f" {list(own.shape)}; with other rows or admission, convert it by `resized`"
                )
        for name, own in self.state().items():
            own[...] = state[name]
        self.clock = clock


def find(
    ids: np.ndarray,
    identity: np.ndarray,
    layout: Layout,
    hints: np.ndarray,
    first_bucket: int = 0,
    unseen: int = HASHED,
    last_seen: np.ndarray | None = None,
    clock: int = 0,
    ttl: int = 0,
) -> np.ndarray:
    """As `IdMap.find`, from the identities of consecutive buckets alone.

    Args:
        hints: Of `hints_of`; searches of the same buckets share them.
    """
    ids = np.require(ids, np.int64, ["C", "W"])  # the loops take no read-only array
    rows = np.empty(len(ids), np.int64)
    seen = np.empty(0, np.uint32) if last_seen is None else last_seen
    buckets, bucket_rows, own_rows = layout.buckets, layout.bucket_rows, layout.own_rows
    loops(LOOPS).find(
        ids, identity, seen, hints, buckets, first_bucket, bucket_rows, own_rows, clock, ttl, unseen, rows
    )
    return rows


def hints_of(rows: int) -> np.ndarray:
    """Where searches note the slots in which they found ids; no part of the state. Any slots below the rows
    of a bucket give the same results."""
    return np.zeros(max(1, rows * HINTS_PER_64_ROWS // 64), np.uint8)


def chances(config: DynamicIds) -> np.ndarray:
    """The probability · 2³² that an id with each count from 0 to 255, or more, is admitted at random; or empty."""
    if config.probability == 1:
        return np.empty(0, np.uint64)
    return np.round((1 - (1 - config.probability) ** np.arange(256)) * 2**32).astype(np.uint64)
