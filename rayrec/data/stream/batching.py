"""Cuts tables of mapped rows into batches of equal size, and counts skipped rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, chain, pairwise

import numpy as np
import pyarrow as pa

from rayrec.data.arrays.buffers import I64
from rayrec.data.config import BadRows
from rayrec.data.mapping.collate import collate
from rayrec.data.mapping.rows import RowRange, Rows, from_columns
from rayrec.data.mapping.schema import Schema
from rayrec.data.order.cursor import Cursor
from rayrec.data.order.epoch_planner import RankShare
from rayrec.data.stream.bad_rows import PROBLEM, from_array
from rayrec.data.stream.reading import END
from rayrec.models.batch import Batch
from rayrec.storage.errors import DataError


@dataclass(slots=True)
class Skipped:
    """Skipped rows.

    Args:
        count: number of skipped rows.
        samples: errors of the first ones.
    """

    count: int = 0
    samples: list[DataError] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Run:
    """Good rows `[start, stop)` of a table. `ends`: rows that the rank has passed after each row of the table."""

    rows: Rows
    ends: I64
    start: int
    stop: int

    @property
    def own_ends(self) -> I64:
        """`ends` of the rows of this run."""
        return self.ends[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class _Merged:
    """The interleaved runs of all windows of a block, or a single run.

    Args:
        ends: `ends` of the rows of all runs, ascending.
    """

    runs: list[_Run]
    ends: I64

    @classmethod
    def of(cls, runs: list[_Run]) -> _Merged:
        ends = [run.own_ends for run in runs]
        if len(ends) == 1:
            return cls(runs, ends[0])
        lowest, highest = min(end[0] for end in ends), max(end[-1] for end in ends)
        if highest - lowest + 1 == sum(map(len, ends)):  # consecutive
            return cls(runs, np.arange(lowest, highest + 1))
        return cls(runs, np.sort(np.concatenate(ends), kind="stable"))

    def split(self, rows: int) -> tuple[list[RowRange], _Merged]:
        """Splits off the first rows, grouped by run."""
        last_end = self.ends[rows - 1]
        cuts = [run.start + int(run.own_ends.searchsorted(last_end, side="right")) for run in self.runs]
        cut_runs = list(zip(self.runs, cuts, strict=True))
        split_off = [(run.rows, run.start, cut) for run, cut in cut_runs if run.start < cut]
        rest = [_Run(run.rows, run.ends, cut, run.stop) for run, cut in cut_runs if cut < run.stop]
        return split_off, _Merged(rest, self.ends[rows:])


@dataclass(slots=True)
class _Pool:
    """Good rows that wait to be batched.

    Args:
        schema: the schema of the rows.
        share: the rank's share of the epoch.
        policy: handling of bad rows.
        skipped: receives the skipped rows.
        block_ends: with interleaved windows, the rows of the rank up to the end of each block being read. No row of a
            block is taken before the block is complete.
        complete: True if the tables contain all rows.
        ready: rows that can be taken.
        rows: number of rows in `ready`.
        pending: runs of the incomplete block.
        seen: rows of all tables so far.
        bad: heap of the `ends` of bad rows that no cursor has passed yet.
        num_skipped: bad rows that a cursor has passed.
    """

    schema: Schema
    share: RankShare
    policy: BadRows
    skipped: Skipped
    block_ends: deque[int] | None = None
    complete: bool = True
    ready: deque[_Merged] = field(default_factory=deque)
    rows: int = 0
    pending: list[_Run] = field(default_factory=list)
    seen: int = 0
    bad: list[int] = field(default_factory=list)
    num_skipped: int = 0

    def cursor(self, passed: int) -> Cursor:
        """The rank's cursor after `passed` rows. Call it with ascending values."""
        while self.bad and self.bad[0] <= passed:
            heappop(self.bad)
            self.num_skipped += 1
        return self.share.cursor(passed, self.num_skipped)

    def add(self, batch: pa.RecordBatch) -> int:
        """Adds rows. Returns the rows that the rank has passed after the last of them.

        Raises:
            DataError: the first bad row, or more bad rows than the policy allows.
        """
        rows, ends = from_columns(batch, self.schema.num_lists), np.arange(self.seen + 1, self.seen + len(batch) + 1)
        if END in batch.schema.names:
            ends = batch.column(END).to_numpy()
        bad = self._bad_rows(batch.column(PROBLEM))
        for end in ends[bad].tolist():
            heappush(self.bad, end)
        restarts = [] if self.block_ends is None else (np.flatnonzero(np.diff(ends) < 0) + 1).tolist()
        for start, stop in pairwise([0, *restarts, len(rows)]):
            while start < stop:
                cut = self._end_of_block(ends, start, stop)
                edges = [start - 1, *(row for row in bad if start <= row < cut), cut]
                runs = [
                    _Run(rows, ends, run_start + 1, run_stop)
                    for run_start, run_stop in pairwise(edges)
                    if run_start + 1 < run_stop
                ]
                self._add_runs(runs, cut - start)
                start = cut
        return int(ends[-1]) if len(ends) else 0

    def _bad_rows(self, problems: pa.Array) -> list[int]:
        """The bad rows, ascending. Counts them as skipped."""
        if problems.null_count == len(problems):
            return []
        errors, skipped = from_array(problems), self.skipped
        if self.policy.policy == "error":
            raise errors[0]
        bad: list[int] = np.flatnonzero(problems.is_valid().to_numpy(zero_copy_only=False)).tolist()
        skipped.count += len(bad)
        skipped.samples += errors[: self.policy.samples - len(skipped.samples)]
        if skipped.count > self.policy.limit:
            example = f", e.g. {skipped.samples[-1]}" if skipped.samples else ""
            raise DataError(
                f"more than {self.policy.limit} bad rows were skipped{example}",
                fix="correct the data (`rayrec data check` lists the problems), or raise data.read.bad_rows.limit",
            )
        return bad

    def _end_of_block(self, ends: I64, start: int, stop: int) -> int:
        """The end of the current block among rows with ascending `ends`; moves to the next block if it has none."""
        if self.block_ends is None:
            return stop
        while ends[start] > self.block_ends[0]:
            self.finish()
            self.block_ends.popleft()
        return start + int(np.searchsorted(ends[start:stop], self.block_ends[0], side="right"))

    def _add_runs(self, runs: list[_Run], rows: int) -> None:
        self.pending += runs
        self.seen += rows
        if self.block_ends is None or (self.complete and self.seen == self.block_ends[0]):
            self.finish()

    def finish(self) -> None:
        """Makes all pending rows ready."""
        blocks = [self.pending] if self.block_ends is not None else [[run] for run in self.pending]
        for merged in (_Merged.of(runs) for runs in blocks if runs):
            self.ready.append(merged)
            self.rows += len(merged.ends)
        self.pending = []

    def take(self, rows: int) -> tuple[list[RowRange], int]:
        """Removes rows from the front. Also returns the rows that the rank has passed after the last of them."""
        batch: list[RowRange] = []
        passed = 0
        self.rows -= rows
        while rows:
            merged = self.ready.popleft()
            count = min(rows, len(merged.ends))
            ranges, rest = merged.split(count)
            if rest.runs:
                self.ready.appendleft(rest)
            batch, rows, passed = batch + ranges, rows - count, int(merged.ends[count - 1])
        return batch, passed

    def take_until(self, end: int) -> list[RowRange]:
        """Removes the good rows among the first `end` rows of the rank."""
        return self.take(sum(int(np.searchsorted(merged.ends, end, side="right")) for merged in self.ready))[0]


