"""Tables of Delta Lake and Iceberg: which version they have, and the Parquet files that one consists of.

A version never changes, so a run that names it reads the same rows whatever is written meanwhile. Rows that are deleted
by lists beside the files are not left out here; such a version is refused. Neither library is needed for anything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol
from urllib.parse import unquote

from rayrec.data.errors import DataError
from rayrec.data.storage.files import NEVER, Found
from rayrec.data.storage.locations import escaped, locate, without_secrets
from rayrec.data.storage.servers import Server

TableFormat = Literal["delta", "iceberg"]


@dataclass(frozen=True, slots=True)
class TableFiles:
    """The files of one version of a table.

    Args:
        hive: whether folders named `key=value` hold columns that the files lack.
        field_ids: of columns, where the table knows them by numbers: a name may have been another column's before.
    """

    files: tuple[Found, ...]
    hive: bool
    field_ids: Mapping[str, int] = field(default_factory=dict)


class LakeTable(Protocol):
    """An opened table."""

    def newest(self) -> int:
        """The version that the table has now."""

    def files(self, version: int) -> TableFiles:
        """The files of a version.

        Raises:
            DataError: no such version, or one that cannot be read file by file.
        """


def open_table(kind: TableFormat, path: str) -> LakeTable:
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
        metadata = table.metadata()
        if metadata.configuration.get("delta.columnMapping.mode", "none") != "none":
            raise _refused(self._path, version, "names columns otherwise than its files (columnMapping)")
        if "deletionVectors" in (table.protocol().reader_features or ()) and (file := _with_vector(table)):
            raise _refused(self._path, version, f"has deletion vectors, as for {file}; rewrite it (OPTIMIZE, REORG)")
        facts = table.get_add_actions(flatten=True)
        place, found = locate(self._path), []
        for path, size in zip(facts["path"].to_pylist(), facts["size_bytes"].to_pylist(), strict=True):
            inner = unquote(path)
            for column in metadata.partition_columns:
                if f"/{column}=" not in f"/{inner}":
                    raise _refused(self._path, version, f"keeps {path} in no folder {column}=…")
            found.append(Found(path if "://" in path else place.uri_of(f"{place.path}/{inner}"), size, NEVER))
        return _not_empty(found, self._path, hive=True)

    def _at(self, version: int | None) -> Any:
        try:
            return self._open(self._where, version=version, storage_options=self._options)
        except Exception as error:  # its errors have no common class but this
            which = "" if version is None else f" at version {version}"
            raise _cannot_open("Delta", self._path, which, error) from error


def _with_vector(table: Any) -> str | None:
    """A file that has a deletion vector, or what is wrong with one."""
    try:
        for batch in table.deletion_vectors():
            for uri in batch["filepath"].to_pylist():
                return str(uri)
    except Exception as error:  # one is there, but cannot be read
        return _first_line(error)
    return None


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
        for task in scan.plan_files():
            file = task.file
            if task.delete_files:
                problem = f"has delete files, as for {file.file_path}; rewrite it (rewrite_data_files)"
                raise _refused(self._path, version, problem)
            if file.file_format.name != "PARQUET":
                raise _refused(self._path, version, f"holds {file.file_format.name} files, as {file.file_path}")
            found.append(Found(uri_of(file.file_path, self._options), file.file_size_in_bytes, NEVER))
        field_ids = {column.name: column.field_id for column in scan.projection().fields}
        return replace(_not_empty(found, self._path, hive=False), field_ids=field_ids)


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
    return DataError(f"version {version} of the table {problem}", file=path, fix=fix)


def _cannot_open(kind: str, path: str, which: str, error: Exception) -> DataError:
    problem = f"the {kind} table cannot be opened{which}: {_first_line(error)}"
    return DataError(problem, file=path, fix="check path, version, and the credentials in the environment")


def _first_line(error: Exception) -> str:
    lines: Sequence[str] = str(error).strip().splitlines()
    return without_secrets(lines[0]) if lines else type(error).__name__
