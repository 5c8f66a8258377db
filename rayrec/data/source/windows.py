"""Windows: rows that are read and shuffled together, as neighbouring slices of row groups; in columns."""

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
    """Rows `[start, stop)` of row groups, in columns, [S] each.

    Args:
        file: its number; row_group: in it.
        group_rows: of the whole row group, which starts with the row `first_row` of its file.
    """

    file: I64
    row_group: I64
    group_rows: I64
    start: I64
    stop: I64
    first_row: I64


@dataclass(frozen=True, eq=False)
class Windows:
    """All windows of some files: rows that are read and shuffled together, of neighbouring row groups or a part of a
    very large one.

    Args:
        files: whose rows they hold; row groups that are left out, or empty, have no slices.
        parts: into how many slices each row group is cut, all of one size but the last, [G].
        edges: the number of the slice that each window begins with, and the end, [W + 1].
    """

    files: FileTable
    parts: I64
    edges: I64

    @classmethod
    def of(cls, files: FileTable, window_rows: int, window_bytes: int) -> Windows:
        """Windows of about so many rows; a row group of twice as many, or of more than `window_bytes`, is cut."""
        rows = np.where(files.left_out, 0, files.group_rows)
        row_bytes = np.repeat(files.columns.column("row_bytes").to_numpy().astype(np.float64), np.diff(files.offsets))
        needed = np.maximum(rows // window_rows, -(-(rows * row_bytes).astype(np.int64) // window_bytes))
        parts = np.minimum(rows, np.maximum(1, needed))
        parts = (-(-rows // np.maximum(1, _sizes(rows, parts)))).astype(np.int32)
        return cls(files, parts, _edges(rows, parts, row_bytes, window_rows, window_bytes))

    @property
    def nbytes(self) -> int:
        """Bytes in memory, beside those of the files."""
        return int(self.parts.nbytes + self.edges.nbytes)

    @cached_property
    def rows(self) -> I64:
        """Rows of each window, [W]."""
        kept = np.where(self.parts > 0, self.files.group_rows, 0)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])
        group, part = self._groups(self.edges[:-1])
        cut = part * _sizes(kept[group], self.parts[group])
        starts = np.append(before[group] + cut, before[-1])
        return np.diff(starts)

    @cached_property
    def runs(self) -> I64:
        """How many windows in a row lie in one row group, run after run; 1 for those that hold whole ones."""
        group, _ = self._groups(self.edges[:-1])
        cut = (np.diff(self.edges) == 1) & (self.parts[group] > 1)
        goes_on = cut[1:] & cut[:-1] & (group[1:] == group[:-1])
        begins = np.flatnonzero(np.concatenate([np.ones(min(1, len(self)), np.bool_), ~goes_on]))
        return np.diff(np.append(begins, len(self)))

    def __len__(self) -> int:
        return len(self.edges) - 1

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("files", "parts", "edges")}

    def slices(self, numbers: I64) -> Slices:
        """Slices by their numbers, in that order."""
        group, part = self._groups(numbers)
        file = np.searchsorted(self.files.offsets, group, side="right") - 1
        first = self.files.offsets[file]
        rows, before = self.files.group_rows[group], self.files.rows_before
        size = _sizes(rows, self.parts[group])
        start, stop = part * size, np.minimum((part + 1) * size, rows)
        return Slices(file, group - first, rows, start, stop, before[group] - before[first])

    def _groups(self, slices: I64) -> tuple[I64, I64]:
        """The row group of each slice, and which slice of it that is."""
        group = np.searchsorted(self._slices_before, slices, side="right") - 1
        return group, slices - self._slices_before[group]

    @cached_property
    def _slices_before(self) -> I64:
        """Slices before each row group, [G]; an empty one shares its number with the next one that is not."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.parts[:-1], dtype=np.int64)])


def _sizes(rows: I64, parts: Any) -> I64:
    """Rows of the parts that row groups are cut into, but for what is left for the last one: parts of one size are
    decoded as they are needed, without what is left of one being joined to the next."""
    return -(-rows // np.maximum(1, parts).astype(np.int64))


def _edges(rows: I64, parts: I64, row_bytes: Any, window_rows: int, window_bytes: int) -> I64:
    """Where windows begin: after so many rows, or before a slice with which they would be too large."""
    edges, number, held, size = array("q", [0]), 0, 0, 0.0
    for first in range(0, len(rows), _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        of_groups = (rows[some], parts[some], _sizes(rows[some], parts[some]), row_bytes[some])
        for group_rows, count, part_rows, each in zip(*(column.tolist() for column in of_groups), strict=True):
            for part in range(count):
                more = min(part_rows, group_rows - part * part_rows)
                overshoots = held + more - window_rows > window_rows - held
                if held and (overshoots or size + more * each > window_bytes):
                    edges.append(number)
                    held, size = 0, 0.0
                held, size, number = held + more, size + more * each, number + 1
                if held >= window_rows:
                    edges.append(number)
                    held, size = 0, 0.0
    if held:
        edges.append(number)
    return np.frombuffer(edges, dtype=np.int64).copy()
