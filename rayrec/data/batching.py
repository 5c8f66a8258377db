"""Cuts mapped tables into batches of equal size and keeps account of the rows that are left out."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from rayrec.data.collate import collate
from rayrec.data.cursor import RankCursor
from rayrec.data.errors import DataError
from rayrec.data.options import BadRows
from rayrec.data.order import count
from rayrec.data.reading import PROBLEM
from rayrec.data.rows import Part, Rows, from_columns
from rayrec.data.schema import Schema
from rayrec.models.batch import Batch


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
        parts: runs of good rows, each with the number of bad rows right before it.
        rows: good rows in `parts`.
        bad_rows: bad rows after the last part.
    """

    parts: deque[tuple[Part, int]] = field(default_factory=deque)
    rows: int = 0
    bad_rows: int = 0

    def add(self, rows: Rows, start: int, stop: int) -> None:
        if start < stop:
            self.parts.append(((rows, start, stop), self.bad_rows))
            self.rows, self.bad_rows = self.rows + stop - start, 0

    def take(self, rows: int) -> tuple[list[Part], int]:
        """Takes good rows off the front; also how many rows, good and bad, these are of the rank's sequence."""
        taken: list[Part] = []
        consumed = 0
        self.rows -= rows
        while rows:
            (mapped, start, stop), bad_rows = self.parts.popleft()
            cut = min(stop, start + rows)
            taken.append((mapped, start, cut))
            rows -= cut - start
            consumed += bad_rows + cut - start
            if cut < stop:
                self.parts.appendleft(((mapped, cut, stop), 0))
        return taken, consumed


def make_batches(
    tables: Iterator[pa.Table], schema: Schema, batch_rows: int, start: RankCursor, policy: BadRows, skipped: Skipped
) -> Generator[tuple[Batch, RankCursor]]:
    """Batches of exactly `batch_rows` good rows across tables, the last maybe smaller, each with the cursor after it.

    The last cursor has all rows done, also where bad rows come last; where all rows are bad, it comes with an empty
    batch. Closing this closes `tables`.

    Raises:
        DataError: the first bad row, or more of them than the policy allows.
    """
    waiting, read, consumed, total = _Waiting(), 0, 0, count(start.pieces)
    ready: Batch | None = None  # held back until it is known whether it is the last
    try:
        for table in tables:
            for batch in table.to_batches():
                read += batch.num_rows
                _add(batch, len(schema.sparse), waiting, policy, skipped)
                while waiting.rows >= batch_rows:
                    if ready is not None:
                        yield ready, RankCursor(start.base, start.pieces, consumed)
                    parts, rows = waiting.take(batch_rows)
                    ready, consumed = collate(parts, schema), consumed + rows
        if read != total:
            raise DataError(f"{read} rows were read where the footers promise {total}")
        if ready is not None and waiting.rows:
            yield ready, RankCursor(start.base, start.pieces, consumed)
        if ready is None or waiting.rows:
            ready = collate(waiting.take(waiting.rows)[0], schema)
        if total:
            yield ready, RankCursor(start.base, start.pieces, total)
    except DataError:
        if ready is not None:
            yield ready, RankCursor(start.base, start.pieces, consumed)
        raise
    finally:
        close = getattr(tables, "close", None)
        if close is not None:
            close()


def _add(batch: pa.RecordBatch, num_features: int, waiting: _Waiting, policy: BadRows, skipped: Skipped) -> None:
    rows, problems = from_columns(batch, num_features), batch.column(PROBLEM)
    if problems.null_count == len(problems):
        waiting.add(rows, 0, len(rows))
        return
    texts = [text for text in problems.drop_null().to_pylist() if text]
    if policy.policy == "error":
        raise DataError.from_dict(json.loads(texts[0]))
    bad = np.flatnonzero(problems.is_valid().to_numpy(zero_copy_only=False)).tolist()
    skipped.count += len(bad)
    errors = [DataError.from_dict(json.loads(text)) for text in texts[: policy.samples - len(skipped.samples)]]
    skipped.samples += errors
    if skipped.count > policy.limit:
        last = skipped.samples[-1]
        raise DataError(f"more than {policy.limit} bad rows were skipped, among them: {last}")
    at = 0
    for row in bad:
        waiting.add(rows, at, row)
        waiting.bad_rows, at = waiting.bad_rows + 1, row + 1
    waiting.add(rows, at, len(rows))
