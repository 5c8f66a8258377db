"""What a data set consists of, read from Parquet footers only: files, row groups, and the windows an epoch deals in.

Files and row groups that filters rule out are left out here; their other rows are judged when they are read. In which
order windows are read is decided in `order/epoch.py`, how in `stream/reading.py`, what a file holds in `footers.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa

from rayrec.data.errors import DataError
from rayrec.data.mapping.arrow_types import is_text, leaf_of
from rayrec.data.mapping.schema import Schema
from rayrec.data.source.dataset import DataSet
from rayrec.data.source.filters import Condition, parse_all
from rayrec.data.source.footer_cache import FooterCache
from rayrec.data.source.footers import FileFacts, Partitioned, check_same_types, nothing_left, read_footers
from rayrec.data.source.lake import TableFiles
from rayrec.data.storage.files import find_files

WINDOW_ROWS = 65_536
WINDOW_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows `[start, stop)` of one row group; `first_row` is the row of the file that the row group starts with."""

    file: int
    row_group: int
    start: int
    stop: int
    first_row: int


@dataclass(frozen=True, slots=True)
class Window:
    """Rows that are read and shuffled together: neighbouring row groups, or a part of a very large one."""

    slices: tuple[Slice, ...]

    @property
    def rows(self) -> int:
        return sum(s.stop - s.start for s in self.slices)


@dataclass(frozen=True)
class Manifest:
    """A data set as its footers describe it. Picklable; made once, by the driver.

    Args:
        files: in reading order.
        windows: cover every row once that the filters do not rule out by its file or row group; they do not depend on
            any number of ranks.
        columns: the Arrow type of every column that is read, partitions among them.
        filters: what rows are asked when they are read.
    """

    files: tuple[FileFacts, ...]
    windows: tuple[Window, ...]
    columns: tuple[tuple[str, pa.DataType], ...]
    filters: tuple[Condition, ...] = ()

    @classmethod
    def read(
        cls,
        paths: str | Sequence[str] | TableFiles,
        schema: Schema,
        *,
        filters: Iterable[Any] = (),
        window_rows: int = WINDOW_ROWS,
        window_bytes: int = WINDOW_BYTES,
        cache: FooterCache | None = None,
    ) -> Manifest:
        """Reads the footers of all files and checks their columns.

        Args:
            paths: files, folders, globs; local or URIs. Folders named `key=value` are columns of the files below them.
                Or the files of a table's version.
            filters: conditions `(column, operator, value)` that rows must meet, as `filters.Condition` reads them.
            window_rows: smaller row groups are joined to windows of about so many rows.
            window_bytes: a row group that takes more memory than this is cut into several windows.
            cache: footers read earlier; those of files that are new or changed are added to it.

        Raises:
            DataError: a missing path, a folder without Parquet files, a file that is not Parquet, a column that is
                missing, has a wrong type, or another type than in the first file, or a data set without rows.
            ValueError: a filter that is none.
        """
        conditions = parse_all(filters)
        found = _found(paths, [*schema.columns, *(c.column for c in conditions)])
        footers = read_footers(found.that_pass(conditions), schema, conditions, cache or FooterCache())
        if not footers:
            raise nothing_left(found.files[0].file.uri, conditions)
        check_same_types(footers)
        files = tuple(facts for facts, _ in footers)
        windows = tuple(_windows(files, window_rows, window_bytes))
        if not windows:
            raise nothing_left(files[0].uri, conditions)
        everywhere = set.intersection(*({name for name, _ in file.partition} for file in files))
        to_ask = tuple(c for c in conditions if c.column not in everywhere)
        return cls(files, windows, tuple(footers[0][1].items()), to_ask)

    @classmethod
    def of(
        cls, data: DataSet, schema: Schema, cache: FooterCache | None = None, window_rows: int = WINDOW_ROWS
    ) -> Manifest:
        """That of a config's data set; raises as `read`."""
        return cls.read(data.listed(), schema, filters=data.filters, cache=cache, window_rows=window_rows)

    def check_like(self, other: Manifest) -> None:
        """That no column holds texts here and numbers there: one id would be hashed to two table rows.

        Raises:
            DataError: one does, as a folder `hour=03` beside `hour=unknown`.
        """
        kinds = dict(other.columns)
        for name, kind in self.columns:
            if is_text(leaf_of(kind)) != is_text(leaf_of(kinds.get(name, kind))):
                raise DataError(
                    f"the column is {kind} here and {kinds[name]} in {other.files[0].uri}",
                    file=self.files[0].uri,
                    column=name,
                    fix="write ids of one type to train and evaluate on",
                )

    @property
    def parts(self) -> tuple[Manifest, ...]:
        """The data sets it is made of, as of a `Mix`."""
        return (self,)

    @property
    def rows(self) -> int:
        """Rows of one epoch, before `filters` are asked."""
        return sum(window.rows for window in self.windows)

    @property
    def runs(self) -> list[int]:
        """How many windows in a row lie in one row group, run after run; 1 for those that hold whole ones."""
        runs: list[int] = []
        last: tuple[int, int] | None = None
        for window in self.windows:
            first = window.slices[0]
            here = (first.file, first.row_group)
            cut = (
                len(window.slices) == 1
                and first.stop - first.start < self.files[first.file].group_rows[first.row_group]
            )
            if cut and here == last:
                runs[-1] += 1
            else:
                runs.append(1)
            last = here if cut else None
        return runs

    @property
    def fingerprint(self) -> str:
        """Names what the windows hold (file names, bytes, rows), and the filters; equal for a set that was moved."""
        digest = hashlib.sha256()
        for file in self.files:
            name = file.uri.partition("?")[0].rpartition("/")[2]
            digest.update(repr((name, file.size_bytes, file.group_rows)).encode())
            if file.partition:
                digest.update(repr(file.partition).encode())
        for window in self.windows:
            digest.update(repr([(s.file, s.row_group, s.start, s.stop) for s in window.slices]).encode())
        if self.filters:
            digest.update(repr(self.filters).encode())
        return digest.hexdigest()[:32]


