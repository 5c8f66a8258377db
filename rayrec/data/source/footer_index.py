"""What footers said, kept in a file: by a run for its next launch, or by `rayrec data index` for everybody.

A run reads only the footers that no index holds, or whose files changed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from rayrec.data.errors import DataError
from rayrec.data.source.file_table import I64, split
from rayrec.data.storage.files import Found
from rayrec.data.storage.locations import open_filesystem

INDEX_NAME = "_rayrec_index.arrow"
LOW, HIGH = "low ", "high "

FACTS = pa.schema(
    [
        ("size_bytes", pa.int64()),
        ("changed_ns", pa.int64()),
        ("footer", pa.int64()),
        ("etag", pa.int64()),
        ("schema", pa.dictionary(pa.int32(), pa.binary())),
        ("group_rows", pa.list_(pa.int64())),
        ("column_bytes", pa.list_(pa.float32())),
    ]
)
_FILES = pa.schema([("folder", pa.dictionary(pa.int32(), pa.string())), ("name", pa.string())])


@dataclass(slots=True)
class FooterIndex:
    """The facts of files that were read before, and of those that are read now.

    Facts count as long as the file's bytes and time of change are the same.

    Args:
        path: of the file that `save` writes, a path or URI; None keeps nothing beyond this process.
        shared: further index files, that are only read.
    """

    path: str | None = None
    shared: Sequence[str] = ()
    _kept: list[pa.Table] = field(default_factory=list)
    _used: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    _new: list[pa.Table] = field(default_factory=list)

    @classmethod
    def open(cls, path: str | Path | None, shared: Sequence[str] = ()) -> FooterIndex:
        """What the files hold; nothing where one is missing or damaged."""
        index = cls(None if path is None else str(path))
        if path is not None:
            index._load(str(path))
        return index.also(shared)

    def also(self, shared: Sequence[str]) -> FooterIndex:
        """Reads further index files."""
        for one in shared:
            if one not in self.shared:
                self.shared = [*self.shared, one]
                self._load(one)
        return self

    def _load(self, path: str) -> None:
        self._kept.append(_load(path))
        self._used.append(np.zeros(len(self._kept[-1]), np.bool_))

    def known(self, found: Sequence[Found], statistics: Collection[str] | None) -> tuple[I64, pa.Table]:
        """Places of the files that are known, and their facts in that order.

        Args:
            statistics: columns whose statistics must be known too; None: all that some file has.
        """
        if not self._kept or not any(map(len, self._kept)):
            return np.empty(0, np.int64), _empty(FACTS)
        keys = pa.array([_key(file.uri) for file in found])
        sizes = np.array([file.size_bytes for file in found])
        times = np.array([-1 if file.changed_ns is None else file.changed_ns for file in found])
        left = np.ones(len(found), np.bool_)
        places: list[I64] = []
        tables: list[pa.Table] = []
        for table, used in zip(self._kept, self._used, strict=True):
            there = _with_statistics(table, statistics)
            at = pc.index_in(keys, value_set=_keys(table.take(pa.array(there))))
            rows = at.fill_null(-1).to_numpy()
            hit = left & (rows >= 0)
            rows = np.where(hit, there[rows] if len(there) else 0, 0)
            if len(there):
                hit &= table["size_bytes"].to_numpy()[rows] == sizes
                hit &= table["changed_ns"].to_numpy()[rows] == times
            chosen = np.flatnonzero(hit)
            used[rows[chosen]] = True
            left &= ~hit
            wanted = [name for c in statistics or _statistics(table) for name in (LOW + c, HIGH + c)]
            places.append(chosen)
            tables.append(table.select([*FACTS.names, *wanted]).take(pa.array(rows[chosen])) if len(chosen) else None)
        some = [table for table in tables if table is not None]
        if not some:
            return np.empty(0, np.int64), _empty(FACTS)
        return np.concatenate(places), pa.concat_tables(some, promote_options="default")

    def add(self, found: Sequence[Found], facts: pa.Table) -> None:
        """Facts that were read now."""
        if self.path is None:
            return
        known = np.array([file.changed_ns is not None for file in found])
        pairs = [split(file.uri) for file in found]
        folders = pa.array([folder for folder, _ in pairs]).dictionary_encode()
        table = facts.append_column(_FILES.field(0), folders)
        table = table.append_column(_FILES.field(1), pa.array([name for _, name in pairs]))
        self._new.append(table.filter(pa.array(known)))

    def save(self) -> bool:
        """Writes what was requested and read, unless the file holds just that; returns whether it succeeded."""
        if self.path is None or not self._used:
            return True
        new, kept, used = [table for table in self._new if len(table)], self._kept[0], self._used[0]
        if not new and (used.all() or not used.any()):
            return True
        tables = [kept.filter(pa.array(used)), *new] if used.any() else new
        table = pa.concat_tables(tables, promote_options="default")
        return _write(table.unify_dictionaries(), self.path)


def index_file(path: str) -> str:
    """Where the index of a folder lies; of a glob that of the folder that it looks in."""
    before, mark, options = path.partition("?") if "://" in path else (path, "", "")
    fixed = before
    if any(sign in before for sign in "*["):
        fixed = before[: min(before.index(sign) for sign in "*[" if sign in before)].rpartition("/")[0]
    return f"{fixed.rstrip('/')}/{INDEX_NAME}{mark}{options}"


def _statistics(table: pa.Table) -> list[str]:
    return [name.removeprefix(LOW) for name in table.column_names if name.startswith(LOW)]


def _with_statistics(table: pa.Table, columns: Collection[str] | None) -> I64:
    """Rows that hold the statistics of these columns."""
    there = np.ones(len(table), np.bool_)
    for name in columns or ():
        if LOW + name not in table.column_names:
            return np.empty(0, np.int64)
        there &= table[LOW + name].is_valid().to_numpy()
    return np.flatnonzero(there)


def _key(uri: str) -> str:
    return uri.partition("?")[0] if "://" in uri else uri


def _keys(table: pa.Table) -> pa.ChunkedArray:
    folders = table["folder"].combine_chunks()
    if isinstance(folders, pa.ChunkedArray):
        folders = pa.concat_arrays(folders.chunks)
    bare = pa.array([_key(folder) for folder in folders.dictionary.to_pylist()], pa.string())
    return pc.binary_join_element_wise(bare.take(folders.indices), table["name"], "")


def _empty(schema: pa.Schema) -> pa.Table:
    return schema.empty_table()


def _load(path: str) -> pa.Table:
    wanted = pa.schema([*FACTS, *_FILES])
    try:
        filesystem, inner = open_filesystem(path)
        with filesystem.open_input_file(inner) as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()
            table.validate()
    except (pa.ArrowException, OSError, DataError):
        return _empty(wanted)
    kinds = {field.name: field.type for field in table.schema}
    return table if all(kinds.get(field.name) == field.type for field in wanted) else _empty(wanted)


def _write(table: pa.Table, path: str) -> bool:
    try:
        filesystem, inner = open_filesystem(path)
        local = isinstance(filesystem, pafs.LocalFileSystem)
        folder, _, name = inner.rpartition("/")
        partial = f"{folder}/.{name}.{uuid4().hex}.part" if local else inner  # others may write the same index now
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        try:
            with (
                filesystem.open_output_stream(partial) as sink,
                pa.ipc.new_file(sink, table.schema, options=options) as w,
            ):
                w.write_table(table.combine_chunks())
            if local:
                Path(partial).replace(inner)
        except OSError:
            if local:
                Path(partial).unlink(missing_ok=True)
            raise
    except (pa.ArrowException, OSError, DataError):
        return False
    return True
