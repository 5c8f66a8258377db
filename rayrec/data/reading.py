"""Reads one piece of a window into mapped rows: the work of one read task, the same wherever it runs.

Which pieces a rank reads is dealt in `order.py`; who runs the tasks is decided in `readers.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.data.columns import without_views
from rayrec.data.errors import DataError
from rayrec.data.manifest import Manifest, Slice, Window, open_parquet, unreadable
from rayrec.data.mapping import map_table
from rayrec.data.order import EpochOrder, Interval, row_order
from rayrec.data.rows import Ids, Rows, to_columns
from rayrec.data.schema import Schema

I64 = npt.NDArray[np.int64]

PROBLEM = "problem"
_CHUNK_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class FileSlice:
    """Rows `[start, stop)` of a row group, with all that is needed to read them anywhere."""

    uri: str
    size_bytes: int
    row_group: int
    group_rows: int
    start: int
    stop: int
    first_row: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's part of one window.

    Args:
        slices: the whole window.
        window: its number; with seed and epoch it decides the order of its rows.
        start, stop: the part of that order that is this piece.
    """

    slices: tuple[FileSlice, ...]
    window: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is done with every piece."""

    schema: Schema
    rows_of: Mapping[str, int]
    seed: int
    epoch: int
    shuffle: bool


def pieces_of(manifest: Manifest, order: EpochOrder, intervals: Sequence[Interval]) -> list[Piece]:
    """The pieces of a rank, in the order they are consumed."""
    pieces = []
    for start, stop in intervals:
        window, offset = order.place(start)
        slices = _slices(manifest, manifest.windows[window])
        pieces.append(Piece(slices, window, offset, offset + stop - start))
    return pieces


def _slices(manifest: Manifest, window: Window) -> tuple[FileSlice, ...]:
    def placed(part: Slice) -> FileSlice:
        file = manifest.files[part.file]
        group_rows = file.group_rows[part.row_group]
        return FileSlice(file.uri, file.size_bytes, part.row_group, group_rows, part.start, part.stop, part.first_row)

    return tuple(placed(part) for part in window.slices)


def read_piece(piece: Piece, recipe: Recipe) -> pa.Table:
    """The piece's rows, mapped, in their order.

    Returns:
        the columns of `rows.to_columns` and `problem` (null, or a `DataError` as JSON for a row that cannot be used). A
        file that cannot be read gives one row that holds the error, so that what goes wrong is told in order, after the
        rows before it.
    """
    try:
        rows, problems = _mapped(piece, recipe)
    except DataError as error:
        return _table(_nothing(recipe.schema), [json.dumps(error.to_dict())])
    texts: list[str | None] | None = None
    if problems:
        texts = [None] * piece.rows
        for row, problem in problems:
            texts[row] = json.dumps(problem.to_dict())
    return _table(rows, texts)


def _mapped(piece: Piece, recipe: Recipe) -> tuple[Rows, list[tuple[int, DataError]]]:
    """The piece's rows in their order, and which of them are bad, ascending.

    Rows are mapped in the order of the file and shuffled afterwards, when they are plain arrays.
    """
    if not recipe.shuffle:
        slices = tuple(_within(piece.slices, piece.start, piece.stop))
        rows, problems = map_table(
            _read(slices, recipe.schema.columns), recipe.schema, recipe.rows_of, Origin(slices, None)
        )
        return rows, [(int(row), problems.error(int(row))) for row in problems.rows()]
    total = sum(part.rows for part in piece.slices)
    order = row_order(piece.window, total, seed=recipe.seed, epoch=recipe.epoch)[piece.start : piece.stop]
    table, kept = _read(piece.slices, recipe.schema.columns), None
    if len(order) < total:
        kept = np.sort(order)
        table, order = table.take(pa.array(kept)), np.searchsorted(kept, order)
    rows, problems = map_table(table, recipe.schema, recipe.rows_of, Origin(piece.slices, kept), order)
    place = np.argsort(order) if problems else order
    return rows, sorted(
        ((int(place[row]), problems.error(int(row))) for row in problems.rows()), key=lambda bad: bad[0]
    )


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the rows of a table that was read from slices come from; `wanted` are the rows taken, None for all."""

    slices: tuple[FileSlice, ...]
    wanted: I64 | None

    def locate(self, row: int) -> tuple[str, int, int]:
        at = row if self.wanted is None else int(self.wanted[row])
        for part in self.slices:
            if at < part.rows:
                return part.uri, part.row_group, part.first_row + part.start + at
            at -= part.rows
        raise IndexError(row)


