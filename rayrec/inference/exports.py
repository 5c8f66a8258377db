"""Exports as folders of this node: checked once for all of its processes, and copied here once from object storage."""

from __future__ import annotations

import fcntl
import hashlib
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow.fs as pafs

from rayrec.inference import ExportError
from rayrec.inference.artifact import INDEX, Index, check_listed, read_index
from rayrec.storage.cache import CACHE_BYTES, Cache, Held
from rayrec.storage.errors import first_line
from rayrec.storage.folder import Folder, open_folder
from rayrec.storage.locations import cache_folder, open_filesystem

CURRENT = "current"
Files = tuple[tuple[str, int, int], ...]
_CHUNK_BYTES = 16 << 20
_KEPT_MARKS = 1000


class Exports:
    """What a path or URI stands for: an export; or, of a folder of exports, the one that a file `current` names, else
    the last by name, whose numbers count as numbers: v10 is after v9, and 20260201-120000 after 20260131-235959.

    Copies of exports in object storage lie in the user's cache folder, named by what their index lists; those that
    were opened longest ago are removed to make room, never one that a process of this node holds.

    Args:
        cache_bytes: that copies may take on this node.
    """

    def __init__(self, place: Path | str, cache_bytes: int = CACHE_BYTES) -> None:
        self.place, self._there, self._cache_bytes = place, open_folder(place), cache_bytes

    def newest(self) -> Folder:
        """The export that is to be served, where it lies.

        Raises:
            ExportError: there is none, or it cannot be looked for.
        """
        try:
            names = self._there.names()
            if INDEX in names:
                return self._there
            if CURRENT in names:
                named = self._there.read(CURRENT).decode("utf-8", "replace").strip().rstrip("/")
                if named not in names:
                    raise ExportError(f"{self.place}: {CURRENT} names {named!r}, which is outside it or not there")
                return self._there.sub(named)
            return self._there.sub(next(self.names()))
        except OSError as error:
            raise ExportError(f"{self.place} cannot be read: {first_line(error)}") from error
        except StopIteration:
            fix = "make one with `rayrec export RUN OUT`"
            raise ExportError(f"{self.place} holds no export, neither {INDEX} nor a folder with one: {fix}") from None

    def names(self) -> Iterator[str]:
        """The exports in a folder, the newest first; without its index, one is still being written."""
        for name in sorted(self._there.names(), key=_order, reverse=True):
            with suppress(NotADirectoryError):
                if INDEX in self._there.sub(name).names():
                    yield name

    def open(self, export: Folder) -> Held:
        """Checks an export, or makes a copy of it that is checked; what this node has done already is not done again.

        Raises:
            ExportError: it is damaged, or there is no room for its copy.
        """
        if not export.remote:
            folder = Path(export.path).resolve()
            _check_once(folder)
            return Held(folder)
        try:
            return self._copy(export)
        except OSError as error:
            raise ExportError(
                f"{export.path} cannot be copied to {cache_folder('exports')}: {first_line(error)}"
            ) from error

    def _copy(self, there: Folder) -> Held:
        data = there.read(INDEX)
        files, name = Index.parse(data, there.sub(INDEX).path).files, hashlib.sha256(data).hexdigest()[:32]
        needed = sum(size for size, _ in files.values())

        def copied(folder: Path, room: int) -> str:
            if needed > room:
                raise ExportError(
                    f"an export of {needed:,} bytes has no room in {cache.root}: cache_bytes is {self._cache_bytes:,}, "
                    f"and exports that are served take {self._cache_bytes - room:,}; raise cache_bytes"
                )
            for file, (size, crc) in files.items():
                _copy_file(there, file, folder, size, crc)
            (folder / INDEX).write_bytes(data)
            return name

        cache = Cache(cache_folder("exports"), self._cache_bytes)
        return cache.folder(name, needed, copied)


def version_of(export: Folder) -> str:
    """The name of an export; raises ExportError where its index cannot be read."""
    return Index.parse(export.read(INDEX), export.sub(INDEX).path).version


def files_of(export: Folder) -> Files:
    """Every file's path, bytes, and time of its last change."""
    filesystem, inner = open_filesystem(export.path)
    found = filesystem.get_file_info(pafs.FileSelector(inner, recursive=True))
    return tuple((info.path, info.size or 0, info.mtime_ns or 0) for info in found)


def _order(name: str) -> tuple[Sequence[str | int], str]:
    """Text and numbers of a name in turn; then the name, for v01 and v1."""
    parts: list[str | int] = [*re.split("([0-9]+)", name)]
    parts[1::2] = map(int, parts[1::2])
    return parts, name


def _copy_file(there: Folder, name: str, part: Path, size: int, crc: int) -> None:
    path, found, at = part / name, 0, 0
    if not path.resolve().is_relative_to(part.resolve()):
        raise ExportError(f"{there.path} lists {name!r}, which is outside the folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = memoryview(bytearray(min(size, _CHUNK_BYTES) or 1))
    with there.open(name) as source, open(path, "wb") as file:
        while read := source.read_into(at, buffer):
            found, at = zlib.crc32(buffer[:read], found), at + read
            file.write(buffer[:read])
    if (at, found) != (size, crc):
        raise ExportError(f"{there.path}: {name} is not what its index lists; copy it again, or export anew")


def _check_once(folder: Path) -> None:
    """That an export is whole; its checksums are computed once on this node, until one of its files changes.

    Raises:
        ExportError: it is not.
    """
    index = read_index(folder)
    check_listed(folder, index.files, checksums=False)
    stats = [(name, (folder / name).stat()) for name in (INDEX, *index.files)]
    state = repr([(name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats])
    mark = cache_folder("checked") / hashlib.sha256(state.encode()).hexdigest()[:32]
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        turn = open(mark, "a+")  # noqa: SIM115 (closed below)
    except OSError:  # nothing can be kept here
        check_listed(folder, index.files)
        return
    with turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        turn.seek(0)
        if not turn.read():
            check_listed(folder, index.files)
            turn.write(f"{folder}\n")
    marks = sorted(mark.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for old in marks[:-_KEPT_MARKS]:
        old.unlink(missing_ok=True)
