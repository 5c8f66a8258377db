"""Reads one piece of a window into mapped rows: the work of one read task, the same wherever it runs.

Which pieces a rank reads is dealt in `order/epoch.py`; who runs the tasks is decided in `readers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec.data.mapping.map_rows import map_rows
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.rows import Rows, to_columns
from rayrec.data.mapping.schema import Schema
from rayrec.data.options import BadRows
from rayrec.data.order.epoch import EpochOrder, Interval, row_order
from rayrec.data.source.filters import Condition, Mask
from rayrec.data.source.manifest import Manifest
from rayrec.data.source.negatives import draw
from rayrec.data.source.slices import Columns, FileSlice, Origin, Unreadable, passing, read_slices, slices_of, within
from rayrec.data.stream.records import PROBLEM, no_problems, to_array

I64 = npt.NDArray[np.int64]

END = "end"


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's part of one window.

    Args:
        slices: the whole window.
        window: its number; with seed and epoch it decides the order of its rows.
        start, stop: the part of that order that is this piece.
        before: rows of the rank's pieces that come before it.
    """

    slices: tuple[FileSlice, ...]
    window: int
    start: int
    stop: int
    before: int = 0

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
        bad_rows: what is told of bad rows.
        filters: what rows are asked; others are left out.
        negative_rate: the part of the negatives that is read.
    """

    columns: Columns
    schema: Schema
    rows_of: Mapping[str, int]
    seed: int
    epoch: int
    shuffle: bool
    retries: int
    bad_rows: BadRows
    filters: tuple[Condition, ...] = ()
    negative_rate: float = 1.0

    @property
    def leaves_out(self) -> bool:
        """Whether good rows may be left out."""
        return bool(self.filters) or self.negative_rate < 1


def pieces_of(manifest: Manifest, order: EpochOrder, intervals: Sequence[Interval]) -> list[Piece]:
    """The pieces of a rank, in the order they are consumed."""
    pieces, before = [], 0
    for start, stop in intervals:
        window, offset = order.place(start)
        slices = slices_of(manifest, manifest.windows[window % len(manifest.windows)])
        pieces.append(Piece(slices, window, offset, offset + stop - start, before))
        before += stop - start
    return pieces


def read_piece(piece: Piece, recipe: Recipe) -> pa.Table:
    """The piece's rows that filters and down-sampling leave, mapped, in their order.

    Returns:
        the columns of `rows.to_columns`; `problem`: as `records.to_array` makes it; where rows are left out also `end`:
        how many rows the rank has passed after this one, those that were left out among them. All rows of a file that
        cannot be read are bad.
    """
    rows, problems, place, ends = _mapped(piece, recipe)
    columns = to_columns(rows) | ({} if ends is None else {END: pa.array(ends)})
    if not problems:
        return pa.table(columns | {PROBLEM: no_problems(len(rows))})
    bad = problems.rows()
    by_place = bad[np.argsort(place[bad])]
    errors = [problems.error(row) for row in by_place[: recipe.bad_rows.described].tolist()]
    return pa.table(columns | {PROBLEM: to_array(len(rows), place[by_place], errors)})


def _mapped(piece: Piece, recipe: Recipe) -> tuple[Rows, Problems, I64, I64 | None]:
    """The piece's rows in their order, what is wrong with the rows of the table they were mapped from, the place of
    each of those in the order, and the rows' ends.

    Rows are mapped as they lie in the files and shuffled afterwards, when they are plain arrays.
    """
    slices, order = piece.slices, np.arange(piece.rows)
    if recipe.shuffle:
        total = sum(part.rows for part in slices)
        order = row_order(piece.window, total, seed=recipe.seed, epoch=recipe.epoch)[piece.start : piece.stop]
    else:
        slices = tuple(within(slices, piece.start, piece.stop))
    table, missing = read_slices(slices, recipe.columns, recipe.retries)
    ends = None
    if recipe.leaves_out:
        mask = passing(table, missing, recipe.filters) & _drawn(table, piece, recipe)
        chosen = np.flatnonzero(mask[order])
        order, ends = order[chosen], piece.before + chosen + 1
    kept: I64 | None = None
    if len(order) < table.num_rows:
        kept = np.sort(order)
        table, order = table.take(pa.array(kept)), np.searchsorted(kept, order)
    problems = _problems(Origin(slices, kept), missing, kept, recipe.bad_rows.redact)
    rows = map_rows(table, recipe.schema, recipe.rows_of, problems, order if recipe.shuffle else None)
    return rows, problems, np.argsort(order) if problems and recipe.shuffle else order, ends


def _drawn(table: pa.Table, piece: Piece, recipe: Recipe) -> Mask:
    """Which rows of the window, or of the piece where rows are not shuffled, down-sampling keeps."""
    if recipe.negative_rate >= 1:
        return np.ones(table.num_rows, dtype=np.bool_)
    (task,) = recipe.schema.tasks
    return draw(
        table.column(task.column),
        recipe.negative_rate,
        seed=recipe.seed,
        epoch=recipe.epoch,
        window=piece.window,
        first=0 if recipe.shuffle else piece.start,
    )


def read_rows(
    slices: Sequence[FileSlice],
    columns: Columns,
    filters: Sequence[Condition],
    retries: int = 3,
    *,
    redact: bool = False,
) -> tuple[pa.Table, Problems]:
    """The rows of a window that pass the filters, as they lie in the files, and what could not be read of them."""
    table, missing = read_slices(slices, columns, retries)
    kept = np.flatnonzero(passing(table, missing, filters)) if filters else None
    problems = _problems(Origin(tuple(slices), kept), missing, kept, redact)
    return (table if kept is None else table.take(pa.array(kept))), problems


def _problems(origin: Origin, missing: Sequence[Unreadable], kept: I64 | None, redact: bool) -> Problems:
    """The problems of a table before its values are looked at."""
    problems = Problems(origin, redact)
    for part in missing:
        first, last = part.start, part.stop
        if kept is not None:
            first, last = np.searchsorted(kept, [first, last]).tolist()
        problems.add_error(np.arange(first, last), part.error)
    return problems
