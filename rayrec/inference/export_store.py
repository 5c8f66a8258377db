"""Exports on this node: checked once per node, and copied once per node from object storage."""

from __future__ import annotations

import fcntl
import hashlib
import re
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pyarrow.fs as pafs

from rayrec.inference.artifact import INDEX, ExportError, ExportIndex, check_listed, read_index
from rayrec.inference.delta import DELTA, NEW_INDEX, Delta, apply_deltas
from rayrec.storage.cache import CACHE_BYTES, Cache, Held
from rayrec.storage.errors import first_line
from rayrec.storage.folder import Folder, open_folder
from rayrec.storage.locations import cache_folder, open_filesystem

CURRENT = "current"
Files = tuple[tuple[str, int, int], ...]
_CHUNK_BYTES = 16 << 20
_MAX_MARKS = 1000


class _Entry(NamedTuple):
    """An export, or a delta.

    Args:
        version: Of the export, or of the one that the delta makes.
        made: Where the export that the delta makes is on this node.
    """

    version: str
    delta: Delta | None = None
    made: Path | None = None


class ExportStore:
    """An export, or a folder of exports and deltas (`delta.py`).

    A delta is opened as the export that it makes of its parent. A node makes it once, in its cache folder. The newest
    one without a gap before it is taken.

    The newest export of a folder is named in its file `current`, or else is the last by name. Numbers in names count as
    numbers: v10 is after v9, and 20260201-120000 after 20260131-235959.

    Copies of exports from object storage are in the user's cache folder, named by the hash of their index. The least
    recently opened are removed to make space, unless a process of this node uses them.

    Args:
        path: A path or URI.
        cache_bytes: Disk space on this node for copies.
    """

    def __init__(self, path: Path | str | Folder, cache_bytes: int = CACHE_BYTES) -> None:
        self.path, self._folder, self._cache_bytes = path, open_folder(path), cache_bytes
        self._entries: dict[str, _Entry] = {}  # by path: complete folders do not change
        self.gap: str | None = None  # why `newest` passed over newer deltas

    def newest(self) -> Folder:
        """The export to serve, at its original location.

        Raises:
            ExportError: The folder has no export, or cannot be read.
        """
        try:
            names, self.gap = self._folder.names(), None
            if INDEX in names or DELTA in names:
                return self._folder
            if CURRENT in names:
                current = self._folder.read(CURRENT).decode("utf-8", "replace").strip().rstrip("/")
                if current not in names:
                    raise ExportError(f"{self.path}: {CURRENT} names {current!r}, which is not in this folder")
                return self._folder.sub(current)
            for name in self.names():
                gap = self._gap_before(self._folder.sub(name))
                if gap is None:
                    return self._folder.sub(name)
                self.gap = self.gap or gap
            if self.gap is not None:
                raise ExportError(self.gap)
            return self._folder.sub(next(self.names()))
        except OSError as error:
            raise ExportError(f"{self.path} cannot be read: {first_line(error)}") from error
        except StopIteration:
            fix = "make one with `rayrec export RUN OUT`"
            raise ExportError(f"{self.path} has no export ({INDEX}), nor a folder with one: {fix}") from None

    def names(self) -> Iterator[str]:
        """Names of the exports and deltas in a folder, the newest first. Folders without an index are still being
        written."""
        return (folder.name for folder in self._complete(self._folder))

    def _complete(self, root: Folder) -> Iterator[Folder]:
        for name in sorted(root.names(), key=natural_order, reverse=True):
            folder = root.sub(name)
            with suppress(NotADirectoryError):
                if folder.path in self._entries or not {INDEX, DELTA}.isdisjoint(folder.names()):
                    yield folder

    def _entry(self, folder: Folder) -> _Entry:
        """
        Raises:
            ExportError: The index of the export or the delta is damaged.
        """
        if folder.path not in self._entries:
            if DELTA in folder.names():
                data = folder.read(DELTA)
                delta = Delta.parse(data, folder.sub(DELTA).path)
                self._entries[folder.path] = _Entry(delta.version, delta, _made_of(data))
            else:
                self._entries[folder.path] = _Entry(version_of(folder))
        return self._entries[folder.path]

    def chain(self, export: Folder) -> list[Folder]:
        """What an export is made of: a full export, or one that this node has made, and the deltas since, in order.

        Raises:
            ExportError: A delta that it needs is missing; names it.
        """
        steps, root = [export], export.parent()
        siblings, by_version, damaged = self._complete(root), dict[str, Folder](), list[str]()
        while True:
            _, delta, made = self._entry(steps[0])
            if delta is None or made is None or made.exists():
                return steps
            version = delta.parent
            while version not in by_version and (sibling := next(siblings, None)) is not None:
                try:
                    by_version.setdefault(self._entry(sibling).version, sibling)
                except (ExportError, FileNotFoundError) as error:  # it may be one that the chain does not need
                    damaged.append(str(error))
            parent = by_version.pop(version, None)  # of a chain, each version comes once
            if parent is None:
                also = "".join(f"; {text}" for text in damaged[:1])
                raise ExportError(
                    f"{steps[0].path} is the change since the version {version}, which is not in {root.path}: a "
                    f"delta is lost; copy it there, or publish a full export{also}"
                )
            steps.insert(0, parent)

    def _gap_before(self, export: Folder) -> str | None:
        if DELTA not in export.names():
            return None
        try:
            self.chain(export)
        except ExportError as error:
            return str(error)
        return None

    def open(self, export: Folder) -> Held:
        """Checks a local export, or copies and checks a remote one; does nothing that this node has done already.

        Raises:
            ExportError: The export is damaged, or its copy does not fit the cache.
        """
        if DELTA in export.names():
            return self._make(export)
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

    def _make(self, export: Folder) -> Held:
        """The export that a delta makes, in the cache of this node."""
        try:
            first, *deltas = self.chain(export)
            cache, made = Cache(cache_folder("exports"), self._cache_bytes), _made_of(export.read(DELTA))
            if not deltas:
                try:
                    return cache.folder(made.name, 0, _evicted)
                except _EvictedError:
                    return self._make(export)
            base = self.open(first)
            index = ExportIndex.parse(export.read(NEW_INDEX), export.sub(NEW_INDEX).path)
            needed = sum(size for size, _ in index.files.values())

            def make(folder: Path, available: int) -> str:
                self._check_fits(needed, available)
                with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".deltas-") as scratch:
                    apply_deltas(base.folder, [_local(one, Path(scratch)) for one in deltas], folder)
                return made.name

            return cache.folder(made.name, needed, make)
        except OSError as error:
            raise ExportError(f"{export.path} cannot be applied: {first_line(error)}") from error

    def _copy(self, export: Folder) -> Held:
        data = export.read(INDEX)
        files, name = ExportIndex.parse(data, export.sub(INDEX).path).files, hashlib.sha256(data).hexdigest()[:32]
        needed = sum(size for size, _ in files.values())

        def copy(folder: Path, available: int) -> str:
            self._check_fits(needed, available)
            for file, (size, crc) in files.items():
                _copy_file(export, file, folder, size, crc)
            (folder / INDEX).write_bytes(data)
            return name

        cache = Cache(cache_folder("exports"), self._cache_bytes)
        return cache.folder(name, needed, copy)

    def _check_fits(self, needed: int, available: int) -> None:
        if needed > available:
            raise ExportError(
                f"an export of {needed:,} bytes does not fit {cache_folder('exports')}: cache_bytes is "
                f"{self._cache_bytes:,}, and exports in use need {self._cache_bytes - available:,}; raise cache_bytes"
            )


