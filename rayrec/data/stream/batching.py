"""Cuts mapped tables into batches of equal size and keeps account of the rows that are left out."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec.data.errors import DataError
from rayrec.data.mapping.collate import collate
from rayrec.data.mapping.rows import Part, Rows, from_columns
from rayrec.data.mapping.schema import Schema
from rayrec.data.options import BadRows
from rayrec.data.order.cursor import Cursor
from rayrec.data.order.rank_part import RankPart
from rayrec.data.stream.reading import END
from rayrec.data.stream.records import PROBLEM, from_array
from rayrec.models.batch import Batch

I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class Skipped:
    """Rows that were left out.

    Args:
        count: how many.
        samples: the first of them, each with its place.
    """

    count: int = 0
    samples: list[DataError] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON values for the run folder."""
        return {"count": self.count, "samples": [sample.to_dict() for sample in self.samples]}


@dataclass(slots=True)
class _Waiting:
    """Good rows on their way into batches.

    Args:
        parts: runs of good rows; with each table's rows, how many rows of its sequence the rank has passed after each.
        rows: good rows in `parts`.
        bad: for bad rows that no cursor has passed yet, how many rows the rank has passed after each; skipped: the
            number of those that some cursor has.
    """

    parts: deque[tuple[Part, I64]] = field(default_factory=deque)
    rows: int = 0
    bad: deque[int] = field(default_factory=deque)
    skipped: int = 0

    def cursor(self, part: RankPart, passed: int) -> Cursor:
        """The rank's state after so many rows; asked in order."""
        while self.bad and self.bad[0] <= passed:
            self.bad.popleft()
            self.skipped += 1
        return part.cursor(passed, self.skipped)

    def add(self, rows: Rows, ends: I64, start: int, stop: int) -> None:
        if start < stop:
            self.parts.append(((rows, start, stop), ends))
            self.rows += stop - start

    def take(self, rows: int) -> tuple[list[Part], int]:
        """Takes good rows off the front; also how far in the rank's sequence the last of them is."""
        taken: list[Part] = []
        passed = 0
        self.rows -= rows
        while rows:
            (mapped, start, stop), ends = self.parts.popleft()
            cut = min(stop, start + rows)
            taken.append((mapped, start, cut))
            rows -= cut - start
            passed = int(ends[cut - 1])
            if cut < stop:
                self.parts.appendleft(((mapped, cut, stop), ends))
        return taken, passed

    def take_until(self, end: int) -> list[Part]:
        """Takes the good rows among the first `end` of the rank's sequence."""
        rows = sum(int(np.searchsorted(ends[first:stop], end, side="right")) for (_, first, stop), ends in self.parts)
        return self.take(rows)[0]


def make_batches(
    tables: Iterator[pa.Table],
    schema: Schema,
    sizes: Iterable[int],
    part: RankPart,
    policy: BadRows,
    skipped: Skipped,
    fewer: bool = False,
) -> Generator[tuple[Batch, Cursor]]:
    """Batches of exactly so many good rows across tables, the last maybe smaller, each with the cursor after it.

    The last cursor has all rows done, also where bad rows come last; where no row is good, it comes with an empty
    batch. Closing this closes `tables`.

    Args:
        sizes: rows of one batch after another, without an end.
        fewer: the tables may lack rows that were left out, and say where (`reading.END`).

    Raises:
        DataError: the first bad row, or more of them than the policy allows.
    """
    waiting, read, consumed, total = _Waiting(), 0, 0, part.rows
    wanted = iter(sizes)
    size = next(wanted)
    ready: Batch | None = None  # held back until it is known whether it is the last
    try:
        for table in tables:
            for batch in table.to_batches():
                ends = _ends(batch, read)
                read = int(ends[-1]) if len(ends) else read
                _add(batch, len(schema.sparse), ends, waiting, policy, skipped)
                while waiting.rows >= size:
                    if ready is not None:
                        yield ready, waiting.cursor(part, consumed)
                    parts, consumed = waiting.take(size)
                    ready, size = collate(parts, schema), next(wanted)
        if read != total and not fewer:
            raise DataError(f"{read} rows were read where the footers promise {total}")
        if ready is not None and waiting.rows:
            yield ready, waiting.cursor(part, consumed)
        if ready is None or waiting.rows:
            ready = collate(waiting.take(waiting.rows)[0], schema)
        if total:
            yield ready, waiting.cursor(part, total)
    except DataError:
        if ready is not None:
            yield ready, waiting.cursor(part, consumed)
        raise
    finally:
        close = getattr(tables, "close", None)
        if close is not None:
            close()


def make_steps(
    tables: Iterator[pa.Table],
    schema: Schema,
    steps: Iterable[int],
    part: RankPart,
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
    waiting, read = _Waiting(), 0
    ends_of_steps = accumulate(steps)
    try:
        end = next(ends_of_steps, None)
        for table in tables:
            for batch in table.to_batches():
                ends = _ends(batch, read)
                read = int(ends[-1]) if len(ends) else read
                _add(batch, len(schema.sparse), ends, waiting, policy, skipped)
                while end is not None and read >= end:
                    yield collate(waiting.take_until(end), schema), waiting.cursor(part, end)
                    end = next(ends_of_steps, None)
        while end is not None:  # rows that were left out came last
            yield collate(waiting.take_until(end), schema), waiting.cursor(part, end)
            end = next(ends_of_steps, None)
    finally:
        close = getattr(tables, "close", None)
        if close is not None:
            close()


def _ends(batch: pa.RecordBatch, read: int) -> I64:
    """How many rows of its sequence the rank has passed after each of these."""
    if END not in batch.schema.names:
        return np.arange(read + 1, read + batch.num_rows + 1)
    ends: I64 = batch.column(END).to_numpy()
    assert not len(ends) or ends[0] > read, "tables come in order, each once"
    return ends


def _add(
    batch: pa.RecordBatch, num_features: int, ends: I64, waiting: _Waiting, policy: BadRows, skipped: Skipped
) -> None:
    rows, problems = from_columns(batch, num_features), batch.column(PROBLEM)
    if problems.null_count == len(problems):
        waiting.add(rows, ends, 0, len(rows))
        return
    errors = from_array(problems)
    if policy.policy == "error":
        raise errors[0]
    bad = np.flatnonzero(problems.is_valid().to_numpy(zero_copy_only=False)).tolist()
    skipped.count += len(bad)
    skipped.samples += errors[: policy.samples - len(skipped.samples)]
    if skipped.count > policy.limit:
        last = f", among them: {skipped.samples[-1]}" if skipped.samples else ""
        raise DataError(
            f"more than {policy.limit} bad rows were skipped{last}",
            fix="mend the data (`rayrec data check` shows what is wrong), or raise data.read.bad_rows.limit",
        )
    waiting.bad.extend(ends[bad].tolist())
    at = 0
    for row in bad:
        waiting.add(rows, ends, at, row)
        at = row + 1
    waiting.add(rows, ends, at, len(rows))
