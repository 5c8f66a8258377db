"""Reads one piece of a window into mapped rows: the work of one read task, the same wherever it runs.

Which pieces a rank reads is dealt in `order.py`; who runs the tasks is decided in `readers.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec.data.manifest import Manifest, Slice, Window
from rayrec.data.mapping import map_rows
from rayrec.data.order import EpochOrder, Interval, row_order
from rayrec.data.problems import Problems
from rayrec.data.rows import Rows, to_columns
from rayrec.data.schema import Schema
from rayrec.data.slices import Columns, FileSlice, Origin, Unreadable, read_slices, within

I64 = npt.NDArray[np.int64]

PROBLEM = "problem"


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
    """What is done with every piece.

    Args:
        columns: names and types of what is read.
        schema, rows_of: how it is mapped.
        seed, epoch, shuffle: how its rows are ordered.
        retries: how often a failing read is tried again.
        samples: how many bad rows of a piece are described; further ones are only marked.
    """

    columns: Columns
    schema: Schema
    rows_of: Mapping[str, int]
    seed: int
    epoch: int
    shuffle: bool
    retries: int = 0
    samples: int = 1


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
        the columns of `rows.to_columns` and `problem`: null for a good row; for a row that cannot be used a `DataError`
        as JSON, or "" after the first `recipe.samples` of them. All rows of a file that cannot be read are bad.
    """
    rows, problems, place = _mapped(piece, recipe)
    if not problems:
        return _table(rows, pa.nulls(piece.rows, pa.string()))
    bad = problems.rows()
    by_place = bad[np.argsort(place[bad])]
    texts: list[str | None] = [None] * piece.rows
    for number, row in enumerate(by_place.tolist()):
        described = number < recipe.samples
        texts[place[row]] = json.dumps(problems.error(row).to_dict()) if described else ""
    return _table(rows, pa.array(texts, pa.string()))


def _mapped(piece: Piece, recipe: Recipe) -> tuple[Rows, Problems, I64]:
    """The piece's rows in their order, what is wrong with the rows of the table they were mapped from, and the place of
    each of those in the order.

    Rows are mapped as they lie in the files and shuffled afterwards, when they are plain arrays.
    """
    if not recipe.shuffle:
        slices = tuple(within(piece.slices, piece.start, piece.stop))
        table, missing = read_slices(slices, recipe.columns, recipe.retries)
        problems = _problems(Origin(slices, None), missing, None)
        rows = map_rows(table, recipe.schema, recipe.rows_of, problems)
        return rows, problems, np.arange(piece.rows)
    total = sum(part.rows for part in piece.slices)
    order = row_order(piece.window, total, seed=recipe.seed, epoch=recipe.epoch)[piece.start : piece.stop]
    table, missing = read_slices(piece.slices, recipe.columns, recipe.retries)
    kept: I64 | None = None
    if len(order) < total:
        kept = np.sort(order)
        table, order = table.take(pa.array(kept)), np.searchsorted(kept, order)
    problems = _problems(Origin(piece.slices, kept), missing, kept)
    rows = map_rows(table, recipe.schema, recipe.rows_of, problems, order)
    return rows, problems, np.argsort(order) if problems else order


def _problems(origin: Origin, missing: Sequence[Unreadable], kept: I64 | None) -> Problems:
    """The problems of a table before its values are looked at."""
    problems = Problems(origin)
    for part in missing:
        first, last = part.start, part.stop
        if kept is not None:
            first, last = np.searchsorted(kept, [first, last]).tolist()
        problems.add_error(np.arange(first, last), part.error)
    return problems


def _table(rows: Rows, problems: pa.Array) -> pa.Table:
    return pa.table(to_columns(rows) | {PROBLEM: problems})
