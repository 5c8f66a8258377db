"""Histories from an interaction log: a row an impression with what came before it, or a row a user with all of it.

"Before" is strict: rows of one user and one time do not see each other, since nobody knows which came first.
The log's columns that are read are held in memory. Rows may be divided into those to train on, to choose by and to test
on, by time or by their position among the user's: no part sees what is later than its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.arrays.buffers import I64
from rayrec.data.arrays.lists import offsets_of
from rayrec.data.formats.find_parquet import find_parquet
from rayrec.data.formats.parquet_writer import Layout, write_parts
from rayrec.data.mapping.column_types import column_missing
from rayrec.data.source.filters import Condition
from rayrec.storage.errors import DataError
from rayrec.storage.parquet import open_parquet


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What the columns of an interaction log are.

    Args:
        user: whose history it is.
        time: when; rows of one user with one time do not see each other.
        columns: what a history holds of each row, its item for example.
    """

    user: str
    time: str
    columns: tuple[str, ...]


Divide = Callable[[pa.Array, I64], I64]
"""From rows by user, then time: their times, and where each one's user begins, to the number of the part in `PARTS`."""
PARTS = ("train", "validation", "test")


def by_position(_: pa.Array, first: I64) -> I64:
    """Leave one out: of each user with three rows or more the newest is for the test, the one before for validation."""
    size = np.bincount(first, minlength=len(first))[first]
    to_newest = first + size - 1 - np.arange(len(first))
    return np.where((size > 2) & (to_newest < 2), 2 - to_newest, 0)


def by_time(test: int | str, validation: int | str | None = None) -> Divide:
    """Rows from `test` on are for the test, those from `validation` until then for that; moments as in a filter."""

    def divide(time: pa.Array, first: I64) -> I64:
        moments = [test] if validation is None else [test, validation]
        since = [Condition("time", ">=", (moment,)) for moment in moments]
        for one in since:
            one.check(time.type, "the log")
        return np.select([one.holds(time) for one in since], [2, 1][: len(since)], 0)

    return divide


def make_sequences(
    paths: Sequence[str],
    out: Path,
    log: Log,
    *,
    rows: Literal["impressions", "users"] = "impressions",
    length: int = 50,
    divide: Divide | None = None,
) -> dict[Path, int]:
    """Writes Parquet files; the number of rows in each folder: `out`, or `train`, `validation` and `test` in it.

    Args:
        rows: "impressions": every row of the log, in order of time, with lists `history_C` for each of the log's
            columns C and `history_TIME`, of the same user's earlier rows; "users": a row a user with lists C and TIME
            of all rows, oldest first, rows of one time in the order of the files.
        length: longest history of an impression, the newest rows; of users all rows are kept.
        divide: `by_position`, or what `by_time` makes; None: not at all. A user's row of `train` holds its rows there;
            in another part, its first row there as the newest, and all that came before that.

    Raises:
        DataError: no such column, a null user or time, a history that would have the name of a column, a moment that
            does not fit the times, or nothing to train on or to test on.
    """
    table = _read(paths, log)
    table = table.take(pc.sort_indices(table, [(log.time, "ascending")]))  # stable: the order of the files stays
    listed = list(dict.fromkeys((*log.columns, log.time)))
    at = _places(table, log)
    if divide is None:
        parts = {out: np.arange(len(at.row))}
    else:
        part = divide(table[log.time].combine_chunks().take(pa.array(at.row)), at.first)
        parts = {out / name: np.flatnonzero(part == number) for number, name in enumerate(PARTS)}
        parts = {folder: places for folder, places in parts.items() if len(places) or folder.name != "validation"}
        if empty := [folder.name for folder, places in parts.items() if not len(places)]:
            raise DataError(f"the part {empty[0]!r} is empty", fix="divide elsewhere, or give more rows")
    table = _impressions(table, listed, at, length) if rows == "impressions" else table
    written = {}
    for folder, places in parts.items():
        if rows == "impressions":
            made = table.take(pa.array(np.sort(at.row[places])))
        else:
            places = places if folder.name in PARTS[1:] and divide else places[::-1]  # the first of a user, or the last
            made = _users(table, log, listed, at, places[np.unique(at.first[places], return_index=True)[1]])
        written[folder] = int(made.num_rows)
        write_parts(made.to_batches(max_chunksize=1 << 16), folder, rows, Layout(row_group_rows=1 << 14))
    return written


def _read(paths: Sequence[str], log: Log) -> pa.Table:
    """All rows, their columns as single arrays."""
    tables = []
    for file in (found.uri for found in find_parquet(list(paths))):
        with open_parquet(file) as parquet:
            tables.append(parquet.read())
        for column in (log.user, log.time, *log.columns):
            if column not in tables[-1].column_names:
                raise column_missing(column, tables[-1].schema, file, "name a column of the log")
    table = pa.concat_tables(tables).combine_chunks()
    for column in (log.user, log.time):
        if table[column].null_count:
            raise DataError(f"{table[column].null_count} rows have a null", column=column, fix="remove these rows")
    return table


@dataclass(frozen=True, slots=True)
class _Places:
    """Rows by user, then time: the row at each place, the first place of its user, the first of its user and time."""

    row: I64
    first: I64
    first_of_time: I64


def _places(table: pa.Table, log: Log) -> _Places:
    user = pc.dictionary_encode(table[log.user]).combine_chunks().indices.to_numpy()
    time = pc.rank(table[log.time].combine_chunks(), tiebreaker="dense").to_numpy()
    row = np.argsort(user, kind="stable")  # rows are by time already
    user, time = user[row], time[row]
    new_user = np.r_[True, user[1:] != user[:-1]][: len(user)]
    new_time = new_user | np.r_[True, time[1:] != time[:-1]][: len(user)]
    return _Places(row, _last_true(new_user), _last_true(new_time))


def _last_true(starts: npt.NDArray[np.bool_]) -> I64:
    """The nearest place at or before each one where something starts."""
    return np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0)) if len(starts) else np.empty(0, np.int64)


def _impressions(table: pa.Table, listed: list[str], at: _Places, length: int) -> pa.Table:
    begin, stop = np.empty_like(at.row), np.empty_like(at.row)
    begin[at.row], stop[at.row] = np.maximum(at.first, at.first_of_time - length), at.first_of_time
    for column, lists in _lists(table, listed, at, begin, stop):
        if f"history_{column}" in table.column_names:
            raise DataError("the log has a column of this name", column=f"history_{column}", fix="rename or drop it")
        table = table.append_column(f"history_{column}", lists)
    return table


def _users(table: pa.Table, log: Log, listed: list[str], at: _Places, ends: I64) -> pa.Table:
    """Each user's rows until the place where it ends."""
    first = at.first[ends]
    made = {log.user: table[log.user].combine_chunks().take(pa.array(at.row[first]))}
    return pa.table(made | dict(_lists(table, listed, at, first, ends + 1)))


def _lists(table: pa.Table, listed: list[str], at: _Places, begin: I64, stop: I64) -> Iterator[tuple[str, pa.Array]]:
    """Of each column the values at places [begin, stop)."""
    offsets = offsets_of(stop - begin)
    rows = pa.array(at.row[np.repeat(begin - offsets[:-1], stop - begin) + np.arange(offsets[-1])])
    for column in listed:
        yield column, pa.LargeListArray.from_arrays(pa.array(offsets), table[column].combine_chunks().take(rows))
