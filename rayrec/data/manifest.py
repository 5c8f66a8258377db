"""What a data set consists of, read from Parquet footers only: files, row groups, and the windows an epoch deals in.

In which order windows are read is `order.py`'s matter, reading them `reading.py`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.data.columns import check_types
from rayrec.data.errors import DataError
from rayrec.data.files import Found, find_files
from rayrec.data.opening import open_parquet, unreadable
from rayrec.data.schema import Schema

WINDOW_ROWS = 65_536
WINDOW_BYTES = 128 << 20
_FOOTER_THREADS = 16


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One file: its URI, bytes, the rows of its row groups, and about how many bytes a decoded row takes."""

    uri: str
    size_bytes: int
    group_rows: tuple[int, ...]
    row_bytes: float


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
        windows: cover every row of every file once; they do not depend on any number of ranks.
        columns: the Arrow type of every column that is read.
    """

    files: tuple[FileFacts, ...]
    windows: tuple[Window, ...]
    columns: tuple[tuple[str, pa.DataType], ...]

    @classmethod
    def read(
        cls,
        paths: str | Sequence[str],
        schema: Schema,
        *,
        window_rows: int = WINDOW_ROWS,
        window_bytes: int = WINDOW_BYTES,
    ) -> Manifest:
        """Reads the footers of all files and checks their columns.

        Args:
            paths: files, folders, globs; local or URIs.
            window_rows: smaller row groups are joined to windows of about so many rows.
            window_bytes: a row group that takes more memory than this is cut into several windows.

        Raises:
            DataError: a missing path, a folder without Parquet files, a file that is not Parquet, a column that is
                missing, has a wrong type, or another type than in the first file, or a data set without rows.
        """
        found = find_files(paths)
        with ThreadPoolExecutor(min(_FOOTER_THREADS, len(found))) as pool:
            footers = list(pool.map(lambda file: _read_footer(file, schema), found))
        _check_same_types(footers)
        files = tuple(facts for facts, _ in footers)
        if not any(sum(f.group_rows) for f in files):
            raise DataError("the data set has no rows", file=files[0].uri, fix="check how the files were written")
        return cls(files, tuple(_windows(files, window_rows, window_bytes)), tuple(footers[0][1].items()))

    @property
    def rows(self) -> int:
        """Rows of one epoch."""
        return sum(sum(file.group_rows) for file in self.files)

    @property
    def fingerprint(self) -> str:
        """Names what the windows hold (file names, bytes, rows); equal for a data set that was moved elsewhere."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(repr((file.uri.rpartition("/")[2], file.size_bytes, file.group_rows)).encode())
        for window in self.windows:
            digest.update(repr([(s.file, s.row_group, s.start, s.stop) for s in window.slices]).encode())
        return digest.hexdigest()[:32]


def _read_footer(file: Found, schema: Schema) -> tuple[FileFacts, dict[str, pa.DataType]]:
    with open_parquet(file.uri) as parquet:
        try:
            arrow = parquet.schema_arrow
        except (pa.ArrowException, OSError) as error:
            raise unreadable(file.uri, error) from error
        check_types(schema, arrow, file.uri)
        footer = parquet.metadata
        groups = tuple(footer.row_group(g).num_rows for g in range(footer.num_row_groups))
        facts = FileFacts(file.uri, file.size_bytes, groups, _row_bytes(footer, set(schema.columns)))
        return facts, {name: arrow.field(name).type for name in schema.columns}


def _row_bytes(footer: pq.FileMetaData, columns: set[str]) -> float:
    """About how many bytes one row takes when decoded, judged by the file's first row group."""
    if not footer.num_rows:
        return 0.0
    group = next(g for g in map(footer.row_group, range(footer.num_row_groups)) if g.num_rows)
    total = 0
    for index in range(group.num_columns):
        chunk = group.column(index)
        if any(chunk.path_in_schema == c or chunk.path_in_schema.startswith(c + ".") for c in columns):
            total += max(chunk.total_uncompressed_size, 8 * chunk.num_values)
    return total / group.num_rows


def _check_same_types(footers: Sequence[tuple[FileFacts, dict[str, pa.DataType]]]) -> None:
    first, types = footers[0]
    for facts, found in footers[1:]:
        for column, kind in found.items():
            if kind != types[column]:
                raise DataError(
                    f"the column's type changes between files: {kind} here, {types[column]} in {first.uri}",
                    file=facts.uri,
                    column=column,
                    fix="write all files with one type for this column",
                )


def _windows(files: Sequence[FileFacts], window_rows: int, window_bytes: int) -> Iterator[Window]:
    slices: list[Slice] = []
    rows, size = 0, 0.0
    for number, file in enumerate(files):
        first_row = 0
        for group, group_rows in enumerate(file.group_rows):
            for start, stop in _cut(group_rows, file.row_bytes, window_bytes):
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