def _within(slices: Sequence[FileSlice], start: int, stop: int) -> Iterator[FileSlice]:
    """The parts of the slices that hold the rows `[start, stop)` of all of them."""
    at = 0
    for part in slices:
        first, last = max(start, at), min(stop, at + part.rows)
        if first < last:
            yield replace(part, start=part.start + first - at, stop=part.start + last - at)
        at += part.rows


def _read(slices: Sequence[FileSlice], columns: Sequence[str]) -> pa.Table:
    """The rows of all slices; neighbours in one file are read by one call."""
    tables = []
    for uri, parts in groupby(slices, key=lambda part: part.uri):
        same_file = list(parts)
        with open_parquet(uri, same_file[0].size_bytes) as parquet:
            try:
                tables += _read_file(parquet, same_file, list(columns))
            except (pa.ArrowException, OSError, KeyError) as error:
                raise unreadable(uri, error) from error
    table = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
    plain = pa.schema([field.with_type(without_views(field.type)) for field in table.schema])
    return table if plain == table.schema else table.cast(plain)


def _read_file(parquet: pq.ParquetFile, parts: Sequence[FileSlice], columns: list[str]) -> list[pa.Table]:
    for part in parts:
        groups = parquet.metadata.num_row_groups
        if part.row_group >= groups or parquet.metadata.row_group(part.row_group).num_rows != part.group_rows:
            raise DataError(
                "the file's row groups changed while the run was going on",
                file=part.uri,
                row_group=part.row_group,
                fix="do not write to files that are being read; start the run again",
            )
    tables = []
    for whole, group in groupby(parts, key=lambda part: part.rows == part.group_rows):
        if whole:
            # One thread a task: Ray runs as many tasks as there are CPUs.
            groups_wanted = [part.row_group for part in group]
            tables.append(parquet.read_row_groups(groups_wanted, columns=columns, use_threads=False))
        else:
            tables += [_read_part(parquet, part, columns) for part in group]
    return tables


def _read_part(parquet: pq.ParquetFile, part: FileSlice, columns: list[str]) -> pa.Table:
    """A part of a row group, decoded from its start in chunks, so that a huge one never is in memory whole."""
    kept, at = [], 0
    batches = parquet.iter_batches(_CHUNK_ROWS, row_groups=[part.row_group], columns=columns, use_threads=False)
    for batch in batches:
        first, last = max(part.start, at), min(part.stop, at + batch.num_rows)
        if first < last:
            kept.append(batch.slice(first - at, last - first))
        at += batch.num_rows
        if at >= part.stop:
            break
    return pa.Table.from_batches(kept)


def _nothing(schema: Schema) -> Rows:
    """One row of zeros, to carry an error."""
    weights = np.zeros(0, np.float32)
    ids = tuple(
        Ids(np.zeros(1, np.int64), None)
        if f.always_one
        else Ids(np.zeros(0, np.int64), np.zeros(2, np.int64), weights if f.kind == "weighted_id_list" else None)
        for f in schema.sparse
    )
    return Rows(np.zeros((1, schema.num_dense), np.float32), np.zeros(1, np.float32), ids)


def _table(rows: Rows, problems: Sequence[str | None] | None) -> pa.Table:
    columns = to_columns(rows)
    columns[PROBLEM] = pa.nulls(len(rows), pa.string()) if problems is None else pa.array(problems, pa.string())
    return pa.table(columns)
