"""Reads a rank's share of a window into mapped rows: the unit of work of read tasks.

`order/epoch_planner.py` computes the shares; `readers.py` decides which process reads them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa

from rayrec.data.arrays.arrow_types import without_views
from rayrec.data.arrays.buffers import I64, Mask, empty
from rayrec.data.config import BadRows
from rayrec.data.mapping.map_rows import map_rows
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.rows import Rows, to_columns
from rayrec.data.mapping.schema import Schema
from rayrec.data.order.epoch import positions, row_order
from rayrec.data.order.epoch_planner import Planner, RankShare, ShareColumns
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
from rayrec.data.stream.survivors import slices_that_pass, survivors_of
from rayrec.storage.retries import Patience

# Column with the rows that the rank has passed after each row.
END = "end"


@dataclass(frozen=True, slots=True)
class Block:
    """A rank's share of several windows with interleaved rows.

    Args:
        sizes: rows of each window.
        ranges: the rank's ranges of the interleaved sequence (see `epoch.positions`), ascending.
        rows_before: rows of the rank before this block.
    """

    sizes: tuple[int, ...]
    ranges: tuple[Interval, ...]
    rows_before: int

    @property
    def end(self) -> int:
        """Rows of the rank up to the end of the block."""
        return self.rows_before + count(self.ranges)

    def rows_of(self, number: int) -> tuple[Interval, ...]:
        """The rank's rows of a window, as ranges of the window's order."""
        if self.ranges == ((0, sum(self.sizes)),):
            return ((0, self.sizes[number]),)
        bounds = np.searchsorted(positions(self.sizes, number), spans(self.ranges))
        return tuple((start, stop) for start, stop in bounds.tolist() if start < stop)

    def ends_of(self, number: int) -> I64:
        """Rows that the rank has passed after each of its rows of a window."""
        window_positions, passed = positions(self.sizes, number), self.rows_before
        bounds = np.searchsorted(window_positions, spans(self.ranges)).tolist()
        ends, done = empty(sum(last_row - first_row for first_row, last_row in bounds), np.int64), 0
        for (start, stop), (first_row, last_row) in zip(self.ranges, bounds, strict=True):
            np.add(
                window_positions[first_row:last_row], passed - start + 1, out=ends[done : done + last_row - first_row]
            )
            passed, done = passed + stop - start, done + last_row - first_row
        return ends


@dataclass(frozen=True, slots=True)
class WindowShare:
    """A rank's share of a window.

    Args:
        slices: the slices of the complete window.
        window: number of the window; with seed and epoch it determines the order of the rows.
        ranges: the rank's ranges of that order, ascending.
        group: one task should read the shares of a group in order; 0: no group.
        rows_before: rows of the rank before this share.
        interleaved: the block if rows are interleaved with other windows, and the index of the window in it.
    """

    slices: tuple[FileSlice, ...]
    window: int
    ranges: tuple[Interval, ...]
    group: int
    rows_before: int = 0
    interleaved: tuple[Block, int] | None = None

    @property
    def rows(self) -> int:
        return count(self.ranges)

    @property
    def positions(self) -> I64:
        """Positions of the rows in the window's order."""
        return np.concatenate([np.arange(start, stop) for start, stop in self.ranges])

    @property
    def ends(self) -> I64:
        """Rows that the rank has passed after each row."""
        if self.interleaved is None:
            return np.arange(self.rows_before + 1, self.rows_before + self.rows + 1)
        block, number = self.interleaved
        return block.ends_of(number)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How every share is read and mapped.

    Args:
        columns: names and types of the columns to read.
        schema: the schema.
        rows_of: number of table rows for each sparse feature.
        seed, epoch, shuffle: determine the order of rows.
        patience: retries of failed reads.
        bad_rows: handling of bad rows.
        filters: conditions for the rows to read.
        negative_rate: probability with which a negative is read.
        interleave: windows whose rows are interleaved.
        deletes: True if files have deleted rows.
        encoded: columns of text ids that may stay dictionary-encoded.
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
    encoded: frozenset[str] = frozenset()

    @property
    def leaves_out(self) -> bool:
        """True if good rows may be skipped."""
        return bool(self.filters) or self.negative_rate < 1 or self.deletes

    @property
    def interleaves(self) -> bool:
        return self.interleave > 1

    @property
    def deciding(self) -> Columns:
        """The columns that decide which rows are read; empty if they are most of the columns."""
        names = {condition.column for condition in self.filters}
        names |= {task.column for task in self.schema.tasks if self.negative_rate < 1}
        columns = tuple(column for column in self.columns if column[0] in names)
        return columns if 2 * len(columns) < len(self.columns) else ()


