"""Builds histories from an interaction log: per impression the user's earlier rows, or per user all rows.

"Earlier" is strict: rows of a user with the same time are not in each other's history, because their order is unknown.
The columns are held in memory. Rows can be split into training, validation and test, by time or by position; no split
contains data that is later than its own rows.
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
from rayrec.data.arrays.widening import concatenated
from rayrec.data.formats.find_parquet import find_parquet
from rayrec.data.formats.parquet_writer import Layout, write_parts
from rayrec.data.mapping.map_rows import one_array
from rayrec.data.tools.times import TimeColumn, Times, combined_rank, read_times, without_nulls
from rayrec.storage.column_names import column_missing
from rayrec.storage.errors import DataError
from rayrec.storage.parquet import open_parquet
from rayrec.storage.struct_fields import leaf_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The columns of an interaction log.

    Args:
        user: column of user ids.
        times: columns of times. Rows are ordered by the first; rows of equal time by the second, and so on.
        columns: columns to list in histories, e.g. the item.
    """

    user: str
    times: tuple[TimeColumn, ...]
    columns: tuple[str, ...]


Split = Callable[[Times, I64], I64]
"""Maps rows ordered by user and time to indices into `SPLITS`, given their times and the first row of their user."""
SPLITS = ("train", "validation", "test")


def by_position(_: Times, user_start: I64) -> I64:
    """Leave one out: of each user with at least three rows, the newest is test, the second newest validation."""
    size = np.bincount(user_start, minlength=len(user_start))[user_start]
    to_newest = user_start + size - 1 - np.arange(len(user_start))
    return np.where((size > 2) & (to_newest < 2), 2 - to_newest, 0)


def by_time(test: int | float | str, validation: int | float | str | None = None) -> Split:
    """Rows from time `test` on are test, rows from `validation` to `test` are validation.

    Both are read as the values of the first column of times, see `Times.from_on`.
    """

    def split(times: Times, _: I64) -> I64:
        is_test = times.from_on(test)
        if validation is None:
            return np.where(is_test, 2, 0)
        index = np.select([is_test, times.from_on(validation)], [2, 1], 0)
        if not (index == 1).any():
            fix = "choose a validation time before the test time, or provide more rows"
            raise DataError(f"the split 'validation' is empty: no time is from {validation} to {test}", fix=fix)
        return index

    return split


def make_sequences(
    paths: Sequence[str],
    out: Path,
    log: Log,
    *,
    rows: Literal["impressions", "users"] = "impressions",
    length: int = 50,
    split: Split | None = None,
) -> dict[Path, int]:
    """Writes histories as Parquet files into `out`, or into its folders `train`, `validation` and `test`.

    Args:
        rows: "impressions": every row of the log, in order of time, with lists `history_C` for each column C of the log
            and `history_TIME` for each time, of the user's earlier rows. "users": a row per user with lists C and TIME
            of all rows, oldest first; rows with the same time in file order. Times that were texts are written as the
            timestamps or numbers that they were parsed to. Users also have `label`, 1 in each row, unless the log's
            columns have that name: a run needs one, though models of histories do not read it.
        length: maximum length of an impression's history; the newest rows are kept. Users have all rows.
        split: `by_position`, or a result of `by_time`; None: no split. With "users", a row of `train` has the user's
            training rows; a row of another split ends with the user's first row in that split.

    Returns:
        the number of rows by folder.

    Raises:
        DataError: a missing column, a null user or time, a time that is none (`read_times`), a history with the name of
            a column, a time of the split that does not fit the column, or an empty split.
    """
    table, times = _read(paths, log)
    rank = combined_rank(times)
    in_time = np.argsort(rank, kind="stable")  # rows of one time keep the order of the files
    table, rank, first_times = table.take(pa.array(in_time)), rank[in_time], times[0].take(in_time)
    history_columns = list(dict.fromkeys((*log.columns, *(time.column for time in log.times))))
    ordered = _order(table, log, rank)
    if split is None:
        selection = {out: np.arange(len(ordered.row))}
    else:
        index = split(first_times.take(ordered.row), ordered.first)
        selection = {out / name: np.flatnonzero(index == number) for number, name in enumerate(SPLITS)}
        selection = {
            folder: positions
            for folder, positions in selection.items()
            if len(positions) or folder.name != "validation"
        }
        if empty := [folder.name for folder, positions in selection.items() if not len(positions)]:
            raise DataError(f"the split {empty[0]!r} is empty", fix="choose another split, or provide more rows")
    table = _impressions(table, history_columns, ordered, length) if rows == "impressions" else table
    rows_written = {}
    for folder, positions in selection.items():
        if rows == "impressions":
            result = table.take(pa.array(np.sort(ordered.row[positions])))
        else:
            # np.unique keeps the first position of each user: of evaluation splits the first, else the last.
            positions = positions if folder.name in SPLITS[1:] and split else positions[::-1]
            user_ends = positions[np.unique(ordered.first[positions], return_index=True)[1]]
            result = _users(table, log, history_columns, ordered, user_ends)
        rows_written[folder] = int(result.num_rows)
        write_parts(result.to_batches(max_chunksize=1 << 16), folder, rows, Layout(row_group_rows=1 << 14))
    return rows_written


