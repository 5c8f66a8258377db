"""Finds the files of paths, folders and globs on any file system of pyarrow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow.fs as pafs

from rayrec.storage.errors import DataError, first_line
from rayrec.storage.locations import Location, locate
from rayrec.storage.parallel import in_threads
from rayrec.storage.retries import Patience, with_patience

PARQUET = (".parquet", ".parq", ".pq")
NEVER = 0
_AT_ONCE = 16
_PATIENCE = Patience(outage_s=15.0)  # short: a command waits, and its address may be wrong
_FORMATS = {
    ".csv": "CSV",
    ".tsv": "TSV",
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON lines",
    ".avro": "Avro",
    ".orc": "ORC",
}
_COMPRESSED = ("", ".gz", ".bz2", ".zst")
_BY_SUFFIX = {
    suffix + end: kind
    for suffix, kind in _FORMATS.items()
    for end in _COMPRESSED
    if not end or kind not in ("Avro", "ORC")
}
SUFFIXES = tuple(_BY_SUFFIX)
# Text files of any kind. They are read only where they are named, because a folder may have such files beside its data.
_TEXT = tuple(suffix + end for suffix in (".txt", ".dat", ".data", ".inter") for end in _COMPRESSED)
_ONE_VERSION = "set data.train.table: {} to read one version"
_WITH_SPARK = "write the rows of one version to another folder, with Spark: spark.read{}(…).write.parquet(…)"
# Folders of metadata in the folder of a table, with the table's kind and how to read one version of it. Spark reads the
# folder of a streaming sink by its log, which leaves out the files of repeated batches.
_TABLES = {
    "_delta_log": ("a table in Delta format", _ONE_VERSION.format("delta")),
    ".hoodie": ("a table in Hudi format", _WITH_SPARK.format('.format("hudi").load')),
    "_spark_metadata": ("the output of a Spark stream", _WITH_SPARK.format(".parquet")),
}
_ICEBERG = ("a table in Iceberg format", _ONE_VERSION.format("iceberg"))


@dataclass(frozen=True, slots=True)
class Found:
    """A file in a listing.

    Args:
        uri: absolute path or URI.
        size_bytes: size when it was listed.
        changed_ns: time of the last change; `NEVER` for a file of a table, None if unknown.
        deleted: rows that its table has deleted, as int64.
    """

    uri: str
    size_bytes: int
    changed_ns: int | None = None
    deleted: bytes | None = None


def find_files(paths: str | Sequence[str], suffixes: Sequence[str] = PARQUET) -> list[Found]:
    """All files of the given files, folders (recursive) and globs (`*`, `?`, `[a-z]`, `**`), sorted.

    Folders and globs skip names that start with "." or "_" and have no "=". In a URI, `?` starts the options of the
    file system and is not a wildcard.

    Args:
        suffixes: file name suffixes to find in folders. If a folder has no Parquet files, convertible files are found.

    Raises:
        DataError: a path does not exist or has no such file, or a folder holds the files of all versions of a table.
    """
    files: dict[str, Found] = {}
    for path in [paths] if isinstance(paths, str) else paths:
        for file in _expand(path, tuple(suffixes)):
            files[file.uri] = file
    if not files:
        raise DataError("no data paths are given", fix="name at least one Parquet file or folder")
    return [files[uri] for uri in sorted(files)]


def _expand(path: str, suffixes: tuple[str, ...]) -> list[Found]:
    location = locate(path)
    info = _info(location, location.path)
    if info.type == pafs.FileType.File:
        return _found(location, [info])
    if info.type == pafs.FileType.Directory:
        contents = _below(location, location.path)
        visible = _visible(contents, location.path)
        files = [f for f in visible if f.path.endswith(suffixes)]
        if not files and suffixes == PARQUET:
            files = [f for f in visible if f.path.lower().endswith(SUFFIXES)]
        if (table := _table_of(contents) or _table_above(location)) is not None:
            kind, fix = table
            if not files:  # no rows yet, or all of them in log files
                raise DataError(f"the folder holds {kind}, and no file that can be read as it is", file=path, fix=fix)
            suffix = next((suffix for suffix in SUFFIXES + PARQUET if files[0].path.endswith(suffix)), "")
            raise DataError(
                f"the folder holds {kind}, with the files of all its versions",
                file=path,
                fix=f"{fix}, or give a pattern (…/**/*{suffix}) to read all files",
            )
        if not files:
            raise _none_of(location, suffixes)
        return _found(location, files)
    if not re.search(r"[*?\[]", location.path):
        raise _missing(location)
    base = re.split(r"[*?\[]", location.path, maxsplit=1)[0].rpartition("/")[0]
    if _info(location, base).type != pafs.FileType.Directory:
        raise _missing(location, base)
    pattern = _glob_pattern(location.path)
    files = [f for f in _visible(_below(location, base), base) if pattern.fullmatch(f.path)]
    if not files:
        raise DataError("the pattern matches no file", file=path, fix="check the pattern")
    return _found(location, files)


def _none_of(location: Location, suffixes: tuple[str, ...]) -> DataError:
    """The error of a folder without files of the expected kind."""
    names = [f.path for f in _visible(_below(location, location.path), location.path)]
    plain = [suffix for suffix in suffixes if suffix.count(".") == 1]
    kind = "Parquet file (*.parquet)" if suffixes == PARQUET else f"file that can be read (*{', *'.join(plain)})"
    if not names:
        return DataError(f"the folder is empty: it holds no {kind}", file=location.uri, fix="check the path")
    example, *rest = (path[len(location.path) :].strip("/") for path in names)
    contents = f"it has {example}{f' and {len(rest):,} more' if rest else ''}"
    text = next((path for path in names if is_unnamed_text(path)), None)
    fix = "check the path"
    if text is not None:
        fix = (
            f"name the files that hold the rows, e.g. {location.uri_of(text)}: texts are read only where they are named"
        )
    return DataError(f"the folder holds no {kind}; {contents}", file=location.uri, fix=fix)


def _found(location: Location, files: Sequence[pafs.FileInfo]) -> list[Found]:
    return [Found(location.uri_of(f.path), f.size, f.mtime_ns) for f in files]


def _missing(location: Location, folder: str | None = None) -> DataError:
    """The error of a missing path, or of the missing folder of a glob."""
    if location.bucket is not None and _info(location, location.bucket).type == pafs.FileType.NotFound:
        fix = "check its name, and the region, endpoint and credentials that the URI or the environment give"
        return DataError(f"the bucket {location.bucket!r} does not exist", file=location.uri, fix=fix)
    subject = "the path" if folder is None else f"the folder {folder!r}"
    fix = "check the path" if folder is not None else "check the path, and that every node sees it"
    if "://" in location.uri and "%" in location.uri:
        fix += "; in a URI, write a % in a name as %25"
    return DataError(f"{subject} does not exist", file=location.uri, fix=fix)


def _info(location: Location, target: str | pafs.FileSelector) -> Any:
    try:
        return location.filesystem.get_file_info(target)
    except OSError as error:
        action = "look at the path" if isinstance(target, str) else "list the folder"
        problem = f"cannot {action}: {first_line(error)}"
        raise DataError(problem, file=location.uri, fix="check access and network") from error


def _below(location: Location, base: str) -> list[pafs.FileInfo]:
    """All files in a folder, recursively, by path. Folders are listed in parallel, with retries."""

    def listed(folder: str, deep: bool) -> list[pafs.FileInfo]:
        selector = pafs.FileSelector(folder, recursive=deep)
        return list(with_patience(lambda: _info(location, selector), location.uri, _PATIENCE))

    files, folders = list[pafs.FileInfo](), [base]
    while folders:
        # Descend a level at a time until there are enough folders to list in parallel.
        deep = len(folders) >= _AT_ONCE
        infos = [info for listing in in_threads(partial(listed, deep=deep), folders) for info in listing]
        files += [info for info in infos if info.type == pafs.FileType.File]
        folders = [] if deep else [info.path for info in infos if info.type == pafs.FileType.Directory]
    return sorted(files, key=lambda info: info.path)


def _visible(files: Sequence[pafs.FileInfo], base: str) -> list[pafs.FileInfo]:
    names = ((file, file.path[len(base) :].strip("/").split("/")) for file in files)
    return [file for file, components in names if not any(map(_is_hidden, components))]


def _is_hidden(name: str) -> bool:
    """True for temporary files and metadata, by name; a partition such as `_day=1` is data."""
    return name.startswith((".", "_")) and "=" not in name


def _table_of(files: Sequence[pafs.FileInfo]) -> tuple[str, str] | None:
    """The kind of table that the files belong to, and how to read one version of it; None for plain files."""
    for file in files:
        for folder, table in _TABLES.items():
            if f"/{folder}/" in file.path:
                return table
        if "/.hoodie_partition_metadata" in file.path:  # in each partition of a Hudi table
            return _TABLES[".hoodie"]
        if "/metadata/" in file.path and file.path.endswith(".metadata.json"):
            return _ICEBERG
    return None


def _table_above(location: Location) -> tuple[str, str] | None:
    """As `_table_of`, for a partition `key=value` of a table, or the folder `data` of an Iceberg table."""
    folder, above = location.path.rstrip("/"), list[str]()
    while "=" in folder.rpartition("/")[2]:
        folder = folder.rpartition("/")[0]
        above.append(folder)
    with suppress(OSError):  # no access above the partition
        if above:
            names = [f"{parent}/{name}" for parent in above for name in _TABLES]
            infos = location.filesystem.get_file_info(names)
            for info, table in zip(infos, [*_TABLES.values()] * len(above), strict=True):
                if info.type == pafs.FileType.Directory:
                    return table
        if folder.endswith("/data"):
            metadata = pafs.FileSelector(f"{folder.removesuffix('data')}metadata", allow_not_found=True)
            if any(info.path.endswith(".metadata.json") for info in location.filesystem.get_file_info(metadata)):
                return _ICEBERG
    return None


def _glob_pattern(glob: str) -> re.Pattern[str]:
    out, end = [], 0
    for token in re.finditer(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]", glob):
        out.append(re.escape(glob[end : token.start()]))
        text = token.group()
        simple = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        out.append(simple.get(text) or ("[^" + text[2:] if text[1] in "!^" else text))
        end = token.end()
    return re.compile("".join([*out, re.escape(glob[end:])]))


def is_unnamed_text(path: str) -> bool:
    """Whether the file's name says only that it is text."""
    return path.partition("?")[0].lower().endswith(_TEXT)


def format_of(path: str) -> str | None:
    """The format of a file that can be converted to Parquet, from its name; None for other files."""
    name = path.partition("?")[0].lower() if "://" in path else path.lower()
    if name.endswith(_TEXT):
        return "CSV"  # or JSON, by its first character
    if not name.endswith(SUFFIXES):
        return None
    return next(kind for suffix, kind in _BY_SUFFIX.items() if name.endswith(suffix))
