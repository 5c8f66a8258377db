"""The files of a data set in columns: 100,000 files need a few megabytes. Objects are made on demand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from rayrec.data.arrays.buffers import I64, Mask
from rayrec.storage.parquet import Version

Partition = tuple[tuple[str, int | str | None], ...]

COLUMNS = pa.schema(
    [
        ("folder", pa.int32()),
        ("name", pa.string()),
        ("size_bytes", pa.int64()),
        ("changed_ns", pa.int64()),
        ("footer", pa.int64()),
        ("etag", pa.int64()),
        ("row_bytes", pa.float32()),
        ("deleted", pa.binary()),
        ("names", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file, with all that a process needs to read it.

    Args:
        version: identifies the contents at the time of reading the footer.
        partition: partition columns, with their values.
        deleted: positions of deleted rows, ascending, as bytes of int64.
        names: JSON object from column names to the names in the file, if they differ; null for columns that it lacks.
    """

    uri: str
    version: Version
    partition: Partition = ()
    deleted: bytes | None = None
    names: str | None = None

    @property
    def size_bytes(self) -> int:
        return self.version.size_bytes


@dataclass(frozen=True, slots=True)
class FileNames:
    """Files without their row groups; columns as in `FileTable`."""

    folders: tuple[tuple[str, Partition], ...]
    columns: pa.RecordBatch

    def all(self) -> list[DataFile]:
        """The files as objects."""
        return [_file(row, *self.folders[row["folder"]]) for row in self.columns.to_pylist()]


@dataclass(frozen=True, eq=False)
class FileTable:
    """Files and their row groups, in reading order.

    Args:
        folders: folders of the files, with the partition values of each.
        columns: `COLUMNS`, a row per file; `folder` is an index into `folders`.
        offsets: offsets of the files' row groups in `group_rows`, [F + 1].
        group_rows: rows of each row group, [G].
        left_out: True for row groups in which no row can pass the filters, [G].
    """

    folders: tuple[tuple[str, Partition], ...]
    columns: pa.RecordBatch
    offsets: I64
    group_rows: I64
    left_out: Mask

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        arrays = self.offsets.nbytes + self.group_rows.nbytes + self.left_out.nbytes
        return int(self.columns.nbytes + arrays + sum(len(folder) for folder, _ in self.folders))

    @cached_property
    def rows_before(self) -> I64:
        """Rows of all earlier row groups, and of all, [G + 1]."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.group_rows)])

    def __len__(self) -> int:
        return int(self.columns.num_rows)

    def __getitem__(self, number: int) -> DataFile:
        (file,) = self.take(np.array([range(len(self))[number]]))
        return file

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "rows_before"}

    def names(self, numbers: I64) -> FileNames:
        """A selection of the files, without their row groups."""
        columns = self.columns.take(pa.array(numbers))
        used, folder = np.unique(columns.column("folder").to_numpy(), return_inverse=True)
        columns = columns.set_column(0, COLUMNS.field(0), pa.array(folder.reshape(-1), pa.int32()))
        return FileNames(tuple(self.folders[number] for number in used.tolist()), columns)

    def take(self, numbers: I64) -> list[DataFile]:
        """A selection of the files, as objects."""
        return self.names(numbers).all()

    def select(self, numbers: I64) -> FileTable:
        """The table of a selection of the files."""
        starts, stops, selected = self.offsets[numbers], self.offsets[numbers + 1], self.names(numbers)
        groups, offsets = ranges(starts, stops), np.concatenate([np.zeros(1, np.int64), np.cumsum(stops - starts)])
        return FileTable(selected.folders, selected.columns, offsets, self.group_rows[groups], self.left_out[groups])

    @property
    def uris(self) -> list[str]:
        """The URIs of all files."""
        names, folders = self.columns.column("name").to_pylist(), self.columns.column("folder").to_pylist()
        return [join(self.folders[folder][0], name) for folder, name in zip(folders, names, strict=True)]


def _file(row: dict[str, Any], folder: str, partition: Partition) -> DataFile:
    version = Version(row["size_bytes"], row["changed_ns"], row["footer"], row["etag"])
    return DataFile(join(folder, row["name"]), version, partition, row["deleted"], row["names"])


def ranges(starts: I64, stops: I64) -> I64:
    """The concatenated ranges `[start, stop)`."""
    lengths = stops - starts
    return np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)


def split(uri: str) -> tuple[str, str]:
    """Splits a path into its folder, with the options of a URI, and its name."""
    path, mark, options = uri.partition("?") if "://" in uri else (uri, "", "")
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}{mark}{options}", name


def join(folder: str, name: str) -> str:
    """The inverse of `split`."""
    path, mark, options = folder.partition("?") if "://" in folder else (folder, "", "")
    return f"{path}{name}{mark}{options}"


def folders_of(
    uris: Iterable[str], values: Iterable[Mapping[str, int | str | None]]
) -> tuple[list[int], list[str], list[tuple[str, Partition]]]:
    """The folder of each file as an index, its name, and the distinct folders."""
    numbers: dict[str, int] = {}
    folders: list[tuple[str, Partition]] = []
    folder_numbers, names = [], []
    for uri, value in zip(uris, values, strict=True):
        folder, name = split(uri)
        number = numbers.setdefault(folder, len(numbers))
        if number == len(folders):
            folders.append((folder, tuple(value.items())))
        folder_numbers.append(number)
        names.append(name)
    return folder_numbers, names, folders