@dataclass(frozen=True, slots=True)
class _Files:
    """Locates the rows of a table of whole files."""

    uris: list[str]
    first_rows: I64

    def locate(self, row: int) -> tuple[str | None, int | None, int]:
        number = int(np.searchsorted(self.first_rows, row, side="right")) - 1
        return self.uris[number], None, row - int(self.first_rows[number])


def _read(paths: Sequence[str], log: Log) -> tuple[pa.Table, list[Times]]:
    """Reads all rows, each column as one array, and the times, which replace their columns."""
    tables, uris = [], [found.uri for found in find_parquet(list(paths))]
    for file in uris:
        with open_parquet(file) as parquet:
            tables.append(leaf_table(parquet.read()))
        for column in (log.user, *(time.column for time in log.times), *log.columns):
            if column not in tables[-1].column_names:
                raise column_missing(column, tables[-1].schema, file, "name a column of the log")
    names = [time.column for time in log.times]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DataError("two times name this column", column=repeated[0], fix="name it once")
    files = _Files(uris, offsets_of(np.array([table.num_rows for table in tables]))[:-1])
    table = concatenated(tables, uris).combine_chunks()
    without_nulls(one_array(table[log.user]), log.user, "user", files)
    times = [read_times(time, one_array(table[time.column]), files, first=time is log.times[0]) for time in log.times]
    for name, time in zip(names, times, strict=True):
        table = table.set_column(table.column_names.index(name), name, time.values)
    return table, times


@dataclass(frozen=True, slots=True)
class _Order:
    """Rows ordered by user, then time.

    Args:
        row: the row at each position.
        first: the first position of its user.
        first_of_time: the first position of its user and time.
    """

    row: I64
    first: I64
    first_of_time: I64


def _order(table: pa.Table, log: Log, time: I64) -> _Order:
    user = pc.dictionary_encode(table[log.user]).combine_chunks().indices.to_numpy()
    row = np.argsort(user, kind="stable")  # rows are ordered by time already
    user, time = user[row], time[row]
    new_user = np.r_[True, user[1:] != user[:-1]][: len(user)]
    new_time = new_user | np.r_[True, time[1:] != time[:-1]][: len(user)]
    return _Order(row, _last_true(new_user), _last_true(new_time))


def _last_true(starts: npt.NDArray[np.bool_]) -> I64:
    """The last position up to each one where `starts` is true."""
    return np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0)) if len(starts) else np.empty(0, np.int64)


def _impressions(table: pa.Table, history_columns: list[str], ordered: _Order, length: int) -> pa.Table:
    starts, stops = np.empty_like(ordered.row), np.empty_like(ordered.row)
    starts[ordered.row], stops[ordered.row] = (
        np.maximum(ordered.first, ordered.first_of_time - length),
        ordered.first_of_time,
    )
    for column, lists in _lists(table, history_columns, ordered, starts, stops):
        if f"history_{column}" in table.column_names:
            raise DataError("the log already has this column", column=f"history_{column}", fix="rename or drop it")
        table = table.append_column(f"history_{column}", lists)
    return table


def _users(table: pa.Table, log: Log, history_columns: list[str], ordered: _Order, ends: I64) -> pa.Table:
    """A row per user, with the user's rows up to the given positions."""
    first = ordered.first[ends]
    user_column = {log.user: table[log.user].combine_chunks().take(pa.array(ordered.row[first]))}
    lists = dict(_lists(table, history_columns, ordered, first, ends + 1))
    # A run needs a label column; models of histories learn from the lists alone.
    label = {"label": pa.array(np.ones(len(ends), np.int8))}
    return pa.table(label | user_column | lists)


def _lists(
    table: pa.Table, history_columns: list[str], ordered: _Order, starts: I64, stops: I64
) -> Iterator[tuple[str, pa.Array]]:
    """For each column, lists of the values at positions `[begin, stop)`."""
    offsets = offsets_of(stops - starts)
    rows = pa.array(ordered.row[np.repeat(starts - offsets[:-1], stops - starts) + np.arange(offsets[-1])])
    for column in history_columns:
        yield column, pa.LargeListArray.from_arrays(pa.array(offsets), table[column].combine_chunks().take(rows))