def make_batches(
    tables: Generator[pa.Table],
    schema: Schema,
    sizes: Iterable[int],
    share: RankShare,
    policy: BadRows,
    skipped: Skipped,
    fewer: bool = False,
    block_ends: deque[int] | None = None,
) -> Generator[tuple[Batch, Cursor]]:
    """Yields batches of `sizes` good rows, each with the cursor after it. The last batch may be smaller.

    The last cursor covers all rows, trailing bad rows included; if no row is good, it comes with an empty batch.
    Closing this closes `tables`.

    Args:
        sizes: rows of the batches; must not end.
        fewer: True if the tables may lack skipped rows; they then have a column `reading.END`.
        block_ends: as in `reading.window_shares`, if windows are interleaved.

    Raises:
        DataError: the first bad row, or more bad rows than the policy allows.
    """
    pool, consumed, total = _Pool(schema, share, policy, skipped, block_ends, not fewer), 0, share.rows
    next_sizes = iter(sizes)
    size = next(next_sizes)
    held_back: Batch | None = None  # until it is known whether it is the last
    try:
        for batch in chain((batch for table in tables for batch in table.to_batches()), [None]):
            if batch is None:
                pool.finish()
            else:
                pool.add(batch)
            while pool.rows >= size:
                if held_back is not None:
                    yield held_back, pool.cursor(consumed)
                ranges, consumed = pool.take(size)
                held_back, size = collate(ranges, schema), next(next_sizes)
        if pool.seen != total and not fewer:
            raise DataError(f"read {pool.seen} rows, but the footers list {total}")
        if held_back is not None and pool.rows:
            yield held_back, pool.cursor(consumed)
        if held_back is None or pool.rows:
            held_back = collate(pool.take(pool.rows)[0], schema)
        if total:
            yield held_back, pool.cursor(total)
    except DataError:
        if held_back is not None:
            yield held_back, pool.cursor(consumed)
        raise
    finally:
        tables.close()


def make_steps(
    tables: Generator[pa.Table],
    schema: Schema,
    steps: Iterable[int],
    share: RankShare,
    policy: BadRows,
    skipped: Skipped,
) -> Generator[tuple[Batch, Cursor]]:
    """Yields batches of the good rows in consecutive ranges of the rank's sequence. Closing this closes `tables`.

    Args:
        steps: rows of the range of each batch, bad rows included.

    Raises:
        DataError: as `make_batches`.
    """
    pool, read = _Pool(schema, share, policy, skipped), 0
    batches = (batch for table in tables for batch in table.to_batches())
    try:
        for end in accumulate(steps):
            while read < end and (batch := next(batches, None)) is not None:  # skipped rows come last
                read = max(read, pool.add(batch))
            yield collate(pool.take_until(end), schema), pool.cursor(end)
    finally:
        tables.close()
