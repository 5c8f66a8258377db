"""Tables of Delta Lake and Iceberg: which version they have, and the Parquet files that one consists of.

A version never changes, so a run that names it reads the same rows whatever is written meanwhile. Rows that lists
beside the files delete (Delta's deletion vectors, Iceberg's positions) come as positions in each file, and readers
leave them out; what the libraries cannot read is refused by name. Neither library is needed for anything else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec.storage.errors import DataError, first_line
from rayrec.storage.files import NEVER, Found
from rayrec.storage.locations import Server, escaped, locate, open_filesystem, plain_path, without_secrets
from rayrec.storage.parquet import open_parquet

TableFormat = Literal["delta", "iceberg"]


@dataclass(frozen=True, slots=True)
class TableFiles:
    """The files of one version of a table.

    Args:
        hive: whether folders named `key=value` hold columns that the files lack.
        field_ids: of columns, where the table knows them by numbers: a name may have been another column's before.
        physical: of columns, what the files call them, where that is another name.
    """

    files: tuple[Found, ...]
    hive: bool
    field_ids: Mapping[str, int] = field(default_factory=dict)
    physical: Mapping[str, str] = field(default_factory=dict)


def open_table(kind: TableFormat, path: str) -> _Delta | _Iceberg:
    """Opens a table.

    Args:
        path: folder or URI of a Delta table; `iceberg://CATALOG/NAMESPACE.TABLE`, or an Iceberg `….metadata.json`.

    Raises:
        DataError: it is not there, or the library is not installed.
    """
    return _Delta(path) if kind == "delta" else _Iceberg(path)


class _Delta:
    """A Delta table; versions count its commits."""

    def __init__(self, path: str) -> None:
        try:
            import deltalake
        except ImportError as error:
            raise _needs("deltalake", "delta", path) from error
        remote = "://" in path
        self._path, self._open = path, deltalake.DeltaTable
        self._where = path.partition("?")[0] if remote else path
        self._options = Server.of(path).for_delta() if remote else None
        self._newest: int = self._at(None).version()

    def newest(self) -> int:
        return self._newest

    def files(self, version: int) -> TableFiles:
        table = self._at(version)
        metadata, deleted = table.metadata(), self._deleted(table, version)
        facts = table.get_add_actions(flatten=True)
        place, found = locate(self._path), []
        for path, size in zip(facts["path"].to_pylist(), facts["size_bytes"].to_pylist(), strict=True):
            inner = unquote(path)
            for column in metadata.partition_columns:
                if f"/{column}=" not in f"/{inner}":
                    raise _refused(self._path, version, f"keeps {path} in no folder {column}=…")
            uri = path if "://" in path else place.uri_of(f"{place.path}/{inner}")
            found.append(Found(uri, size, NEVER, deleted.pop(plain_path(uri), None)))
        if deleted:
            raise _refused(self._path, version, f"has a deletion vector for {next(iter(deleted))}, which it has not")
        fields = json.loads(table.schema().to_json())["fields"]
        physical = {one["name"]: one["metadata"].get("delta.columnMapping.physicalName") for one in fields}
        names = {name: there for name, there in physical.items() if there not in (None, name)}
        return replace(_not_empty(found, self._path, hive=True), physical=names)

    def _deleted(self, table: Any, version: int) -> dict[str, bytes]:
        """The positions of deleted rows, by file."""
        if "deletionVectors" not in (table.protocol().reader_features or ()):
            return {}
        try:
            vectors = pa.table(table.deletion_vectors())
        except Exception as error:  # its errors have no common class but this
            problem = f"has deletion vectors that cannot be read ({first_line(error)}); rewrite it (OPTIMIZE, REORG)"
            raise _refused(self._path, version, problem) from error
        paths = [plain_path(uri).removeprefix("file://") for uri in vectors["filepath"].to_pylist()]
        kept = [mask.values.to_numpy(zero_copy_only=False) for mask in vectors["selection_vector"]]
        return {path: _positions(np.flatnonzero(~mask)) for path, mask in zip(paths, kept, strict=True)}

    def _at(self, version: int | None) -> Any:
        try:
            return self._open(self._where, version=version, storage_options=self._options)
        except Exception as error:  # its errors have no common class but this
            which = "" if version is None else f" at version {version}"
            raise _cannot_open("Delta", self._path, which, error) from error


def _positions(rows: npt.NDArray[np.integer]) -> bytes:
    """As `Found.deleted` has them."""
    return np.unique(rows).astype(np.int64).tobytes()


class _Iceberg:
    """An Iceberg table; versions are ids of its snapshots."""

    def __init__(self, path: str) -> None:
        try:
            from pyiceberg.catalog import load_catalog
            from pyiceberg.table import StaticTable
            from pyiceberg.utils.config import Config
        except ImportError as error:
            raise _needs("pyiceberg", "iceberg", path) from error
        self._path, (where, _, self._options) = path, path.partition("?") if "://" in path else (path, "", "")
        try:
            if path.startswith("iceberg://"):
                catalog, _, name = path.removeprefix("iceberg://").partition("/")
                known: dict[str, Any] = dict(Config().get_catalog_config(catalog) or {})
                server = Server.of(path, known.get("s3.endpoint"), known.get("s3.region"))
                self._table: Any = load_catalog(catalog, **server.for_iceberg()).load_table(name)
                self._options = server.options()
            else:
                self._table = StaticTable.from_metadata(where, Server.of(path).for_iceberg())
        except Exception as error:  # of catalogs, file systems and formats, without a common class
            raise _cannot_open("Iceberg", path, "", error) from error

    def newest(self) -> int:
        snapshot = self._table.current_snapshot()
        if snapshot is None:
            raise DataError("the Iceberg table has no snapshot: nothing was written to it", file=self._path)
        return int(snapshot.snapshot_id)

    def files(self, version: int) -> TableFiles:
        if self._table.snapshot_by_id(version) is None:
            there = ", ".join(str(one.snapshot_id) for one in self._table.snapshots()[-5:])
            problem = f"the Iceberg table has no snapshot {version}; its last ones are {there}"
            raise DataError(
                problem, file=self._path, fix="name one of them; snapshots that expire cannot be read again"
            )
        found, scan = [], self._table.scan(snapshot_id=version)
        try:
            tasks = list(scan.plan_files())
        except ValueError as error:
            problem = f"cannot be read by pyiceberg ({first_line(error)}); rewrite it (rewrite_data_files)"
            raise _refused(self._path, version, problem) from error
        lists = {one.file_path: one for task in tasks for one in task.delete_files}
        deleted = {path: self._deleted(one) for path, one in lists.items()}
        for task in tasks:
            file = task.file
            given = (deleted[one.file_path].get(file.file_path) for one in task.delete_files)
            rows = [positions for positions in given if positions is not None]
            if file.file_format.name != "PARQUET":
                raise _refused(self._path, version, f"holds {file.file_format.name} files, as {file.file_path}")
            gone = _positions(np.concatenate(rows)) if rows else None
            found.append(Found(uri_of(file.file_path, self._options), file.file_size_in_bytes, NEVER, gone))
        # A snapshot has the schema that it was written with, and the newest one that of changes since.
        schema = self._table.schema() if version == self.newest() else scan.projection()
        field_ids = {column.name: column.field_id for column in schema.fields}
        return replace(_not_empty(found, self._path, hive=False), field_ids=field_ids)

    def _deleted(self, file: Any) -> dict[str, npt.NDArray[np.int64]]:
        """The positions that a file of deletions lists, by file."""
        uri = uri_of(file.file_path, self._options)
        if file.file_format.name == "PUFFIN":
            from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
            from pyiceberg.table.puffin import PuffinFile

            filesystem, path = open_filesystem(uri)
            with filesystem.open_input_file(path) as source:
                vectors = deletion_vectors_from_puffin_file(PuffinFile(source.read()))
            return {one.referenced_data_file: one.to_vector().to_numpy() for one in vectors}
        with open_parquet(uri) as parquet:
            table = parquet.read(["file_path", "pos"])
        paths, rows = table["file_path"].dictionary_encode().combine_chunks(), table["pos"].to_numpy()
        codes = paths.indices.to_numpy()
        return {path: rows[codes == code] for code, path in enumerate(paths.dictionary.to_pylist())}


def uri_of(path: str, options: str) -> str:
    """What an Iceberg table calls a file, as our URIs do: it writes no escapes, and of local files `file:` too.

    Args:
        options: of URIs of `s3://`.
    """
    scheme, is_uri, inner = path.partition("://")
    if not is_uri or scheme == "file":
        return path.removeprefix("file://").removeprefix("file:")
    scheme = "s3" if scheme in ("s3a", "s3n") else scheme  # as Hadoop calls it
    return f"{scheme}://{escaped(inner)}" + (f"?{options}" if options and scheme == "s3" else "")


def _not_empty(found: list[Found], path: str, hive: bool) -> TableFiles:
    if not found:
        raise DataError("this version of the table has no files", file=path, fix="name another version")
    return TableFiles(tuple(sorted(found, key=lambda one: one.uri)), hive)


def _needs(package: str, extra: str, path: str) -> DataError:
    return DataError(f"reading this table needs {package}", file=path, fix=f"pip install 'rayrec[{extra}]'")


def _refused(path: str, version: int, problem: str) -> DataError:
    fix = "convert it to a table of plain Parquet files, or read the table's rows with Ray Data and write them anew"
    return DataError(without_secrets(f"version {version} of the table {problem}"), file=path, fix=fix)


def _cannot_open(kind: str, path: str, which: str, error: Exception) -> DataError:
    problem = f"the {kind} table cannot be opened{which}: {first_line(error)}"
    fix = "check path, version, and the credentials in the environment"
    return DataError(without_secrets(problem), file=path, fix=fix)
