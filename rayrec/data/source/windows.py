"""Windows: neighbouring slices of row groups that are read and shuffled together. Stored in columns."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rayrec.data.arrays.buffers import I64
from rayrec.data.source.file_table import FileTable

WINDOW_ROWS = 65_536
WINDOW_BYTES = 128 << 20
_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class Slices:
    """Slices: rows `[start, stop)` of row groups, in columns, [S] each.

    Args:
        file: index of the file.
        row_group: index of the row group in the file.
        group_rows: rows of the row group.
        first_row: position of the row group's first row in the file.
    """

    file: I64
    row_group: I64
    group_rows: I64
    start: I64
    stop: I64
    first_row: I64


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of a data set. A window holds neighbouring row groups, or a slice of a large one.

    Args:
        files: the files. Row groups that are empty or left out have no slices.
        slice_counts: number of slices per row group, equal in size but for the last, [G].
        edges: offsets of the windows' slices, [W + 1].
    """

    files: FileTable
    slice_counts: I64
    edges: I64

    @classmethod
    def of(cls, files: FileTable, window_rows: int, window_bytes: int) -> Windows:
        """Windows of about `window_rows` rows. Cuts row groups of twice as many, or of more than `window_bytes`."""
        rows = np.where(files.left_out, 0, files.group_rows)
        row_bytes = np.repeat(files.columns.column("row_bytes").to_numpy().astype(np.float64), np.diff(files.offsets))
        needed = np.maximum(rows // window_rows, -(-(rows * row_bytes).astype(np.int64) // window_bytes))
        counts = np.minimum(rows, np.maximum(1, needed))
        counts = (-(-rows // np.maximum(1, _sizes(rows, counts)))).astype(np.int32)
        return cls(files, counts, _edges(rows, counts, row_bytes, window_rows, window_bytes))

    @property
    def nbytes(self) -> int:
        """Bytes in memory, without the files."""
        return int(self.slice_counts.nbytes + self.edges.nbytes)

    @cached_property
    def rows(self) -> I64:
        """Rows of each window, [W]."""
        group_rows = np.where(self.slice_counts > 0, self.files.group_rows, 0)
        rows_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(group_rows)])
        group, slice_index = self._groups(self.edges[:-1])
        cut = slice_index * _sizes(group_rows[group], self.slice_counts[group])
        starts = np.append(rows_before[group] + cut, rows_before[-1])
        return np.diff(starts)

    @cached_property
    def runs(self) -> I64:
        """Lengths of the runs of consecutive windows inside one row group; 1 for windows of complete row groups."""
        group, _ = self._groups(self.edges[:-1])
        cut = (np.diff(self.edges) == 1) & (self.slice_counts[group] > 1)
        continues = cut[1:] & cut[:-1] & (group[1:] == group[:-1])
        run_starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(self)), np.bool_), ~continues]))
        return np.diff(np.append(run_starts, len(self)))

    def __len__(self) -> int:
        return len(self.edges) - 1

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("files", "slice_counts", "edges")}

    def slices(self, numbers: I64) -> Slices:
        """The slices with these numbers."""
        group, slice_index = self._groups(numbers)
        file = np.searchsorted(self.files.offsets, group, side="right") - 1
        first_group = self.files.offsets[file]
        rows, rows_before = self.files.group_rows[group], self.files.rows_before
        size = _sizes(rows, self.slice_counts[group])
        start, stop = slice_index * size, np.minimum((slice_index + 1) * size, rows)
        return Slices(file, group - first_group, rows, start, stop, rows_before[group] - rows_before[first_group])

    def _groups(self, slices: I64) -> tuple[I64, I64]:
        """The row group of each slice, and the slice's index in it."""
        group = np.searchsorted(self._slices_before, slices, side="right") - 1
        return group, slices - self._slices_before[group]

    @cached_property
    def _slices_before(self) -> I64:
        """Number of slices before each row group, [G]; an empty row group has the number of the next one."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.slice_counts[:-1], dtype=np.int64)])


def _sizes(rows: I64, slice_counts: Any) -> I64:
    """Rows per slice; the last slice of a row group may have fewer.

    With slices of equal size, each is decoded on demand, and no rows are carried over to the next.
    """
    return -(-rows // np.maximum(1, slice_counts).astype(np.int64))


def _edges(rows: I64, slice_counts: I64, row_bytes: Any, window_rows: int, window_bytes: int) -> I64:
    """The first slice of each window: a window ends at about `window_rows` rows, or before exceeding `window_bytes`."""
    edges, number, rows_so_far, bytes_so_far = array("q", [0]), 0, 0, 0.0
    for first in range(0, len(rows), _AT_ONCE):
        chunk = slice(first, first + _AT_ONCE)
        columns = (rows[chunk], slice_counts[chunk], _sizes(rows[chunk], slice_counts[chunk]), row_bytes[chunk])
        for group_rows, count, slice_rows, bytes_per_row in zip(*(column.tolist() for column in columns), strict=True):
            for index in range(count):
                rows_added = min(slice_rows, group_rows - index * slice_rows)
                overshoots = rows_so_far + rows_added - window_rows > window_rows - rows_so_far
                if rows_so_far and (overshoots or bytes_so_far + rows_added * bytes_per_row > window_bytes):
                    edges.append(number)
                    rows_so_far, bytes_so_far = 0, 0.0
                rows_so_far, bytes_so_far, number = (
                    rows_so_far + rows_added,
                    bytes_so_far + rows_added * bytes_per_row,
                    number + 1,
                )
                if rows_so_far >= window_rows:
                    edges.append(number)
                    rows_so_far, bytes_so_far = 0, 0.0
    if rows_so_far:
        edges.append(number)
    return np.frombuffer(edges, dtype=np.int64).copy()