def window_shares(
    planner: Planner, rank_share: RankShare, block_ends: deque[int] | None = None
) -> Iterator[WindowShare]:
    """Yields a rank's shares of windows in reading order, block by block. Fetches them on demand.

    Args:
        block_ends: receives the rows up to the end of each block, before its first share.
    """
    passed = 0
    while passed < rank_share.rows:
        columns = planner.next_blocks(rank_share, passed)
        for end, shares in _blocks(columns, passed):
            if block_ends is not None:
                block_ends.append(end)
            yield from shares
            passed = end


def _blocks(columns: ShareColumns, rows_before: int) -> Iterator[tuple[int, list[WindowShare]]]:
    """Yields the end and the shares of each block."""
    slices, numbers = slices_from(columns.slices, columns.files.all()), columns.windows.tolist()
    slice_ends = [0, *columns.slice_ends.tolist()]
    windows = [tuple(slices[start:stop]) for start, stop in pairwise(slice_ends)]
    window_start = range_start = 0
    for group, window_end, range_end in zip(
        *(column.tolist() for column in (columns.group, columns.window_ends, columns.interval_ends)), strict=True
    ):
        ranges = tuple((start, stop) for start, stop in columns.intervals[range_start:range_end].tolist())
        block_windows = list(zip(windows[window_start:window_end], numbers[window_start:window_end], strict=True))
        if len(block_windows) == 1:
            ((window, number),) = block_windows
            yield rows_before + count(ranges), [WindowShare(window, number, ranges, group, rows_before)]
        else:
            block = Block(tuple(sum(item.rows for item in window) for window, _ in block_windows), ranges, rows_before)
            yield block.end, list(_interleaved_shares(block, block_windows, group))
        rows_before += count(ranges)
        window_start, range_start = window_end, range_end


def _interleaved_shares(
    block: Block, windows: Sequence[tuple[tuple[FileSlice, ...], int]], group: int
) -> Iterator[WindowShare]:
    for index, (slices, number) in enumerate(windows):
        if ranges := block.rows_of(index):
            yield WindowShare(slices, number, ranges, group, block.rows_before, (block, index))


def read_share(share: WindowShare, recipe: Recipe, streams: RowGroupStreams | None = None) -> pa.Table:
    """Reads and maps the rows of a share that pass filters and down-sampling, in order.

    Args:
        streams: row groups that the task has decoded in part.

    Returns:
        the columns of `rows.to_columns`, and `problem` (see `bad_rows.to_array`). If rows may be skipped, or windows
        are interleaved, also `end`: the rows that the rank has passed after this one, skipped rows included. All rows
        of an unreadable file are bad.

    Raises:
        DataUnavailable, FileChanged: as `read_slices`.
    """
    rows, problems, positions, ends = _mapped(share, recipe, streams)
    columns = to_columns(rows) | ({} if ends is None else {END: pa.array(ends)})
    if not problems:
        return pa.table(columns | {PROBLEM: no_problems(len(rows))})
    bad = problems.rows()
    bad_in_order = bad[np.argsort(positions[bad])]
    errors = [problems.error(row) for row in bad_in_order[: recipe.bad_rows.described].tolist()]
    return pa.table(columns | {PROBLEM: to_array(len(rows), positions[bad_in_order], errors)})


def _mapped(
    share: WindowShare, recipe: Recipe, streams: RowGroupStreams | None
) -> tuple[Rows, Problems, I64, I64 | None]:
    """Reads and maps a share.

    Rows are mapped in file order and then shuffled as NumPy arrays.

    Returns:
        the rows in order; the problems of the table that was mapped; the position of each table row in the order; the
        rows passed after each row, or None.
    """
    slices, order, first_row = share.slices, share.positions, 0
    if recipe.shuffle:
        total = sum(item.rows for item in slices)
        order = row_order(share.window, total, seed=recipe.seed, epoch=recipe.epoch)[order]
    else:
        first_row = share.ranges[0][0]
        slices, order = tuple(within(slices, first_row, share.ranges[-1][1])), order - first_row
    ends = share.ends if recipe.leaves_out or recipe.interleaves else None
    kept: Mask | None = None
    if not recipe.leaves_out:
        table, unreadable = read_slices(slices, recipe.columns, recipe.patience, streams, recipe.encoded)
    else:
        table, unreadable, mask, kept = _passing_rows(slices, share.window, first_row, recipe, streams)
        passes = mask[order]
        if not passes.all():
            order, ends = order[passes], None if ends is None else ends[passes]
    selected: I64 | None = None
    if kept is not None or len(order) < table.num_rows:
        selected = np.sort(order)
        positions = selected if kept is None else np.cumsum(kept)[selected] - 1
        table, order = table.take(pa.array(positions)), np.searchsorted(selected, order)
    problems = _problems(Origin(slices, selected), unreadable, selected, recipe.bad_rows.redact)
    rows = map_rows(table, recipe.schema, recipe.rows_of, problems, order if recipe.shuffle else None)
    return rows, problems, np.argsort(order) if problems and recipe.shuffle else order, ends