def _found(paths: str | Sequence[str] | TableFiles, columns: Sequence[str]) -> Partitioned:
    """The files, with the partitions that lie in their paths."""
    if isinstance(paths, TableFiles):
        return Partitioned.of(paths.files, columns if paths.hive else ())
    return Partitioned.of(find_files(paths), columns)


def _windows(files: Sequence[FileFacts], window_rows: int, window_bytes: int) -> Iterator[Window]:
    slices: list[Slice] = []
    rows, size = 0, 0.0
    for number, file in enumerate(files):
        first_row = 0
        for group, group_rows in enumerate(file.group_rows):
            for start, stop in _cut(0 if group in file.left_out else group_rows, file.row_bytes, window_bytes):
                too_large = size + (stop - start) * file.row_bytes > window_bytes
                overshoots = rows + stop - start - window_rows > window_rows - rows
                if slices and (too_large or overshoots):
                    yield Window(tuple(slices))
                    slices, rows, size = [], 0, 0.0
                slices.append(Slice(number, group, start, stop, first_row))
                rows, size = rows + stop - start, size + (stop - start) * file.row_bytes
                if rows >= window_rows:
                    yield Window(tuple(slices))
                    slices, rows, size = [], 0, 0.0
            first_row += group_rows
    if slices:
        yield Window(tuple(slices))


def _cut(rows: int, row_bytes: float, window_bytes: int) -> Iterator[tuple[int, int]]:
    """Equal parts of a row group, as few as fit into `window_bytes`; none of an empty one."""
    if not rows:
        return
    parts = min(rows, max(1, -(-int(rows * row_bytes) // window_bytes)))
    bounds = [rows * part // parts for part in range(parts + 1)]
    yield from pairwise(bounds)
