"""Stores the facts of footers in an index file: of a run for its next launch, or by `rayrec data index` for all runs.

A run reads only the footers that are in no index, or that changed with their files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.arrays.buffers import I64
from rayrec.data.source.file_table import split
from rayrec.storage.errors import DataError
from rayrec.storage.files import Found
from rayrec.storage.folder import open_folder
from rayrec.storage.locations import open_filesystem
from rayrec.storage.struct_fields import has_structs

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
    """Facts of files that were read earlier, and of files read now.

    Facts are valid while the size and modification time of the file do not change.

    Args:
        path: path or URI for `save`; None: nothing is stored.
        shared: further index files, read only.
    """

    path: str | None = None
    shared: Sequence[str] = ()
    _known: pa.Table = field(default_factory=lambda: _load(None))
    _own: int = 0  # number of rows from the file at `path`; they come first
    _used: set[int] = field(default_factory=set)
    _new: list[pa.Table] = field(default_factory=list)

    @classmethod
    def open(cls, path: str | Path | None, shared: Sequence[str] = ()) -> FooterIndex:
        """Reads the index files; ignores missing and damaged ones."""
        index = cls(None if path is None else str(path))
        index._known = _load(index.path)
        index._own = len(index._known)
        return index.also(shared)

    def also(self, shared: Sequence[str]) -> FooterIndex:
        """Also reads these index files."""
        for path in shared:
            if path not in self.shared:
                self.shared = [*self.shared, path]
                with suppress(pa.ArrowException):  # types of statistics differ: an index of another data set
                    self._known = pa.concat_tables([self._known, _load(path)], promote_options="default")
        return self

    def known(self, files: Sequence[Found], statistics: Collection[str] | None) -> tuple[I64, pa.Table]:
        """Positions in `files` of the known files, and their facts in that order.

        Args:
            statistics: columns that need statistics; None: all available ones.
        """
        candidates = _with_statistics(self._known, statistics)
        sizes = pa.array([file.size_bytes for file in files], pa.int64())
        times = pa.array([-1 if file.changed_ns is None else file.changed_ns for file in files], pa.int64())
        keys = _keys(pa.array([_key(file.uri) for file in files], pa.string()), sizes, times)
        candidate_versions = self._known.select(["size_bytes", "changed_ns"]).take(pa.array(candidates))
        matches = pc.index_in(
            keys, value_set=_keys(_uris(self._known).take(pa.array(candidates)), *candidate_versions.columns)
        )
        positions, rows = np.flatnonzero(matches.is_valid()), candidates[matches.drop_null().to_numpy()]
        self._used.update(rows[rows < self._own].tolist())
        names = [name.removeprefix(LOW) for name in self._known.column_names if name.startswith(LOW)]
        statistics_columns = [side + name for name in statistics or names for side in (LOW, HIGH)]
        facts = self._known.select(
            [*FACTS.names, *(name for name in statistics_columns if name in self._known.column_names)]
        )
        return positions, facts.take(pa.array(rows))

    def add(self, files: Sequence[Found], facts: pa.Table) -> None:
        """Adds the facts of files read now."""
        if self.path is None:
            return
        has_time = np.array([file.changed_ns is not None for file in files])
        pairs = [split(file.uri) for file in files]
        folders = pa.array([folder for folder, _ in pairs]).dictionary_encode()
        table = facts.append_column(_FILES.field(0), folders)
        table = table.append_column(_FILES.field(1), pa.array([name for _, name in pairs]))
        self._new.append(table.filter(pa.array(has_time)))

    def save(self) -> bool:
        """Writes the facts that were requested or added, if they changed. Returns False if that failed."""
        new = [table for table in self._new if len(table)]
        if self.path is None or (not new and len(self._used) in (0, self._own)):
            return True
        requested = [self._known.take(pa.array(sorted(self._used)))] if self._used else []
        table = pa.concat_tables([*requested, *new], promote_options="default")
        return _write(table.unify_dictionaries(), self.path)


def index_file(path: str) -> str:
    """The path of the index of a folder; for a glob, of its fixed leading folder."""
    path_part, mark, options = path.partition("?") if "://" in path else (path, "", "")
    fixed = path_part
    if any(sign in path_part for sign in "*["):
        fixed = path_part[: min(path_part.index(sign) for sign in "*[" if sign in path_part)].rpartition("/")[0]
    return f"{fixed.rstrip('/')}/{INDEX_NAME}{mark}{options}"


def _with_statistics(table: pa.Table, columns: Collection[str] | None) -> I64:
    """Rows with statistics of all these columns."""
    complete = np.ones(len(table), np.bool_)
    for name in columns or ():
        if LOW + name not in table.column_names:
            return np.empty(0, np.int64)
        complete &= table[LOW + name].is_valid().to_numpy()
    return np.flatnonzero(complete)


def _key(uri: str) -> str:
    return uri.partition("?")[0] if "://" in uri else uri


def _uris(table: pa.Table) -> pa.ChunkedArray:
    """The URIs of the files, without options."""
    folders = pa.chunked_array(table["folder"].unify_dictionaries()).combine_chunks()
    folders = folders.chunk(0) if isinstance(folders, pa.ChunkedArray) else folders
    bare = pa.array([_key(folder) for folder in folders.dictionary.to_pylist()], pa.string())
    return pc.binary_join_element_wise(bare.take(folders.indices), table["name"], "")


def _keys(uris: Any, sizes: Any, times: Any) -> Any:
    return pc.binary_join_element_wise(uris, sizes.cast(pa.string()), times.cast(pa.string()), "\0")


def _load(path: str | None) -> pa.Table:
    """Reads an index file; an empty table if it is missing or damaged."""
    expected = pa.schema([*FACTS, *_FILES])
    if path is None:
        return expected.empty_table()
    try:
        filesystem, inner = open_filesystem(path)
        with filesystem.open_input_file(inner) as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()
            table.validate()
    except (pa.ArrowException, OSError, DataError):
        return expected.empty_table()
    kinds = {field.name: field.type for field in table.schema}
    if any(kinds.get(field.name) != field.type for field in expected):
        return expected.empty_table()
    return _without_structs(table)


def _without_structs(table: pa.Table) -> pa.Table:
    """Leaves out files whose facts are of structs, as older versions wrote them, and not of the structs' fields."""
    codes, schemas = schemas_of(table)
    old = np.array([has_structs(arrow) for arrow in schemas], np.bool_)
    return table.filter(pa.array(~old[codes])) if old.any() else table


def schemas_of(facts: pa.Table) -> tuple[I64, list[pa.Schema]]:
    """The index of each file's schema, and the distinct schemas."""
    column = facts["schema"].unify_dictionaries().combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    schemas = [pa.ipc.read_schema(pa.BufferReader(raw)) for raw in column.dictionary.to_pylist()]
    return column.indices.to_numpy().astype(np.int64), schemas


def _write(table: pa.Table, path: str) -> bool:
    try:
        sink, options = pa.BufferOutputStream(), pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(sink, table.schema, options=options) as writer:
            writer.write_table(table.combine_chunks())
        folder, name = split(path)
        if "://" not in folder and not Path(folder).is_dir():
            return False  # do not create the folder
        open_folder(folder).write(name, memoryview(sink.getvalue()))
    except (pa.ArrowException, OSError, DataError):
        return False
    return True