def _passing_rows(
    slices: Sequence[FileSlice], window: int, first_row: int, recipe: Recipe, streams: RowGroupStreams | None
) -> tuple[pa.Table, list[Unreadable], Mask, Mask | None]:
    """Reads the rows that may pass filters and down-sampling.

    If few row groups have rows that pass, reads the columns that decide it first, and the others only there. The rows
    that pass are the same in both ways.

    Args:
        window, first_row: the slices start at row `first_row` of the window.

    Returns:
        the table; the ranges of its rows that could not be read; which rows of the slices pass; which rows of the
        slices are in the table, None for all.
    """
    survivors = survivors_of(recipe.filters, recipe.negative_rate)

    def mask_of(table: pa.Table, unreadable: Sequence[Unreadable]) -> Mask:
        mask = passing(slices, table, unreadable, recipe.filters)
        if recipe.negative_rate < 1:
            mask &= _downsampling_mask(table, window, first_row, recipe)
        survivors.note(slices_that_pass(slices, mask))
        return mask

    read = partial(read_slices, patience=recipe.patience, streams=streams, encoded=recipe.encoded)
    # Row groups that are read in several slices are decoded once for all columns.
    if survivors.are_few and recipe.deciding and all(item.rows == item.group_rows for item in slices):
        table, unreadable = read_slices(slices, recipe.deciding, recipe.patience)
        if not unreadable:
            mask = mask_of(table, [])
            passes = slices_that_pass(slices, mask)
            chosen = [item for item, any_passes in zip(slices, passes.tolist(), strict=True) if any_passes]
            table, unreadable = read(chosen, recipe.columns) if chosen else (_no_rows(recipe.columns), [])
            if not unreadable:
                return table, [], mask, np.repeat(passes, [item.rows for item in slices])
        # All rows of a file that cannot be read are bad.
    table, unreadable = read(slices, recipe.columns)
    return table, unreadable, mask_of(table, unreadable), None


def _no_rows(columns: Columns) -> pa.Table:
    return pa.schema([(name, without_views(kind)) for name, kind in columns]).empty_table()


def _downsampling_mask(table: pa.Table, window: int, first_row: int, recipe: Recipe) -> Mask:
    """True for rows that down-sampling keeps. The table starts at row `first_row` of the window."""
    (task,) = recipe.schema.tasks
    return keep_mask(
        table.column(task.column),
        recipe.negative_rate,
        seed=recipe.seed,
        epoch=recipe.epoch,
        window=window,
        first=first_row,
    )


def read_window(
    manifest: Manifest, number: int, streams: RowGroupStreams | None = None, *, redact: bool = False
) -> tuple[pa.Table, Problems]:
    """The rows of a window that pass the filters, in file order, and the problems of reading them.

    Args:
        streams: row groups that are already decoded in part. With them, windows in ascending order decode a large row
            group once, instead of once per window.
    """
    slices = slices_of(manifest, number)
    table, unreadable = read_slices(slices, manifest.columns, Patience(), streams)
    mask = passing(slices, table, unreadable, manifest.filters) if manifest.leaves_out else None
    selected = None if mask is None else np.flatnonzero(mask)
    problems = _problems(Origin(slices, selected), unreadable, selected, redact)
    return (table if selected is None else table.take(pa.array(selected))), problems


def _problems(origin: Origin, unreadable: Sequence[Unreadable], selected: I64 | None, redact: bool) -> Problems:
    """The problems of a table from reading, before its values are checked."""
    problems = Problems(origin, redact)
    for gap in unreadable:
        start, stop = gap.start, gap.stop
        if selected is not None:
            start, stop = np.searchsorted(selected, [start, stop]).tolist()
        problems.add_error(np.arange(start, stop), gap.error)
    return problems
