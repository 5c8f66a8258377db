"""Reads one piece of a window into mapped rows: the work of one read task, the same wherever it runs.

Which pieces a rank reads is dealt in `order/rank_part.py`; who runs the tasks is decided in `readers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec.data.mapping.map_rows import map_rows
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.rows import Rows, joined, to_columns
from rayrec.data.mapping.schema import Schema
from rayrec.data.options import BadRows
from rayrec.data.order.epoch import row_order
from rayrec.data.order.intervals import Interval, count
from rayrec.data.order.rank_part import PieceColumns, RankPart
from rayrec.data.source.filters import Condition, Mask
from rayrec.data.source.negatives import draw
from rayrec.data.source.slices import (
    Columns,
    FileSlice,
    Origin,
    RowGroupStreams,
    Unreadable,
    passing,
    read_slices,
    slices_from,
    within,
)
from rayrec.data.storage.retries import Patience
from rayrec.data.stream.records import PROBLEM, no_problems, to_array

I64 = npt.NDArray[np.int64]

END = "end"
_CHUNK_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's part of one block of windows.

    Args:
        slices: the whole block.
        window: the number of its first window; with seed and epoch it decides the order of the block's rows.
        parts: the parts of that order that are this piece, ascending.
        group: pieces of one group are best read one after the other by one task.
        before: rows of the rank's pieces that come before it.
    """

    slices: tuple[FileSlice, ...]
    window: int
    parts: tuple[Interval, ...]
    group: int
    before: int = 0

    @property
    def rows(self) -> int:
        return count(self.parts)

    @property
    def places(self) -> I64:
        """The piece's places in the block's order."""
        return np.concatenate([np.arange(start, stop) for start, stop in self.parts])


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is done with every piece.

    Args:
        columns: names and types of what is read.
        schema, rows_of: how it is mapped.
        seed, epoch, shuffle: how its rows are ordered.
        patience: with reads that fail.
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
    patience: Patience
    bad_rows: BadRows
    filters: tuple[Condition, ...] = ()
    negative_rate: float = 1.0

    @property
    def leaves_out(self) -> bool:
        """Whether good rows may be left out."""
        return bool(self.filters) or self.negative_rate < 1


class Planner(Protocol):
    """Says piece by piece what a rank reads, as `rank_part.EpochPlanner` does."""

    def pieces(self, part: RankPart, passed: int) -> PieceColumns: ...


def pieces_of(planner: Planner, part: RankPart) -> Iterator[Piece]:
    """The pieces of a rank, in the order they are consumed; asked for as they are needed."""
    passed = 0
    while passed < part.rows:
        found = planner.pieces(part, passed)
        for piece in _pieces(found, passed):
            yield piece
            passed += piece.rows


def _pieces(found: PieceColumns, before: int) -> Iterator[Piece]:
    first_slice = first = 0
    slices = slices_from(found.slices, found.files.all())
    columns = (found.window, found.group, found.slice_ends, found.interval_ends)
    for window, group, slice_end, end in zip(*(column.tolist() for column in columns), strict=True):
        parts = tuple((start, stop) for start, stop in found.intervals[first:end].tolist())
        yield Piece(tuple(slices[first_slice:slice_end]), window, parts, group, before)
        before += count(parts)
        first_slice, first = slice_end, end


def read_piece(piece: Piece, recipe: Recipe, streams: RowGroupStreams | None = None) -> pa.Table:
    """The piece's rows that filters and down-sampling leave, mapped, in their order.

    Args:
        streams: what the task has decoded in part.

    Returns:
        the columns of `rows.to_columns`; `problem`: as `records.to_array` makes it; where rows are left out also `end`:
        how many rows the rank has passed after this one, those that were left out among them. All rows of a file that
        cannot be read are bad.
    """
    rows, problems, place, ends = _mapped(piece, recipe, streams)
    columns = to_columns(rows) | ({} if ends is None else {END: pa.array(ends)})
    if not problems:
        return pa.table(columns | {PROBLEM: no_problems(len(rows))})
    bad = problems.rows()
    by_place = bad[np.argsort(place[bad])]
    errors = [problems.error(row) for row in by_place[: recipe.bad_rows.described].tolist()]
    return pa.table(columns | {PROBLEM: to_array(len(rows), place[by_place], errors)})


