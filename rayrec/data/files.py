"""Finds the files that paths, folders and globs stand for, on any file system pyarrow knows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs

from rayrec.data.errors import DataError

SUFFIXES = (".parquet", ".parq", ".pq")


@dataclass(frozen=True, slots=True)
class Found:
    """A file: how to name it (`uri`, absolute) and how many bytes it had."""

    uri: str
    size_bytes: int


def open_filesystem(uri: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a path or URI, and the path inside it.

    Raises:
        DataError: a scheme that pyarrow does not know, or credentials it cannot use.
    """
    if "://" not in uri:
        return pafs.LocalFileSystem(), str(Path(uri).expanduser().absolute())
    try:
        return pafs.FileSystem.from_uri(uri)
    except (pa.ArrowException, OSError, ValueError) as error:
        fix = "check the URI's scheme, and that credentials are there"
        raise DataError(f"cannot open this file system: {error}", file=uri, fix=fix) from error


def find_files(paths: str | Sequence[str]) -> list[Found]:
    """All Parquet files of the given files, folders (searched below) and globs (`*`, `?`, `[a-z]`, `**`), sorted.

    Names that start with "." or "_" are passed over inside folders and by globs.

    Raises:
        DataError: a path that does not exist, or one that holds no Parquet file.
    """
    found: dict[str, Found] = {}
    for path in [paths] if isinstance(paths, str) else paths:
        for file in _expand(path):
            found[file.uri] = file
    if not found:
        raise DataError("no data paths are given", fix="name at least one Parquet file or folder")
    return [found[uri] for uri in sorted(found)]


def _expand(path: str) -> list[Found]:
    filesystem, inner = open_filesystem(path)
    prefix = path[: len(path) - len(inner)] if "://" in path and path.endswith(inner) else ""
    if "://" in path and not prefix:
        prefix = path.split("://", 1)[0] + "://"
    info = _info(filesystem, inner, path)
    if info.type == pafs.FileType.File:
        return [Found(prefix + info.path, info.size)]
    if info.type == pafs.FileType.Directory:
        files = [f for f in _below(filesystem, inner, path) if f.path.endswith(SUFFIXES)]
        if not files:
            raise DataError("the folder holds no Parquet file (*.parquet)", file=path, fix="check the path")
        return [Found(prefix + f.path, f.size) for f in files]
    if not re.search(r"[*?\[]", inner):
        raise DataError("the path does not exist", file=path, fix="check the path, and that every node sees it")
    base = re.split(r"[*?\[]", inner, maxsplit=1)[0].rpartition("/")[0]
    if _info(filesystem, base, path).type != pafs.FileType.Directory:
        raise DataError(f"the folder {base!r} does not exist", file=path, fix="check the path")
    pattern = _glob_pattern(inner)
    files = [f for f in _below(filesystem, base, path) if pattern.fullmatch(f.path)]
    if not files:
        raise DataError("the pattern matches no file", file=path, fix="check the pattern")
    return [Found(prefix + f.path, f.size) for f in files]


def _info(filesystem: pafs.FileSystem, inner: str, path: str) -> pafs.FileInfo:
    try:
        return filesystem.get_file_info(inner)
    except OSError as error:
        raise DataError(f"cannot look at the path: {error}", file=path, fix="check access and network") from error


def _below(filesystem: pafs.FileSystem, base: str, path: str) -> list[pafs.FileInfo]:
    try:
        infos = filesystem.get_file_info(pafs.FileSelector(base, recursive=True))
    except OSError as error:
        raise DataError(f"cannot list the folder: {error}", file=path, fix="check access and network") from error
    return [i for i in infos if i.type == pafs.FileType.File and not _hidden(i.path[len(base) :])]


def _hidden(below: str) -> bool:
    return any(part.startswith((".", "_")) for part in below.strip("/").split("/"))


def _glob_pattern(glob: str) -> re.Pattern[str]:
    out, at = [], 0
    for token in re.finditer(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]", glob):
        out.append(re.escape(glob[at : token.start()]))
        text = token.group()
        simple = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        out.append(simple.get(text) or ("[^" + text[2:] if text[1] in "!^" else text))
        at = token.end()
    return re.compile("".join([*out, re.escape(glob[at:])]))
