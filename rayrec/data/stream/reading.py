"""Reads one piece of a window into mapped rows: the work of one read task, the same wherever it runs.

Which pieces a rank reads is dealt in `order/rank_part.py`; who runs the tasks is decided in `readers.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from rayrec.data.arrays.buffers import I64, Mask, empty
from rayrec.data.config import BadRows
from rayrec.data.mapping.map_rows import map_rows
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.rows import Rows, to_columns
from rayrec.data.mapping.schema import Schema
from rayrec.data.order.epoch import positions, row_order
from rayrec.data.order.epoch_planner import ShareColumns, RankShare
from rayrec.data.order.intervals import Interval, count, spans
from rayrec.data.source.filters import Condition
from rayrec.data.source.manifest import Manifest
from rayrec.data.source.slices import (
    Columns,
    FileSlice,
    Origin,
    RowGroupStreams,
    Unreadable,
    passing,
    read_slices,
    slices_from,
    slices_of,
    within,
)
from rayrec.data.stream.bad_rows import PROBLEM, no_problems, to_array
from rayrec.data.stream.downsampling import keep_mask
from rayrec.data.stream.shared_manifest import Planner
from rayrec.storage.retries import Patience

END = "end"


@dataclass(frozen=True, slots=True)
class Block:
    """One rank's part of several windows whose rows come mixed.

    Args:
        sizes: rows of each window.
        parts: the parts of their sequence (`epoch.positions`) that are the rank's, one after another.
        before: rows of the rank that come before them.
    """

    sizes: tuple[int, ...]
    parts: tuple[Interval, ...]
    before: int

    @property
    def end(self) -> int:
        """Rows of the rank up to the end of its part."""
        return self.before + count(self.parts)

    def rows_of(self, number: int) -> tuple[Interval, ...]:
        """Those rows of one window, as they come in its own order, that are the rank's, part by part."""
        if self.parts == ((0, sum(self.sizes)),):
            return ((0, self.sizes[number]),)
        bounds = np.searchsorted(positions(self.sizes, number), spans(self.parts))
        return tuple((start, stop) for start, stop in bounds.tolist() if start < stop)

    def ends_of(self, number: int) -> I64:
        """How many rows the rank has passed after each of those rows."""
        at, before = positions(self.sizes, number), self.before
        bounds = np.searchsorted(at, spans(self.parts)).tolist()
        ends, done = empty(sum(last - first for first, last in bounds), np.int64), 0
        for (start, stop), (first, last) in zip(self.parts, bounds, strict=True):
            np.add(at[first:last], before - start + 1, out=ends[done : done + last - first])
            before, done = before + stop - start, done + last - first
        return ends


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's part of one window.

    Args:
        slices: the whole window.
        window: its number; with seed and epoch it decides the order of its rows.
        parts: the parts of that order that are this piece, ascending.
        group: pieces of one group (not of 0) are best read one after the other by one task.
        before: rows of the rank's pieces that come before it.
        mixed: where its rows come among those of other windows, and which of the windows it is.
    """

    slices: tuple[FileSlice, ...]
    window: int
    parts: tuple[Interval, ...]
    group: int
    before: int = 0
    mixed: tuple[Block, int] | None = None

    @property
    def rows(self) -> int:
        return count(self.parts)

    @property
    def places(self) -> I64:
        """The piece's places in the window's order."""
        return np.concatenate([np.arange(start, stop) for start, stop in self.parts])

    @property
    def ends(self) -> I64:
        """How many rows the rank has passed after each row."""
        if self.mixed is None:
            return np.arange(self.before + 1, self.before + self.rows + 1)
        block, number = self.mixed
        return block.ends_of(number)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is done with every piece.

    Args:
        columns: names and types of what is read.
        schema, rows_of: how it is mapped.
        seed, epoch, shuffle: how its rows are ordered.
        patience: with reads that fail.
        bad_rows: records bad rows.
        filters: rows that do not pass are skipped.
        negative_rate: the part of the negatives that is read.
        interleave: windows whose rows come mixed.
        deletes: whether files have rows that are deleted.
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
    interleave: int = 1
    deletes: bool = False

    @property
    def leaves_out(self) -> bool:
        """Whether good rows may be left out."""
        return bool(self.filters) or self.negative_rate < 1 or self.deletes

    @property
    def interleaves(self) -> bool:
        return self.interleave > 1


def pieces_of(planner: Planner, part: RankShare, block_ends: deque[int] | None = None) -> Iterator[Piece]:
    """The pieces of a rank, in the order they are consumed, those of a block one after another; fetched as they are
    needed.

    Args:
        block_ends: gets the rows up to the end of each block, before its first piece is given.
    """
    passed = 0
    while passed < part.rows:
        found = planner.pieces(part, passed)
        for end, pieces in _blocks(found, passed):
            if block_ends is not None:
                block_ends.append(end)
            yield from pieces
            passed = end


def _blocks(found: ShareColumns, before: int) -> Iterator[tuple[int, list[Piece]]]:
    """Each block's end and pieces."""
    slices, numbers = slices_from(found.slices, found.files.all()), found.windows.tolist()
    slice_ends = [0, *found.slice_ends.tolist()]
    windows = [tuple(slices[first:last]) for first, last in pairwise(slice_ends)]
    first_window = first = 0
    for group, last_window, end in zip(
        *(column.tolist() for column in (found.group, found.window_ends, found.interval_ends)), strict=True
    ):
        parts = tuple((start, stop) for start, stop in found.intervals[first:end].tolist())
        some = list(zip(windows[first_window:last_window], numbers[first_window:last_window], strict=True))
        if len(some) == 1:
            ((window, number),) = some
            yield before + count(parts), [Piece(window, number, parts, group, before)]
        else:
            block = Block(tuple(sum(part.rows for part in window) for window, _ in some), parts, before)
            yield block.end, list(_mixed_pieces(block, some, group))
        before += count(parts)
        first_window, first = last_window, end


