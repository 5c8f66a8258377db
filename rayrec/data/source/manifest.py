"""`Manifest`: the files, row groups and windows of a data set, from Parquet footers only.

Excludes files and row groups that the filters rule out; other rows are filtered when they are read. `order/epoch.py`
orders the windows, `stream/reading.py` reads them. All of it is in columns: at most 100 bytes per row group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.arrays.buffers import I64
from rayrec.data.formats.text_options import reading_kinds
from rayrec.data.mapping.schema import Schema
from rayrec.data.source.column_checks import check_columns, file_table
from rayrec.data.source.dataset import DataSet
from rayrec.data.source.file_table import FileTable
from rayrec.data.source.filters import Condition, parse_all
from rayrec.data.source.footer_index import FooterIndex, index_file
from rayrec.data.source.footers import FooterReading, read_footers
from rayrec.data.source.lake import TableFiles
from rayrec.data.source.partitions import Columns, Value, columns_of, find_partitioned, nothing_left, value_of
from rayrec.data.source.windows import WINDOW_BYTES, WINDOW_ROWS, Windows
from rayrec.storage.files import find_files


@dataclass(frozen=True, eq=False)
class Manifest:
    """A data set as described by its footers. Picklable; the driver creates it once.

    Args:
        files: the files, in reading order.
        windows: windows that cover each row of the remaining row groups once, independent of the number of ranks.
        columns: names and Arrow types of the columns to read, partitions included.
        filters: conditions to apply when rows are read.
        limits: maximum rows and bytes of a window.
        spans: the rows `[start, stop)` of each period, if periods are ranges of rows instead of partitions.
        span: rows to read; None: all.
    """

    files: FileTable
    windows: Windows
    columns: tuple[tuple[str, pa.DataType], ...]
    filters: tuple[Condition, ...] = ()
    limits: tuple[int, int] = (WINDOW_ROWS, WINDOW_BYTES)
    spans: Mapping[Value, tuple[int, int]] | None = None
    span: tuple[int, int] | None = None

    @classmethod
    def read(
        cls,
        paths: str | Sequence[str] | TableFiles,
        schema: Schema,
        *,
        filters: Iterable[Any] = (),
        window_rows: int = WINDOW_ROWS,
        window_bytes: int = WINDOW_BYTES,
        reading: FooterReading | None = None,
        by: str | Sequence[str] | None = None,
    ) -> Manifest:
        """Reads the footers of all files and checks their columns.

        Args:
            paths: files, folders, globs; local or URIs; or the files of a table's version. Folders named `key=value`
                are columns of the files below them.
            filters: conditions `(column, operator, value)`, as `filters.Condition.parse` reads them.
            window_rows: approximate rows of a window: small row groups are joined, much larger ones are cut.
            window_bytes: row groups that take more memory are cut into several windows.
            reading: index of earlier footers, and options for reading.
            by: partition column or columns for `only`.

        Raises:
            DataError: a missing path, a folder without Parquet files, a file that is not Parquet, a column that is
                missing or of a wrong type, or a data set without rows.
            ValueError: an invalid filter.
        """
        conditions = parse_all(filters)
        columns = list(dict.fromkeys([*schema.columns, *(c.column for c in conditions)]))
        wanted = {*columns, *([] if by is None else columns_of(by))}
        with reading_kinds(schema.column_kinds):
            all_files = find_partitioned(paths, wanted, schema.text_columns)
        remaining = all_files.that_pass(conditions)
        if not remaining.files:
            raise nothing_left(all_files.files[0].file.uri, conditions)
        in_all_files = set.intersection(*map(set, {tuple(file.values) for file in remaining.files}))
        row_filters = tuple(c for c in conditions if c.column not in in_all_files)
        with_statistics = {condition.column for condition in row_filters}
        facts = read_footers([file.file for file in remaining.files], with_statistics, reading or FooterReading())
        types = check_columns(remaining, facts, schema, conditions)
        files = file_table(remaining, facts, columns, row_filters)
        windows = Windows.of(files, window_rows, window_bytes)
        if not len(windows):
            raise nothing_left(remaining.files[0].file.uri, conditions)
        return cls(files, windows, tuple(types.items()), row_filters, (window_rows, window_bytes))

    @classmethod
    def of(
        cls,
        data: DataSet,
        schema: Schema,
        reading: FooterReading | None = None,
        window_rows: int = WINDOW_ROWS,
        by: str | Sequence[str] | None = None,
    ) -> Manifest:
        """The manifest of a config's data set. Uses the index in its folder, if there is one. Raises as `read`."""
        reading = reading or FooterReading()
        if data.index:
            find_files(data.index)  # raises if it is missing
        paths = [data.path] if isinstance(data.path, str) else data.path
        index = (reading.index or FooterIndex()).also([data.index] if data.index else [index_file(p) for p in paths])
        reading = FooterReading(index, reading.patience, reading.connect)
        return cls.read(data.listed(), schema, filters=data.filters, reading=reading, window_rows=window_rows, by=by)

    def only(self, period: tuple[Columns, Value]) -> Manifest:
        """The rows of a period: the files of one partition, as (column, value), or of several columns and their values,
        possibly none; or the files of a range of rows."""
        column, value = period
        if self.spans is not None:
            return self._rows(*self.spans[value])
        folders = [
            number
            for number, (_, partition) in enumerate(self.files.folders)
            if value_of(column, dict(partition)) == value
        ]
        numbers = np.flatnonzero(np.isin(self.files.columns.column("folder").to_numpy(), folders))
        files = self.files.select(numbers)
        return replace(self, files=files, windows=Windows.of(files, *self.limits))

    def _rows(self, start: int, stop: int) -> Manifest:
        """The files with the rows `[start, stop)`. Later files may be added, and earlier ones removed, without changing
        the result."""
        edges = self._file_edges
        first = int(np.searchsorted(edges, start, side="right")) - 1
        last = int(np.searchsorted(edges, stop, side="left"))
        files = self.files.select(np.arange(first, last))
        before = int(edges[first])
        span, windows = (start - before, stop - before), Windows.of(files, *self.limits)
        return replace(self, files=files, windows=windows, spans=None, span=span)

    @cached_property
    def _file_edges(self) -> I64:
        """Rows before each file, and of all, [F + 1]."""
        files = self.files
        rows_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.where(files.left_out, 0, files.group_rows))])
        edges: I64 = rows_before[files.offsets]
        return edges

    def rows_by(self, column: Columns) -> dict[Value, int]:
        """Rows before filters by value of a partition column or of several, without files that lack a column."""
        if self.spans is not None:
            return {value: stop - start for value, (start, stop) in self.spans.items()}
        files, of_file = self.files, np.diff(self._file_edges)
        of_folder = np.bincount(files.columns.column("folder").to_numpy(), of_file, len(files.folders)).astype(np.int64)
        rows_by_value: dict[Value, int] = {}
        for (_, partition), rows in zip(files.folders, of_folder.tolist(), strict=True):
            value = value_of(column, dict(partition))
            if value is not None:
                rows_by_value[value] = rows_by_value.get(value, 0) + rows
        return rows_by_value

    @property
    def parts(self) -> tuple[Manifest, ...]:
        """Itself; see `Mix.parts`."""
        return (self,)

    @cached_property
    def rows(self) -> int:
        """Rows of one epoch, before `filters`."""
        return int(self.windows.rows.sum()) if self.span is None else self.span[1] - self.span[0]

    @property
    def deleted_rows(self) -> int:
        """Deleted rows in its files."""
        return (pc.sum(pc.binary_length(self.files.columns.column("deleted"))).as_py() or 0) // 8

    @property
    def leaves_out(self) -> bool:
        """True if some rows of the windows may not be read."""
        return bool(self.filters) or self.deleted_rows > 0

    @property
    def num_files(self) -> int:
        return len(self.files)

    @property
    def nbytes(self) -> int:
        """Approximate bytes in memory and when sent."""
        return self.files.nbytes + self.windows.nbytes

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the contents of the windows (file names, sizes, footers, rows) and the filters.

        Does not change if the data set moves to another folder.
        """
        files = self.files
        digest = hashlib.sha256()
        digest.update("\0".join(files.columns.column("name").to_pylist()).encode())
        digest.update(repr([partition for _, partition in files.folders]).encode())
        for name in ("folder", "size_bytes", "footer"):
            digest.update(files.columns.column(name).to_numpy(zero_copy_only=False).tobytes())
        for array in (files.offsets, files.group_rows, self.windows.slice_counts, self.windows.edges):
            digest.update(array.tobytes())
        for name in ("deleted", "names"):
            if (column := files.columns.column(name)).null_count < len(column):
                digest.update(repr(column.to_pylist()).encode())
        if self.filters:
            digest.update(repr(self.filters).encode())
        if self.span is not None:
            digest.update(repr(self.span).encode())
        return digest.hexdigest()[:32]
