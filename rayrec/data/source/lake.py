"""Delta Lake and Iceberg tables: versions, and the Parquet files of a version.

A version is immutable, so a run that pins it reads the same rows despite concurrent writes. Deleted rows (Delta's
deletion vectors, Iceberg's position deletes) become positions per file, which readers skip. Features that the libraries
cannot read are refused by name. Only these tables need deltalake or pyiceberg.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec.storage.errors import DataError, first_line
from rayrec.storage.files import NEVER, Found
from rayrec.storage.locations import Server, escaped, locate, open_filesystem, plain_path
from rayrec.storage.parquet import open_parquet
from rayrec.storage.secrets import without_secrets

TableFormat = Literal["delta", "iceberg"]
# Types of partition columns by Delta's names. Values of other types are read as in plain folders.
_PARTITION_TYPES = {
    **dict.fromkeys(("byte", "short", "integer", "long"), pa.int64()),
    **dict.fromkeys(("string", "date", "timestamp", "timestamp_ntz", "boolean"), pa.string()),
}


@dataclass(frozen=True, slots=True)
class TableFiles:
    """The files of a version of a table.

    Args:
        hive: True if folders named `key=value` hold columns that the files lack.
        field_ids: ids of columns, if the table identifies columns by id; a renamed column keeps its id.
        physical: names of columns in the files, if they differ.
        partition_types: types of partition columns that the table declares as integers or strings.
        in_metadata: by URI, columns that have one value in the file, which the table's metadata holds. A file that was
            migrated from another table may lack them.
    """

    files: tuple[Found, ...]
    hive: bool
    field_ids: Mapping[str, int] = field(default_factory=dict)
    physical: Mapping[str, str] = field(default_factory=dict)
    partition_types: Mapping[str, pa.DataType] = field(default_factory=dict)
    in_metadata: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def open_table(kind: TableFormat, path: str) -> _Delta | _Iceberg:
    """Opens a table.

    Args:
        path: folder or URI of a Delta table; `iceberg://CATALOG/NAMESPACE.TABLE`, or an Iceberg `….metadata.json`.

    Raises:
        DataError: the table cannot be opened, or the library is not installed.
    """
    return _Delta(path) if kind == "delta" else _Iceberg(path)


class _Delta:
    """A Delta table; a version is the number of a commit."""

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

    def pin(self) -> int:
        """The newest version, for a run that keeps it."""
        return self._newest

    def files(self, version: int | None) -> TableFiles:
        """The files of a version; None: the newest."""
        version = self._newest if version is None else version
        table = self._at(version)
        metadata, deleted = table.metadata(), self._deleted(table, version)
        facts = table.get_add_actions(flatten=True)
        root, files = locate(self._path), []
        for path, size in zip(facts["path"].to_pylist(), facts["size_bytes"].to_pylist(), strict=True):
            inner = unquote(path)
            for column in metadata.partition_columns:
                if f"/{column}=" not in f"/{inner}":
                    raise _refused(self._path, version, f"has {path} outside a folder {column}=…")
            uri = path if "://" in path else root.uri_of(f"{root.path}/{inner}")
            files.append(Found(uri, size, NEVER, deleted.pop(plain_path(uri), None)))
        if deleted:
            raise _refused(
                self._path, version, f"has a deletion vector for {next(iter(deleted))}, which is not one of its files"
            )
        fields = json.loads(table.schema().to_json())["fields"]
        names = {name: name_in_file for name, name_in_file in _physical_names(fields) if name_in_file != name}
        kinds = {field["name"]: _PARTITION_TYPES.get(str(field["type"])) for field in fields}
        types = {name: kind for name in metadata.partition_columns if (kind := kinds[name]) is not None}
        return replace(_not_empty(files, self._path, hive=True), physical=names, partition_types=types)

    def _deleted(self, table: Any, version: int) -> dict[str, bytes]:
        """Positions of deleted rows by file."""
        if "deletionVectors" not in (table.protocol().reader_features or ()):
            return {}
        try:
            vectors = pa.table(table.deletion_vectors())
        except Exception as error:  # deltalake's errors have no common base class
            problem = f"has deletion vectors that cannot be read ({first_line(error)}); rewrite it (OPTIMIZE, REORG)"
            raise _refused(self._path, version, problem) from error
        paths = [plain_path(uri).removeprefix("file://") for uri in vectors["filepath"].to_pylist()]
        masks = [mask.values.to_numpy(zero_copy_only=False) for mask in vectors["selection_vector"]]
        return {path: _positions(np.flatnonzero(~mask)) for path, mask in zip(paths, masks, strict=True)}

    def _at(self, version: int | None) -> Any:
        try:
            return self._open(self._where, version=version, storage_options=self._options)
        except Exception as error:  # deltalake's errors have no common base class
            at_version = "" if version is None else f" at version {version}"
            raise _cannot_open("Delta", self._path, at_version, error) from error


def _positions(rows: npt.NDArray[np.integer]) -> bytes:
    """Encodes positions for `Found.deleted`."""
    return np.unique(rows).astype(np.int64).tobytes()


class _Iceberg:
    """An Iceberg table; a version is the id of a snapshot."""

    def __init__(self, path: str) -> None:
        try:
            from pyiceberg.catalog import load_catalog
            from pyiceberg.table import StaticTable
            from pyiceberg.utils.config import Config
        except ImportError as error:
            raise _needs("pyiceberg", "iceberg", path) from error
        self._path, (metadata_path, _, self._options) = path, path.partition("?") if "://" in path else (path, "", "")
        try:
            if path.startswith("iceberg://"):
                catalog, _, name = path.removeprefix("iceberg://").partition("/")
                catalog_config: dict[str, Any] = dict(Config().get_catalog_config(catalog) or {})
                server = Server.of(path, catalog_config.get("s3.endpoint"), catalog_config.get("s3.region"))
                self._table: Any = load_catalog(catalog, **server.for_iceberg()).load_table(name)
                self._options = server.options()
            else:
                self._table = StaticTable.from_metadata(metadata_path, Server.of(path).for_iceberg())
        except Exception as error:  # from catalogs, file systems and formats, without a common base class
            raise _cannot_open("Iceberg", path, "", error) from error

    def newest(self) -> int:
        snapshot = self._table.current_snapshot()
        if snapshot is None:
            raise DataError("the Iceberg table is empty: it has no snapshot", file=self._path)
        return int(snapshot.snapshot_id)

    def pin(self) -> int:
        """The newest snapshot, for a run that keeps it.

        Raises:
            DataError: two columns of the snapshot's own schema have the same name.
        """
        version = self.newest()
        now, then = self._field_ids(None), self._field_ids(version)
        if moved := [name for name in now if name in then and now[name] != then[name]]:
            problem = f"column {moved[0]!r} of the Iceberg table is another one than in its newest snapshot {version}"
            fix = f"write to the table, or set version: {version} to use the names of the snapshot"
            raise DataError(problem, file=self._path, column=moved[0], fix=fix)
        return version

    def _field_ids(self, version: int | None) -> dict[str, int]:
        """Ids of columns in the schema of a snapshot; None: in the table's current schema."""
        schema = self._table.schema() if version is None else self._table.scan(snapshot_id=version).projection()
        return dict(_ids_of_fields(schema.fields))

    def files(self, version: int | None) -> TableFiles:
        """The files of a snapshot, with the columns of its own schema: they may be renamed after a run has pinned it.

        None: the newest snapshot, with the table's current columns.
        """
        snapshot = self.newest() if version is None else version
        if self._table.snapshot_by_id(snapshot) is None:
            last_ids = ", ".join(str(item.snapshot_id) for item in self._table.snapshots()[-5:])
            problem = f"the Iceberg table has no snapshot {snapshot}; its last ones are {last_ids}"
            raise DataError(problem, file=self._path, fix="use one of them; expired snapshots cannot be read")
        files, scan = [], self._table.scan(snapshot_id=snapshot)
        try:
            tasks = list(scan.plan_files())
        except ValueError as error:
            problem = f"cannot be read by pyiceberg ({first_line(error)}); rewrite it (rewrite_data_files)"
            raise _refused(self._path, snapshot, problem) from error
        lists = {item.file_path: item for task in tasks for item in task.delete_files}
        deleted = {path: self._deleted(item) for path, item in lists.items()}
        for task in tasks:
            file = task.file
            positions_of_task = (deleted[item.file_path].get(file.file_path) for item in task.delete_files)
            rows = [positions for positions in positions_of_task if positions is not None]
            if file.file_format.name != "PARQUET":
                raise _refused(self._path, snapshot, f"has {file.file_format.name} files, e.g. {file.file_path}")
            deleted_rows = _positions(np.concatenate(rows)) if rows else None
            files.append(Found(uri_of(file.file_path, self._options), file.file_size_in_bytes, NEVER, deleted_rows))
        field_ids, in_metadata = self._field_ids(version), dict[str, tuple[str, ...]]()
        names = {field_id: name for name, field_id in field_ids.items()}
        for found, task in zip(files, tasks, strict=True):
            if partitions := tuple(names[source] for source in self._identities(task.file) if source in names):
                in_metadata[found.uri] = partitions
        return replace(_not_empty(files, self._path, hive=False), field_ids=field_ids, in_metadata=in_metadata)

    def _identities(self, file: Any) -> Iterator[int]:
        """Ids of the columns that the file is partitioned by, without nulls."""
        for number, partition in enumerate(self._table.specs()[file.spec_id].fields):
            if str(partition.transform) == "identity" and file.partition[number] is not None:
                yield partition.source_id

    def _deleted(self, file: Any) -> dict[str, npt.NDArray[np.int64]]:
        """Positions in a delete file, by data file."""
        uri = uri_of(file.file_path, self._options)
        if file.file_format.name == "PUFFIN":
            from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
            from pyiceberg.table.puffin import PuffinFile

            filesystem, path = open_filesystem(uri)
            with filesystem.open_input_file(path) as source:
                vectors = deletion_vectors_from_puffin_file(PuffinFile(source.read()))
            return {vector.referenced_data_file: vector.to_vector().to_numpy() for vector in vectors}
        with open_parquet(uri) as parquet:
            table = parquet.read(["file_path", "pos"])
        paths, rows = table["file_path"].dictionary_encode().combine_chunks(), table["pos"].to_numpy()
        codes = paths.indices.to_numpy()
        return {path: rows[codes == code] for code, path in enumerate(paths.dictionary.to_pylist())}


