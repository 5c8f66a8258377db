"""Divides rows into those to train on and those to evaluate on: the last by time, or some by a hash of their number.

What lies in files of its own needs no rule for each row: `hold_out.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat

from rayrec.data.formats.parquet_parts import Layout, write_parts
from rayrec.data.mapping.arrow_types import UNITS, decoded
from rayrec.data.mapping.buffers import Mask
from rayrec.data.mapping.hashing import mix64_array, seed_of
from rayrec.data.source.filters import Condition
from rayrec.data.source.partitioned import Partitioned, tables_of
from rayrec.storage.errors import DataError

Held = Callable[[pa.Table, int], Mask]
"""Which rows of a table, whose first one has this number in the data set, are held out."""

_HELD = 4  # keeps these draws apart from other hashes
_MOST_TIMES = 1 << 21


def by_hash(share: float) -> Held:
    """A share of the rows, by a hash of their number: always the same ones."""

    def held(table: pa.Table, first: int) -> Mask:
        draws = mix64_array(np.arange(first, first + table.num_rows), seed_of(_HELD))
        mask: Mask = draws < np.uint64(int(share * 2**64))
        return mask

    return held


def from_time(column: str, first: int | str) -> Held:
    """The rows from a moment on, which is written as in a filter."""
    condition = Condition(column, ">=", (first,))
    return lambda table, _: condition.holds(table.column(column))


def last_by_time(found: Partitioned, column: str, share: float) -> int | str | None:
    """The moment from which on about a share of the rows lie, as a filter writes it; of many rows, by some of them.

    Returns:
        None where the times are too few to cut there: nothing, or more than half of the rows, would be held out.
    """
    times, kind = _times(found, column)
    if not len(times):
        return None
    cut = int(np.quantile(times, 1 - share, method="higher"))
    if not 0 < np.count_nonzero(times >= cut) <= len(times) / 2:
        return None
    if pat.is_integer(kind):
        return cut
    if pat.is_date(kind):
        days = cut // (86_400_000 if pat.is_date64(kind) else 1)
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=days)).date().isoformat()
    return datetime.fromtimestamp(cut // UNITS[kind.unit], UTC).strftime("%Y-%m-%d %H:%M:%S")


def _times(found: Partitioned, column: str) -> tuple[npt.NDArray[np.int64], pa.DataType]:
    """The column's values, or evenly chosen ones of very many."""
    kept: list[npt.NDArray[np.int64]] = []
    stride, kind = 1, pa.int64()
    for table in (table for one in found.files for table in tables_of(one, found.types, [column])):
        array = decoded(table.column(column).combine_chunks())
        kind, numbers = array.type, array.cast(pa.int32() if pat.is_date32(array.type) else pa.int64(), safe=False)
        kept.append(numbers.drop_null().to_numpy()[::stride].astype(np.int64))
        if sum(map(len, kept)) > _MOST_TIMES:
            kept, stride = [np.concatenate(kept)[::2]], 2 * stride
    return np.concatenate([np.empty(0, np.int64), *kept]), kind


def write_split(found: Partitioned, held: Held, train: Path, evaluation: Path, layout: Layout) -> tuple[int, int]:
    """Writes all rows, in their order, into one of two folders.

    Returns:
        rows to train on, rows held out.

    Raises:
        DataError: one of them would be empty, or the columns differ between files.
    """
    sides = {train: False, evaluation: True}
    rows = dict.fromkeys(sides, 0)

    def chosen(folder: Path) -> Iterator[pa.RecordBatch]:
        first, schema = 0, None
        for table in (table for one in found.files for table in tables_of(one, found.types)):
            schema = schema or table.schema
            try:
                part = table.select(schema.names).cast(schema)
            except (KeyError, ValueError) as error:
                raise DataError(f"the files' columns differ: {error}", fix="begin with files of one kind") from error
            part = part.filter(pa.array(held(table, first) == sides[folder]))
            first, rows[folder] = first + table.num_rows, rows[folder] + part.num_rows
            yield from part.to_batches()

    for folder in sides:
        write_parts(chosen(folder), folder, "part", layout)
        if not rows[folder]:
            file = found.files[0].file.uri
            raise DataError("too few rows to set some aside for evaluation", file=file, fix="give more rows")
    return rows[train], rows[evaluation]