class _EvictedError(Exception):
    """Another process has evicted an export from the cache since this one saw it there."""


def _evicted(folder: Path, available: int) -> str:
    raise _EvictedError


def _made_of(delta: bytes) -> Path:
    """Where the export that a delta makes is on this node."""
    return cache_folder("exports") / hashlib.sha256(delta).hexdigest()[:32]


def _local(delta: Folder, scratch: Path) -> Path:
    """The folder of a delta on this node; a copy of one in object storage."""
    if not delta.remote:
        return Path(delta.path).resolve()
    data, folder = delta.read(DELTA), scratch / delta.name
    folder.mkdir()
    for name, (size, crc) in Delta.parse(data, delta.sub(DELTA).path).files.items():
        _copy_file(delta, name, folder, size, crc)
    (folder / DELTA).write_bytes(data)
    return folder


def version_of(export: Folder) -> str:
    """The version of an export, or of the export that a delta makes.

    Raises:
        ExportError: Its index is damaged.
    """
    if DELTA in export.names():
        return Delta.parse(export.read(DELTA), export.sub(DELTA).path).version
    return ExportIndex.parse(export.read(INDEX), export.sub(INDEX).path).version


def files_of(export: Folder) -> Files:
    """Path, size and modification time of every file."""
    filesystem, inner = open_filesystem(export.path)
    infos = filesystem.get_file_info(pafs.FileSelector(inner, recursive=True))
    return tuple((info.path, info.size or 0, info.mtime_ns or 0) for info in infos)


def natural_order(name: str) -> tuple[Sequence[str | int], str]:
    """Sort key: text and numbers of a name alternately; then the name, to order v01 and v1."""
    tokens: list[str | int] = [*re.split("([0-9]+)", name)]
    tokens[1::2] = map(int, tokens[1::2])
    return tokens, name


def _copy_file(export: Folder, name: str, folder: Path, size: int, crc: int) -> None:
    path, actual_crc, offset = folder / name, 0, 0
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ExportError(f"{export.path} lists {name!r}, which is outside the folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = memoryview(bytearray(min(size, _CHUNK_BYTES) or 1))
    with export.open(name) as source, open(path, "wb") as file:
        while read := source.read_into(offset, buffer):
            actual_crc, offset = zlib.crc32(buffer[:read], actual_crc), offset + read
            file.write(buffer[:read])
    if (offset, actual_crc) != (size, crc):
        raise ExportError(f"{export.path}: {name} differs from the index; copy it again, or export again")


def _check_once(folder: Path) -> None:
    """Checks that an export is complete. Checksums are computed once per node, until one of its files changes.

    Raises:
        ExportError: A file is missing or damaged.
    """
    index = read_index(folder)
    check_listed(folder, index.files, checksums=False)
    stats = [(name, (folder / name).stat()) for name in (INDEX, *index.files)]
    state = repr([(name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats])
    mark = cache_folder("checked") / hashlib.sha256(state.encode()).hexdigest()[:32]
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark_file = open(mark, "a+")  # noqa: SIM115 (closed below)
    except OSError:  # the cache folder cannot be written
        check_listed(folder, index.files)
        return
    with mark_file:
        fcntl.flock(mark_file, fcntl.LOCK_EX)
        mark_file.seek(0)
        if not mark_file.read():
            check_listed(folder, index.files)
            mark_file.write(f"{folder}\n")
    _remove_oldest(mark.parent)


def _remove_oldest(folder: Path) -> None:
    """Keeps the newest marks. Another process may remove the same ones meanwhile."""
    times = {}
    for mark in folder.iterdir():
        with suppress(FileNotFoundError):
            times[mark] = mark.stat().st_mtime_ns
    for mark in sorted(times, key=times.__getitem__)[:-_MAX_MARKS]:
        mark.unlink(missing_ok=True)
