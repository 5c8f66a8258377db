"""What a data set consists of, read from Parquet footers only: files, row groups, and the windows an epoch deals in.

Files and row groups that filters rule out are left out here; their other rows are judged when they are read. In which
order windows are read is decided in `order/epoch.py`, how in `stream/reading.py`, what a file holds in `footers.py`.
All of it is in columns: 100 bytes a row group at most.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.mapping.schema import Schema
from rayrec.data.source.column_checks import check_columns, file_table
from rayrec.data.source.dataset import DataSet
from rayrec.data.source.file_table import FileTable
from rayrec.data.source.filters import Condition, parse_all
from rayrec.data.source.footer_index import FooterIndex, index_file
from rayrec.data.source.footers import FooterReading, read_footers
from rayrec.data.source.lake import TableFiles
from rayrec.data.source.partitions import find_partitioned, nothing_left
from rayrec.data.source.windows import WINDOW_BYTES, WINDOW_ROWS, Windows
from rayrec.storage.files import find_files


@dataclass(frozen=True, eq=False)
class Manifest:
    """A data set as its footers describe it. Picklable; made once, by the driver.

    Args:
        files: in reading order.
        windows: cover every row once that the filters do not rule out by its file or row group; they do not depend on
            any number of ranks.
        columns: the Arrow type of every column that is read, partitions among them.
        filters: applied when rows are read.
        limits: of windows: rows and bytes.
    """

    files: FileTable
    windows: Windows
    columns: tuple[tuple[str, pa.DataType], ...]
    filters: tuple[Condition, ...] = ()
    limits: tuple[int, int] = (WINDOW_ROWS, WINDOW_BYTES)

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
        by: str | None = None,
    ) -> Manifest:
        """Reads the footers of all files and checks their columns.

        Args:
            paths: files, folders, globs; local or URIs. Folders named `key=value` are columns of the files below them.
                Or the files of a table's version.
            filters: conditions `(column, operator, value)` that rows must meet, as `filters.Condition` reads them.
            window_rows: smaller row groups are joined to windows of about so many rows, much larger ones are cut.
            window_bytes: a row group that takes more memory than this is cut into several windows.
            reading: footers read earlier, to which new ones are added, and how those are read.
            by: a column that folders give, for `only`.

        Raises:
            DataError: a missing path, a folder without Parquet files, a file that is not Parquet, a column that is
                missing, has a wrong type, or another type than in the first file, or a data set without rows.
            ValueError: a filter that is none.
        """
        conditions = parse_all(filters)
        columns = list(dict.fromkeys([*schema.columns, *(c.column for c in conditions)]))
        everything = find_partitioned(paths, {*columns, *([] if by is None else [by])}, schema.text_columns)
        found = everything.that_pass(conditions)
        if not found.files:
            raise nothing_left(everything.files[0].file.uri, conditions)
        everywhere = set.intersection(*map(set, {tuple(one.values) for one in found.files}))
        to_ask = tuple(c for c in conditions if c.column not in everywhere)
        with_ranges = {condition.column for condition in to_ask}
        facts = read_footers([one.file for one in found.files], with_ranges, reading or FooterReading())
        types = check_columns(found, facts, schema, conditions)
        files = file_table(found, facts, columns, to_ask)
        windows = Windows.of(files, window_rows, window_bytes)
        if not len(windows):
            raise nothing_left(found.files[0].file.uri, conditions)
        return cls(files, windows, tuple(types.items()), to_ask, (window_rows, window_bytes))

    @classmethod
    def of(
        cls,
        data: DataSet,
        schema: Schema,
        reading: FooterReading | None = None,
        window_rows: int = WINDOW_ROWS,
        by: str | None = None,
    ) -> Manifest:
        """That of a config's data set, by the index that its folder has; raises as `read`."""
        reading = reading or FooterReading()
        if data.index:
            find_files(data.index)  # which says so where it is missing
        paths = [data.path] if isinstance(data.path, str) else data.path
        index = (reading.index or FooterIndex()).also([data.index] if data.index else [index_file(p) for p in paths])
        reading = FooterReading(index, reading.patience, reading.connect)
        return cls.read(data.listed(), schema, filters=data.filters, reading=reading, window_rows=window_rows, by=by)

    def only(self, part: tuple[str, int | str]) -> Manifest:
        """The part whose folders give a column this value; maybe nothing."""
        folders = [number for number, (_, partition) in enumerate(self.files.folders) if part in partition]
        numbers = np.flatnonzero(np.isin(self.files.columns.column("folder").to_numpy(), folders))
        files = self.files.select(numbers)
        return replace(self, files=files, windows=Windows.of(files, *self.limits))

    def rows_by(self, column: str) -> dict[int | str, int]:
        """Rows before filters, by what folders say of a column; those of files in no such folder are not counted."""
        files = self.files
        kept = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.where(files.left_out, 0, files.group_rows))])
        of_file = kept[files.offsets[1:]] - kept[files.offsets[:-1]]
        of_folder = np.bincount(files.columns.column("folder").to_numpy(), of_file, len(files.folders)).astype(np.int64)
        found: dict[int | str, int] = {}
        for (_, partition), rows in zip(files.folders, of_folder.tolist(), strict=True):
            value = dict(partition).get(column)
            if value is not None:
                found[value] = found.get(value, 0) + rows
        return found

    @property
    def parts(self) -> tuple[Manifest, ...]:
        """The data sets it is made of, as of a `Mix`."""
        return (self,)

    @cached_property
    def rows(self) -> int:
        """Rows of one epoch, before `filters`."""
        return int(self.windows.rows.sum())

    @property
    def deleted_rows(self) -> int:
        """Rows of its files that the table does not have any more."""
        return (pc.sum(pc.binary_length(self.files.columns.column("deleted"))).as_py() or 0) // 8

    @property
    def leaves_out(self) -> bool:
        """Whether rows of its windows are not read."""
        return bool(self.filters) or self.deleted_rows > 0

    @property
    def num_files(self) -> int:
        return len(self.files)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, and about so many when it is sent."""
        return self.files.nbytes + self.windows.nbytes

    @cached_property
    def fingerprint(self) -> str:
        """Names what the windows hold (file names, bytes, footers, rows), and the filters; equal for a set that was
        moved."""
        files = self.files
        digest = hashlib.sha256()
        digest.update("\0".join(files.columns.column("name").to_pylist()).encode())
        digest.update(repr([partition for _, partition in files.folders]).encode())
        for name in ("folder", "size_bytes", "footer"):
            digest.update(files.columns.column(name).to_numpy(zero_copy_only=False).tobytes())
        for array in (files.offsets, files.group_rows, self.windows.parts, self.windows.edges):
            digest.update(array.tobytes())
        for name in ("deleted", "names"):
            if (column := files.columns.column(name)).null_count < len(column):
                digest.update(repr(column.to_pylist()).encode())
        if self.filters:
            digest.update(repr(self.filters).encode())
        return digest.hexdigest()[:32]