def _mapped(piece: Piece, recipe: Recipe, streams: RowGroupStreams | None) -> tuple[Rows, Problems, I64, I64 | None]:
    """The piece's rows in their order, what is wrong with the rows of the table they were mapped from, the place of
    each of those in the order, and the rows' ends.

    Rows are mapped as they lie in the files and shuffled afterwards, when they are plain arrays.
    """
    slices, order, first = piece.slices, piece.places, 0
    if recipe.shuffle:
        total = sum(part.rows for part in slices)
        order = row_order(piece.window, total, seed=recipe.seed, epoch=recipe.epoch)[order]
        if total > _CHUNK_ROWS and (rows := _good_rows(slices, recipe, streams)) is not None:
            return rows.take(order), Problems(Origin(slices, None)), order, None
    else:
        first = piece.parts[0][0]
        slices, order = tuple(within(slices, first, piece.parts[-1][1])), order - first
    table, missing = read_slices(slices, recipe.columns, recipe.patience, streams)
    ends = None
    if recipe.leaves_out:
        mask = passing(table, missing, recipe.filters) & _drawn(table, piece.window, first, recipe)
        chosen = np.flatnonzero(mask[order])
        order, ends = order[chosen], piece.before + chosen + 1
    kept: I64 | None = None
    if len(order) < table.num_rows:
        kept = np.sort(order)
        table, order = table.take(pa.array(kept)), np.searchsorted(kept, order)
    problems = _problems(Origin(slices, kept), missing, kept, recipe.bad_rows.redact)
    rows = map_rows(table, recipe.schema, recipe.rows_of, problems, order if recipe.shuffle else None)
    return rows, problems, np.argsort(order) if problems and recipe.shuffle else order, ends


def _good_rows(slices: Sequence[FileSlice], recipe: Recipe, streams: RowGroupStreams | None) -> Rows | None:
    """The rows of a block of several windows as they lie in the files, mapped a window at a time, in the processor's
    cache; None where some are bad or left out, which takes the block as one."""
    chunks = [list(some) for some in _chunks(slices)]
    if len(chunks) < 2 or recipe.leaves_out:
        return None
    parts = []
    for some in chunks:
        table, missing = read_slices(some, recipe.columns, recipe.patience, streams)
        problems = Problems(Origin(tuple(some), None))
        parts.append(map_rows(table, recipe.schema, recipe.rows_of, problems))
        if missing or problems:
            return None
    return joined(parts)


def _chunks(slices: Sequence[FileSlice]) -> Iterator[Sequence[FileSlice]]:
    """The slices in runs of about a window's rows."""
    rows, first = 0, 0
    for number, part in enumerate(slices, 1):
        rows += part.rows
        if rows >= _CHUNK_ROWS:
            yield slices[first:number]
            rows, first = 0, number
    if first < len(slices):
        yield slices[first:]


def _drawn(table: pa.Table, window: int, first: int, recipe: Recipe) -> Mask:
    """Which rows of a table, whose first is the row `first` of its block, down-sampling keeps."""
    if recipe.negative_rate >= 1:
        return np.ones(table.num_rows, dtype=np.bool_)
    (task,) = recipe.schema.tasks
    return draw(
        table.column(task.column),
        recipe.negative_rate,
        seed=recipe.seed,
        epoch=recipe.epoch,
        window=window,
        first=first,
    )


def read_rows(
    slices: Sequence[FileSlice],
    columns: Columns,
    filters: Sequence[Condition],
    *,
    redact: bool = False,
) -> tuple[pa.Table, Problems]:
    """The rows of a window that pass the filters, as they lie in the files, and what could not be read of them."""
    table, missing = read_slices(slices, columns, Patience())
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