def _physical_names(fields: Sequence[Any], name: str = "", in_file: str = "") -> Iterator[tuple[str, str]]:
    """Names of the columns of a Delta schema in the table and in its files; of a struct, those of its fields too."""
    for column in fields:
        path, kind = name + column["name"], column["type"]
        path_in_file = in_file + column["metadata"].get("delta.columnMapping.physicalName", column["name"])
        yield path, path_in_file
        if isinstance(kind, dict) and kind["type"] == "struct":
            yield from _physical_names(kind["fields"], f"{path}.", f"{path_in_file}.")


def _ids_of_fields(fields: Sequence[Any], name: str = "") -> Iterator[tuple[str, int]]:
    """Names and ids of the columns of an Iceberg schema; of a struct, those of its fields too."""
    from pyiceberg.types import StructType

    for column in fields:
        yield name + column.name, column.field_id
        if isinstance(column.field_type, StructType):
            yield from _ids_of_fields(column.field_type.fields, f"{name}{column.name}.")


def uri_of(path: str, options: str) -> str:
    """Converts a path of an Iceberg table to a URI: escapes it, and strips `file:` from local paths.

    Args:
        options: query string for `s3://` URIs.
    """
    scheme, is_uri, inner = path.partition("://")
    if not is_uri or scheme == "file":
        return path.removeprefix("file://").removeprefix("file:")
    scheme = "s3" if scheme in ("s3a", "s3n") else scheme  # Hadoop's names of the scheme
    return f"{scheme}://{escaped(inner)}" + (f"?{options}" if options and scheme == "s3" else "")


def _not_empty(files: list[Found], path: str, hive: bool) -> TableFiles:
    if not files:
        raise DataError("this version of the table has no files", file=path, fix="set another version")
    return TableFiles(tuple(sorted(files, key=lambda file: file.uri)), hive)


def _needs(package: str, extra: str, path: str) -> DataError:
    return DataError(f"reading this table needs {package}", file=path, fix=f"pip install 'rayrec[{extra}]'")


def _refused(path: str, version: int, problem: str) -> DataError:
    fix = "convert it to a table of plain Parquet files, or rewrite its rows with Ray Data"
    return DataError(without_secrets(f"version {version} of the table {problem}"), file=path, fix=fix)


def _cannot_open(kind: str, path: str, at_version: str, error: Exception) -> DataError:
    problem = f"cannot open the {kind} table{at_version}: {first_line(error)}"
    fix = "check the path, the version, and the credentials in the environment"
    return DataError(without_secrets(problem), file=path, fix=fix)
