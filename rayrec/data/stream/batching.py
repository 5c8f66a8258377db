"""Cuts mapped tables into batches of equal size and keeps account of the rows that are left out."""

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
    """Rows that were left out.

    Args:
        count: how many.
        samples: the first of them, each with its place.
    """

    count: int = 0
    samples: list[DataError] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Run:
    """Good rows `[start, stop)` of a table; how many rows of its sequence the rank has passed after each of all."""

    rows: Rows
    ends: I64
    start: int
    stop: int

    @property
    def left(self) -> I64:
        """The ends of its rows."""
        return self.ends[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Runs whose rows come mixed, of all windows of a block; or one run.

    Args:
        ends: of all rows of all runs, ascending.
    """

    runs: list[_Run]
    ends: I64

    @classmethod
    def of(cls, runs: list[_Run]) -> _Stretch:
        ends = [run.left for run in runs]
        if len(ends) == 1:
            return cls(runs, ends[0])
        first, last = min(end[0] for end in ends), max(end[-1] for end in ends)
        if last - first + 1 == sum(map(len, ends)):  # all rows between are here
            return cls(runs, np.arange(first, last + 1))
        return cls(runs, np.sort(np.concatenate(ends), kind="stable"))

    def split(self, rows: int) -> tuple[list[RowRange], _Stretch]:
        """The next rows, those of each run beside each other; and what is left."""
        last = self.ends[rows - 1]
        cuts = [run.start + int(run.left.searchsorted(last, side="right")) for run in self.runs]
        both = list(zip(self.runs, cuts, strict=True))
        taken = [(run.rows, run.start, cut) for run, cut in both if run.start < cut]
        rest = [_Run(run.rows, run.ends, cut, run.stop) for run, cut in both if cut < run.stop]
        return taken, _Stretch(rest, self.ends[rows:])


@dataclass(slots=True)
class _Pool:
    """Good rows on their way into batches.

    Args:
        schema: of the rows; part: whose they are.
        policy: on bad rows, which are noted in `skipped`.
        block_ends: where windows come mixed: rows of the rank up to the end of each block that is being read. All of a
            block is here before its first row is taken.
        whole: whether the tables have all rows.
        stretches: of rows that can be taken; rows: how many those are.
        arriving: runs of the block that is not all here yet.
        seen: rows of all tables.
        bad: for bad rows that no cursor has passed yet, how many rows the rank has passed after each (a heap);
            left_out: the number of those that some cursor has.
    """

    schema: Schema
    part: RankShare
    policy: BadRows
    skipped: Skipped
    block_ends: deque[int] | None = None
    whole: bool = True
    stretches: deque[_Stretch] = field(default_factory=deque)
    rows: int = 0
    arriving: list[_Run] = field(default_factory=list)
    seen: int = 0
    bad: list[int] = field(default_factory=list)
    left_out: int = 0

    def cursor(self, passed: int) -> Cursor:
        """The rank's state after so many rows; call it in ascending order."""
        while self.bad and self.bad[0] <= passed:
            heappop(self.bad)
            self.left_out += 1
        return self.part.cursor(passed, self.left_out)

    def add(self, batch: pa.RecordBatch) -> int:
        """Takes rows; returns how many of its sequence the rank has passed after the last of them.

        Raises:
            DataError: the first bad row, or more of them than the policy allows.
        """
        rows, ends = from_columns(batch, self.schema.num_lists), np.arange(self.seen + 1, self.seen + len(batch) + 1)
        if END in batch.schema.names:
            ends = batch.column(END).to_numpy()
        bad = self._bad_rows(batch.column(PROBLEM))
        for end in ends[bad].tolist():
            heappush(self.bad, end)
        falls = [] if self.block_ends is None else (np.flatnonzero(np.diff(ends) < 0) + 1).tolist()
        for start, stop in pairwise([0, *falls, len(rows)]):
            while start < stop:
                cut = self._end_of_block(ends, start, stop)
                edges = [start - 1, *(row for row in bad if start <= row < cut), cut]
                runs = [_Run(rows, ends, first + 1, last) for first, last in pairwise(edges) if first + 1 < last]
                self._arrived(runs, cut - start)
                start = cut
        return int(ends[-1]) if len(ends) else 0

    def _bad_rows(self, problems: pa.Array) -> list[int]:
        """Those that cannot be used, ascending."""
        if problems.null_count == len(problems):
            return []
        errors, skipped = from_array(problems), self.skipped
        if self.policy.policy == "error":
            raise errors[0]
        bad: list[int] = np.flatnonzero(problems.is_valid().to_numpy(zero_copy_only=False)).tolist()
        skipped.count += len(bad)
        skipped.samples += errors[: self.policy.samples - len(skipped.samples)]
        if skipped.count > self.policy.limit:
            last = f", among them: {skipped.samples[-1]}" if skipped.samples else ""
            raise DataError(
                f"more than {self.policy.limit} bad rows were skipped{last}",
                fix="mend the data (`rayrec data check` shows what is wrong), or raise data.read.bad_rows.limit",
            )
        return bad

    def _end_of_block(self, ends: I64, start: int, stop: int) -> int:
        """Where rows of the next block begin among these, which ascend; that one is begun if all of them are its."""
        if self.block_ends is None:
            return stop
        while ends[start] > self.block_ends[0]:
            self.finish()
            self.block_ends.popleft()
        return start + int(np.searchsorted(ends[start:stop], self.block_ends[0], side="right"))

    def _arrived(self, runs: list[_Run], rows: int) -> None:
        self.arriving += runs
        self.seen += rows
        if self.block_ends is None or (self.whole and self.seen == self.block_ends[0]):
            self.finish()

    def finish(self) -> None:
        """All rows that have come can be taken."""
        mixed = [self.arriving] if self.block_ends is not None else [[run] for run in self.arriving]
        for stretch in (_Stretch.of(runs) for runs in mixed if runs):
            self.stretches.append(stretch)
            self.rows += len(stretch.ends)
        self.arriving = []

    def take(self, rows: int) -> tuple[list[RowRange], int]:
        """Takes good rows off the front; also how far in the rank's sequence the last of them is."""
        taken: list[RowRange] = []
        passed = 0
        self.rows -= rows
        while rows:
            stretch = self.stretches.popleft()
            some = min(rows, len(stretch.ends))
            parts, rest = stretch.split(some)
            if rest.runs:
                self.stretches.appendleft(rest)
            taken, rows, passed = taken + parts, rows - some, int(stretch.ends[some - 1])
        return taken, passed

    def take_until(self, end: int) -> list[RowRange]:
        """Takes the good rows among the first `end` of the rank's sequence."""
        return self.take(sum(int(np.searchsorted(one.ends, end, side="right")) for one in self.stretches))[0]


def make_batches(
    tables: Generator[pa.Table],
    schema: Schema,
    sizes: Iterable[int],
    part: RankShare,
    policy: BadRows,
    skipped: Skipped,
    fewer: bool = False,
    block_ends: deque[int] | None = None,
) -> Generator[tuple[Batch, Cursor]]:
    """Batches of exactly so many good rows across tables, the last maybe smaller, each with the cursor after it.

    The last cursor has all rows done, also where bad rows come last; where no row is good, it comes with an empty
    batch. Closing this closes `tables`.

    Args:
        sizes: rows of one batch after another, without an end.
        fewer: the tables may lack rows that were left out, and say where (`reading.END`).
        block_ends: as of `reading.pieces_of`, if windows are mixed.

    Raises:
        DataError: the first bad row, or more of them than the policy allows.
    """
    pool, consumed, total = _Pool(schema, part, policy, skipped, block_ends, not fewer), 0, part.rows
    wanted = iter(sizes)
    size = next(wanted)
    ready: Batch | None = None  # held back until it is known whether it is the last
    try:
        for batch in chain((batch for table in tables for batch in table.to_batches()), [None]):
            if batch is None:
                pool.finish()
            else:
                pool.add(batch)
            while pool.rows >= size:
                if ready is not None:
                    yield ready, pool.cursor(consumed)
                parts, consumed = pool.take(size)
                ready, size = collate(parts, schema), next(wanted)
        if pool.seen != total and not fewer:
            raise DataError(f"{pool.seen} rows were read where the footers promise {total}")
        if ready is not None and pool.rows:
            yield ready, pool.cursor(consumed)
        if ready is None or pool.rows:
            ready = collate(pool.take(pool.rows)[0], schema)
        if total:
            yield ready, pool.cursor(total)
    except DataError:
        if ready is not None:
            yield ready, pool.cursor(consumed)
        raise
    finally:
        tables.close()


def make_steps(
    tables: Generator[pa.Table],
    schema: Schema,
    steps: Iterable[int],
    part: RankShare,
    policy: BadRows,
    skipped: Skipped,
) -> Generator[tuple[Batch, Cursor]]:
    """Batches that go along the rank's sequence: the good rows of so many of its rows, one batch after another.

    Closing this closes `tables`.

    Args:
        steps: rows of the sequence in each batch.

    Raises:
        DataError: as `make_batches`.
    """
    pool, read = _Pool(schema, part, policy, skipped), 0
    batches = (batch for table in tables for batch in table.to_batches())
    try:
        for end in accumulate(steps):
            while read < end and (batch := next(batches, None)) is not None:  # rows that were left out come last
                read = max(read, pool.add(batch))
            yield collate(pool.take_until(end), schema), pool.cursor(end)
    finally:
        tables.close()