def _mixed_pieces(block: Block, windows: Sequence[tuple[tuple[FileSlice, ...], int]], group: int) -> Iterator[Piece]:
    for place, (slices, number) in enumerate(windows):
        if rows := block.rows_of(place):
            yield Piece(slices, number, rows, group, block.before, (block, place))


def read_piece(piece: Piece, recipe: Recipe, streams: RowGroupStreams | None = None) -> pa.Table:
    """The piece's rows that filters and down-sampling leave, mapped, in their order.

    Args:
        streams: what the task has decoded in part.

    Returns:
        the columns of `rows.to_columns`; `problem`: as `records.to_array` makes it; where rows are left out or windows
        come mixed also `end`: how many rows the rank has passed after this one, those that were left out among them.
        All rows of a file that cannot be read are bad.

    Raises:
        DataUnavailable, FileChanged: as `read_slices`.
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
    else:
        first = piece.parts[0][0]
        slices, order = tuple(within(slices, first, piece.parts[-1][1])), order - first
    table, missing = read_slices(slices, recipe.columns, recipe.patience, streams)
    ends = piece.ends if recipe.leaves_out or recipe.interleaves else None
    if recipe.leaves_out:
        mask = passing(slices, table, missing, recipe.filters) & _drawn(table, piece.window, first, recipe)
        chosen = mask[order]
        order, ends = order[chosen], piece.ends[chosen]
    kept: I64 | None = None
    if len(order) < table.num_rows:
        kept = np.sort(order)
        table, order = table.take(pa.array(kept)), np.searchsorted(kept, order)
    problems = _problems(Origin(slices, kept), missing, kept, recipe.bad_rows.redact)
    rows = map_rows(table, recipe.schema, recipe.rows_of, problems, order if recipe.shuffle else None)
    return rows, problems, np.argsort(order) if problems and recipe.shuffle else order, ends


def _drawn(table: pa.Table, window: int, first: int, recipe: Recipe) -> Mask:
    """Which rows of a table, whose first is the row `first` of its block, down-sampling keeps."""
    if recipe.negative_rate >= 1:
        return np.ones(table.num_rows, dtype=np.bool_)
    (task,) = recipe.schema.tasks
    return keep_mask(
        table.column(task.column),
        recipe.negative_rate,
        seed=recipe.seed,
        epoch=recipe.epoch,
        window=window,
        first=first,
    )


def read_window(manifest: Manifest, number: int, *, redact: bool = False) -> tuple[pa.Table, Problems]:
    """The rows of a window that pass the filters, as they lie in the files, and what could not be read of them."""
    slices = slices_of(manifest, number)
    table, missing = read_slices(slices, manifest.columns, Patience())
    mask = passing(slices, table, missing, manifest.filters) if manifest.leaves_out else None
    kept = None if mask is None else np.flatnonzero(mask)
    problems = _problems(Origin(slices, kept), missing, kept, redact)
    return (table if kept is None else table.take(pa.array(kept))), problems


def _problems(origin: Origin, missing: Sequence[Unreadable], kept: I64 | None, redact: bool) -> Problems:
    """The problems of a table before its values are checked."""
    problems = Problems(origin, redact)
    for part in missing:
        first, last = part.start, part.stop
        if kept is not None:
            first, last = np.searchsorted(kept, [first, last]).tolist()
        problems.add_error(np.arange(first, last), part.error)
    return problems
