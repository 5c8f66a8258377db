"""Finds the files that paths, folders and globs stand for, on any file system pyarrow knows.

Which file system a URI means, and how to name files on it, is `locations.py`'s matter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
_PATIENCE = Patience(outage_s=15.0)  # a launch waits, and not for long: its address may be wrong
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


@dataclass(frozen=True, slots=True)
class Found:
    """A file: how to name it (`uri`, absolute), how many bytes it had, and when it was last changed: `NEVER` for a file
    of a table, None where that is not known; `deleted`: which of its rows a table does not have any more, as int64."""

    uri: str
    size_bytes: int
    changed_ns: int | None = None
    deleted: bytes | None = None


def find_files(paths: str | Sequence[str], suffixes: Sequence[str] = PARQUET) -> list[Found]:
    """All files of the given files, folders (searched below) and globs (`*`, `?`, `[a-z]`, `**`), sorted.

    Names that start with "." or "_" are passed over inside folders and by globs. In a URI `?` begins the options of the
    file system and is no wildcard.

    Args:
        suffixes: which files of a folder are taken; where it has no Parquet, those that can be converted.

    Raises:
        DataError: a path that does not exist, or one that holds no such file.
    """
    found: dict[str, Found] = {}
    for path in [paths] if isinstance(paths, str) else paths:
        for file in _expand(path, tuple(suffixes)):
            found[file.uri] = file
    if not found:
        raise DataError("no data paths are given", fix="name at least one Parquet file or folder")
    return [found[uri] for uri in sorted(found)]


def _expand(path: str, suffixes: tuple[str, ...]) -> list[Found]:
    place = locate(path)
    info = _info(place, place.path)
    if info.type == pafs.FileType.File:
        return _found(place, [info])
    if info.type == pafs.FileType.Directory:
        below = _below(place, place.path)
        seen = _visible(below, place.path)
        files = [f for f in seen if f.path.endswith(suffixes)]
        if not files and suffixes == PARQUET:
            files = [f for f in seen if format_of(f.path)]
        if files and suffixes == PARQUET and (kind := _table_of(below)) is not None:
            raise DataError(
                f"the folder holds a table of {kind}: files of all its versions lie in it",
                file=path,
                fix=f"set table: {kind.lower()} beside data.train.path, which reads one version; or name files by a "
                "pattern (…/**/*.parquet) to have them all",
            )
        if not files:
            raise _none_of(place, suffixes)
        return _found(place, files)
    if not re.search(r"[*?\[]", place.path):
        raise _missing(place)
    base = re.split(r"[*?\[]", place.path, maxsplit=1)[0].rpartition("/")[0]
    if _info(place, base).type != pafs.FileType.Directory:
        raise _missing(place, base)
    pattern = _glob_pattern(place.path)
    files = [f for f in _visible(_below(place, base), base) if pattern.fullmatch(f.path)]
    if not files:
        raise DataError("the pattern matches no file", file=path, fix="check the pattern")
    return _found(place, files)


def _none_of(place: Location, suffixes: tuple[str, ...]) -> DataError:
    """The error of a folder without files of the wanted kind."""
    there = [f.path for f in _visible(_below(place, place.path), place.path)]
    plain = [suffix for suffix in suffixes if suffix.count(".") == 1]
    wanted = "Parquet file (*.parquet)" if suffixes == PARQUET else f"file that can be read (*{', *'.join(plain)})"
    if not there:
        return DataError(f"the folder is empty: it holds no {wanted}", file=place.uri, fix="check the path")
    first, *more = (path[len(place.path) :].strip("/") for path in there)
    seen = f"it has {first}{f' and {len(more):,} more' if more else ''}"
    return DataError(f"the folder holds no {wanted}; {seen}", file=place.uri, fix="check the path")


def _found(place: Location, files: Sequence[pafs.FileInfo]) -> list[Found]:
    return [Found(place.uri_of(f.path), f.size, f.mtime_ns) for f in files]


def _missing(place: Location, folder: str | None = None) -> DataError:
    """The error of a path that is not there, or of the folder of a glob."""
    if place.bucket is not None and _info(place, place.bucket).type == pafs.FileType.NotFound:
        fix = "check its name, and the region, endpoint and credentials that the URI or the environment give"
        return DataError(f"the bucket {place.bucket!r} does not exist", file=place.uri, fix=fix)
    what = "the path" if folder is None else f"the folder {folder!r}"
    fix = "check the path" if folder is not None else "check the path, and that every node sees it"
    if "://" in place.uri and "%" in place.uri:
        fix += "; in a URI a % of the name itself is written %25"
    return DataError(f"{what} does not exist", file=place.uri, fix=fix)


def _info(place: Location, wanted: str | pafs.FileSelector) -> Any:
    try:
        return place.filesystem.get_file_info(wanted)
    except OSError as error:
        what = "look at the path" if isinstance(wanted, str) else "list the folder"
        problem = f"cannot {what}: {first_line(error)}"
        raise DataError(problem, file=place.uri, fix="check access and network") from error


def _below(place: Location, base: str) -> list[pafs.FileInfo]:
    """The files below a folder, by path. Folders are listed side by side, and again where their storage was busy."""

    def listed(folder: str, deep: bool) -> list[pafs.FileInfo]:
        selector = pafs.FileSelector(folder, recursive=deep)
        return list(with_patience(lambda: _info(place, selector), place.uri, _PATIENCE))

    found, folders = list[pafs.FileInfo](), [base]
    while folders:
        deep = len(folders) >= _AT_ONCE  # else one level more, until there are enough to share
        infos = [info for some in in_threads(partial(listed, deep=deep), folders) for info in some]
        found += [info for info in infos if info.type == pafs.FileType.File]
        folders = [] if deep else [info.path for info in infos if info.type == pafs.FileType.Directory]
    return sorted(found, key=lambda info: info.path)


def _visible(files: Sequence[pafs.FileInfo], base: str) -> list[pafs.FileInfo]:
    below = ((file, file.path[len(base) :].strip("/").split("/")) for file in files)
    return [file for file, parts in below if not any(part.startswith((".", "_")) for part in parts)]


def _table_of(files: Sequence[pafs.FileInfo]) -> str | None:
    """Which tables lie among the files, if any do."""
    for file in files:
        if "/_delta_log/" in file.path:
            return "Delta"
        if "/metadata/" in file.path and file.path.endswith(".metadata.json"):
            return "Iceberg"
    return None


def _glob_pattern(glob: str) -> re.Pattern[str]:
    out, at = [], 0
    for token in re.finditer(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]", glob):
        out.append(re.escape(glob[at : token.start()]))
        text = token.group()
        simple = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        out.append(simple.get(text) or ("[^" + text[2:] if text[1] in "!^" else text))
        at = token.end()
    return re.compile("".join([*out, re.escape(glob[at:])]))


def format_of(path: str) -> str | None:
    """The format that can be converted to Parquet, by the file's name."""
    name = path.partition("?")[0].lower() if "://" in path else path.lower()
    return next((kind for suffix, kind in _BY_SUFFIX.items() if name.endswith(suffix)), None)
