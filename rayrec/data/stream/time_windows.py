"""Windows in the order of time: each is trained on after the model was evaluated on it.

Files are ordered by their first times, and rows as in their file. A window is a range of this sequence, so its rows and
their order do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from rayrec.data.arrays.arrow_types import decoded, impossible_times, micros_of, nulls_of, shown
from rayrec.data.arrays.buffers import I64
from rayrec.data.config import WindowsConfig
from rayrec.data.mapping.schema import Timestamp
from rayrec.data.order.periods import OF_ROWS, OF_TIME, Periods
from rayrec.data.source.manifest import Manifest
from rayrec.data.source.partitions import Value
from rayrec.data.source.slices import FileSlice, Origin, RowGroupStreams, read_slices, slices_of
from rayrec.storage.errors import DataError
from rayrec.storage.parallel import each
from rayrec.storage.retries import Patience

_WINDOWS_PER_TASK = 8


class _Piece(NamedTuple):
    """Consecutive rows of one file, ascending in time.

    Args:
        file: URI of the file.
        rows: number of rows.
        first, last: times of the first and the last row, in µs since 1970.
        changes: positions of the first row and of rows in another interval than the row before.
        intervals: numbers of these intervals.
    """

    file: str
    rows: int
    first: int
    last: int
    changes: I64
    intervals: I64


def in_time_order(
    manifest: Manifest, timestamp: Timestamp, windows: WindowsConfig, patience: Patience
) -> tuple[Manifest, Periods]:
    """The data set in the order of time, and its windows. Reads the column of times, in parallel.

    Returns:
        the manifest with its files in the order of their first times, and `spans` with the rows of each window; and the
        windows, as periods.

    Raises:
        DataError: a time that is null or out of range; a row that is earlier than the row before; files whose times
            overlap.
    """
    length_us = None if windows.seconds is None else windows.seconds * 1_000_000
    pieces = list(_pieces(manifest, timestamp, length_us, patience))
    uris, of_file = manifest.files.uris, dict[str, list[_Piece]]()
    for piece in pieces:
        of_file.setdefault(piece.file, []).append(piece)
    read = [number for number, uri in enumerate(uris) if uri in of_file]
    order = sorted(read, key=lambda number: (of_file[uris[number]][0].first, of_file[uris[number]][-1].last))
    _check(uris, [of_file[uris[number]] for number in order], timestamp.column)
    files = manifest.files.select(np.array(order, np.int64))
    ordered = replace(manifest, files=files, windows=type(manifest.windows).of(files, *manifest.limits))
    in_order = [piece for number in order for piece in of_file[uris[number]]]
    values, starts, column = _by_rows(in_order, windows) if length_us is None else _by_time(in_order, windows)
    spans = dict(zip(values, zip(starts, [*starts[1:], ordered.rows], strict=True), strict=True))
    return replace(ordered, spans=spans), Periods(column, tuple(values), data=uris[order[0]], spans=spans)


def _by_time(pieces: Sequence[_Piece], windows: WindowsConfig) -> tuple[list[Value], list[int], str]:
    """The start of each interval with rows as text, and its first row."""
    rows_before = np.cumsum([0, *(piece.rows for piece in pieces)])
    intervals = np.concatenate([piece.intervals for piece in pieces])
    rows = np.concatenate([piece.changes + before for piece, before in zip(pieces, rows_before[:-1], strict=True)])
    begins = np.diff(intervals, prepend=intervals[0] - 1) != 0
    assert windows.seconds is not None
    times = (intervals[begins] * windows.seconds).astype("datetime64[s]")
    return [str(time) for time in times], rows[begins].tolist(), f"{OF_TIME}{windows.time}"


def _by_rows(pieces: Sequence[_Piece], windows: WindowsConfig) -> tuple[list[Value], list[int], tuple[str, str]]:
    """The first row of each window, with its place in the files, which tells whether earlier files changed."""
    assert windows.rows is not None
    ends = np.cumsum([piece.rows for piece in pieces])
    starts = np.arange(0, int(ends[-1]), windows.rows)
    piece_of = np.searchsorted(ends, starts, side="right")
    first_piece: dict[str, int] = {}  # rows before each file
    for piece, end in zip(pieces, ends.tolist(), strict=True):
        first_piece.setdefault(piece.file, end - piece.rows)
    values: list[Value] = []
    for start, number in zip(starts.tolist(), piece_of.tolist(), strict=True):
        uri = pieces[number].file
        values.append((start, f"row {start - first_piece[uri]} of {uri.rsplit('/', 1)[-1]}"))
    return values, starts.tolist(), (f"{OF_ROWS}{windows.rows}", "place")


def _check(uris: Sequence[str], of_files: Sequence[Sequence[_Piece]], column: str) -> None:
    """Refuses files with overlapping times."""
    for earlier, later in zip(of_files, of_files[1:], strict=False):
        if later[0].first < earlier[-1].last:
            raise DataError(
                f"data.order: time: the file begins at {_text(later[0].first)}, but {earlier[0].file} lasts until "
                f"{_text(earlier[-1].last)}, so that neither is before the other",
                file=later[0].file,
                column=column,
                fix="sort the rows of all files by time, and write them again",
            )


def _pieces(manifest: Manifest, timestamp: Timestamp, length_us: int | None, patience: Patience) -> Iterator[_Piece]:
    """The pieces in the order of the manifest."""
    kind = dict(manifest.columns)[timestamp.column]
    numbers = range(len(manifest.windows))
    chunks = (numbers[first : first + _WINDOWS_PER_TASK] for first in numbers[::_WINDOWS_PER_TASK])
    tasks = ([one for number in chunk for one in slices_of(manifest, number)] for chunk in chunks)
    read = partial(_read, timestamp=timestamp, kind=kind, length_us=length_us, patience=patience)
    last: _Piece | None = None
    for pieces in each(read, tasks):
        for piece in pieces:
            if last is not None and last.file == piece.file and piece.first < last.last:
                raise _unsorted(piece.file, None, timestamp.column, last.last, piece.first)
            yield piece
            last = piece


def _read(
    slices: Sequence[FileSlice], timestamp: Timestamp, kind: pa.DataType, length_us: int | None, patience: Patience
) -> list[_Piece]:
    pieces = []
    with closing(RowGroupStreams()) as streams:
        for item in slices:
            table, unreadable = read_slices([item], ((timestamp.column, kind),), patience, streams)
            if unreadable:
                raise unreadable[0].error
            times = _times(table.column(0).combine_chunks(), timestamp, Origin((item,), None))
            intervals = times // length_us if length_us is not None else np.zeros(len(times), np.int64)
            changes = np.flatnonzero(np.diff(intervals, prepend=intervals[0] - 1))
            pieces.append(_Piece(item.uri, len(times), int(times[0]), int(times[-1]), changes, intervals[changes]))
    return pieces


def _times(array: pa.Array, timestamp: Timestamp, origin: Origin) -> I64:
    """µs since 1970, ascending."""
    array = decoded(array)
    nulls = nulls_of(array)
    if nulls is not None and nulls.any():
        error = DataError("data.order: time: the time is null", column=timestamp.column, fix="remove the row")
        raise error.at(*origin.locate(int(nulls.argmax())))
    if len(outside := impossible_times(array, timestamp.unit)):
        row = int(outside[0])
        fix = f"correct the column, or schema.timestamp.unit (now {timestamp.unit})"
        problem = f"a time must be between 1970 and 2200 in {timestamp.unit}"
        error = DataError(problem, column=timestamp.column, value=shown(array, row), fix=fix)
        raise error.at(*origin.locate(row))
    times = micros_of(array, timestamp.unit)
    if len(earlier := np.flatnonzero(times[1:] < times[:-1])):
        row = int(earlier[0]) + 1
        raise _unsorted("", origin.locate(row), timestamp.column, int(times[row - 1]), int(times[row]))
    return times


def _unsorted(file: str, place: tuple[str, int, int] | None, column: str, before: int, now: int) -> DataError:
    error = DataError(
        f"data.order: time: the row's time {_text(now)} is earlier than {_text(before)} of the row before",
        file=file or None,
        column=column,
        fix="sort the rows of all files by time, and write them again",
    )
    return error if place is None else error.at(*place)


def _text(time_us: int) -> str:
    return (
        str(np.datetime64(time_us, "us")).rstrip("0").rstrip(".")
        if time_us % 1_000_000
        else str(np.datetime64(time_us // 1_000_000, "s"))
    )
