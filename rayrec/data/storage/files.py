"""Finds the files that paths, folders and globs stand for, on any file system pyarrow knows.

Which file system a URI means, and how to name files on it, is `locations.py`'s matter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow.fs as pafs

from rayrec.data.errors import DataError
from rayrec.data.storage.formats import format_of, how_to_convert
from rayrec.data.storage.locations import Location, locate

PARQUET = (".parquet", ".parq", ".pq")
NEVER = 0


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
        suffixes: which files of a folder are taken.

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
        files = [f for f in _visible(below, place.path) if f.path.endswith(suffixes)]
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
    others = [path for path in there if format_of(path)]
    first, *more = (path[len(place.path) :].strip("/") for path in others or there)
    seen = f"it has {first}{f' and {len(more):,} more' if more else ''}"
    fix = how_to_convert(place.uri) if others and suffixes == PARQUET else "check the path"
    return DataError(f"the folder holds no {wanted}; {seen}", file=place.uri, fix=fix)


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


def _info(place: Location, path: str) -> pafs.FileInfo:
    try:
        return place.filesystem.get_file_info(path)
    except OSError as error:
        fix = "check access and network"
        raise DataError(f"cannot look at the path: {_first_line(error)}", file=place.uri, fix=fix) from error


def _below(place: Location, base: str) -> list[pafs.FileInfo]:
    try:
        infos = place.filesystem.get_file_info(pafs.FileSelector(base, recursive=True))
    except OSError as error:
        fix = "check access and network"
        raise DataError(f"cannot list the folder: {_first_line(error)}", file=place.uri, fix=fix) from error
    return [i for i in infos if i.type == pafs.FileType.File]


def _visible(files: Sequence[pafs.FileInfo], base: str) -> list[pafs.FileInfo]:
    return [f for f in files if not _hidden(f.path[len(base) :])]


def _table_of(files: Sequence[pafs.FileInfo]) -> str | None:
    """Which tables lie among the files, if any do."""
    for file in files:
        if "/_delta_log/" in file.path:
            return "Delta"
        if "/metadata/" in file.path and file.path.endswith(".metadata.json"):
            return "Iceberg"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
