"""Histories from an interaction log: a row an impression with what came before it, or a row a user with all of it.

"Before" is strict: rows of one user and one time do not see each other, since nobody knows which came first.
The log's columns that are read are held in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.formats.converted import find_parquet
from rayrec.data.formats.parquet_parts import Layout, write_parts
from rayrec.data.mapping.buffers import I64
from rayrec.data.mapping.columns import column_missing
from rayrec.data.mapping.lists import offsets_of
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


def make_sequences(
    paths: Sequence[str],
    out: Path,
    log: Log,
    *,
    rows: Literal["impressions", "users"] = "impressions",
    length: int = 50,
    layout: Layout | None = None,
) -> int:
    """Writes Parquet files; the number of rows.

    Args:
        rows: "impressions": every row of the log, in order of time, with lists `history_C` for each of the log's
            columns C and `history_TIME`, of the same user's earlier rows; "users": a row a user with lists C and TIME
            of all rows, oldest first, rows of one time in the order of the files.
        length: longest history, the newest rows; of users all rows are kept.

    Raises:
        DataError: no such column, a null user or time, or a history that would have the name of a column.
    """
    table = _read(paths, log)
    table = table.take(pc.sort_indices(table, [(log.time, "ascending")]))  # stable: the order of the files stays
    listed = list(dict.fromkeys((*log.columns, log.time)))
    made = _impressions(table, log, listed, length) if rows == "impressions" else _users(table, log, listed)
    write_parts(made.to_batches(max_chunksize=1 << 16), out, rows, layout or Layout(row_group_rows=1 << 14))
    return int(made.num_rows)


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


def _order(table: pa.Table, log: Log) -> tuple[I64, I64, I64]:
    """(rows by user, then time; of each sorted place the first place of its user; the first of its user and time)."""
    user = pc.dictionary_encode(table[log.user]).combine_chunks().indices.to_numpy()
    time = pc.rank(table[log.time].combine_chunks(), tiebreaker="dense").to_numpy()
    order = np.argsort(user, kind="stable")  # rows are by time already
    user, time = user[order], time[order]
    new_user = np.r_[True, user[1:] != user[:-1]][: len(user)]
    new_time = new_user | np.r_[True, time[1:] != time[:-1]][: len(user)]
    return order, _last_true(new_user), _last_true(new_time)


def _last_true(starts: npt.NDArray[np.bool_]) -> I64:
    """The nearest place at or before each one where something starts."""
    return np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0)) if len(starts) else np.empty(0, np.int64)


def _impressions(table: pa.Table, log: Log, listed: list[str], length: int) -> pa.Table:
    order, first, end = _order(table, log)
    begin, stop = np.empty_like(order), np.empty_like(order)
    begin[order], stop[order] = np.maximum(first, end - length), end
    offsets = offsets_of(stop - begin)
    places = np.repeat(begin - offsets[:-1], stop - begin) + np.arange(offsets[-1])
    rows = pa.array(order[places])
    for column in listed:
        if f"history_{column}" in table.column_names:
            raise DataError("the log has a column of this name", column=f"history_{column}", fix="rename or drop it")
        lists = pa.LargeListArray.from_arrays(pa.array(offsets), table[column].combine_chunks().take(rows))
        table = table.append_column(f"history_{column}", lists)
    return table


def _users(table: pa.Table, log: Log, listed: list[str]) -> pa.Table:
    order, first, _ = _order(table, log)
    starts = np.unique(first)
    offsets, rows = pa.array(np.r_[starts, len(order)]), pa.array(order)
    made = {log.user: table[log.user].combine_chunks().take(pa.array(order[starts]))}
    for column in listed:
        made[column] = pa.LargeListArray.from_arrays(offsets, table[column].combine_chunks().take(rows))
    return pa.table(made)
