"""Folders on any file system of pyarrow: small files, large files written in blocks, reads of byte ranges.

Writes are durable when a call returns; on a local file system, file and folder are synced. Small files are replaced
atomically.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

from rayrec.storage.locations import inside, locate
from rayrec.storage.retries import Patience, with_patience

Bytes = bytes | memoryview
# For one byte range. Checkpoint readers handle longer outages themselves.
_PATIENCE = Patience(outage_s=2.0)
_MOST_BYTES_OF_A_COPY = 5 << 30  # S3 copies no larger object in one request
_BUCKETS = ("s3", "gcs", "abfs")  # have no folders; an object appears when it is complete


def open_folder(folder: str | Path | Folder) -> Folder:
    """The folder of a path or URI; it need not exist.

    Raises:
        DataError: a URI that pyarrow has no file system for.
    """
    if not isinstance(folder, str | Path):
        return folder
    if "://" not in str(folder):
        return LocalFolder(Path(folder))
    location = locate(str(folder))
    local = isinstance(location.filesystem, pafs.LocalFileSystem)
    return LocalFolder(Path(location.path)) if local else ArrowFolder(location.filesystem, location.path, location.uri)


class LocalFolder:
    """A folder on a mounted file system; files are accessed by name.

    Raises `OSError`, and `FileNotFoundError` for a missing file.
    """

    remote = False  # whether every request has a high latency

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def path(self) -> str:
        """The path or URI for users."""
        return str(self._path)

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self._path.name

    def sub(self, name: str) -> LocalFolder:
        """A subfolder."""
        return LocalFolder(self._path / name)

    def parent(self) -> LocalFolder:
        return LocalFolder(self._path.absolute().parent)

    def names(self) -> list[str]:
        """Sorted names in the folder; empty if it does not exist."""
        try:
            return sorted(os.listdir(self._path))
        except FileNotFoundError:
            return []

    def files(self) -> dict[str, int]:
        """Bytes of each file in the folder and its subfolders, by path relative to the folder."""
        paths = (Path(above) / name for above, _, names in os.walk(self._path) for name in names)
        return {path.relative_to(self._path).as_posix(): path.stat().st_size for path in paths}

    def changed_at(self, name: str = "") -> float | None:
        """When a file or folder was last changed, in seconds by the clock of the file system; None if it is unknown."""
        try:
            return (self._path / name).stat().st_mtime
        except FileNotFoundError:
            return None

    def rename(self, target: Folder) -> bool:
        """Renames the folder. Returns False if its file system has no renames."""
        os.rename(self._path, target.path)
        return True

    def copy_in_storage(self, source: Folder, name: str, nbytes: int) -> bool:
        """Copies a file from another folder without reading it here. Returns False if that is impossible."""
        return False

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def write(self, name: str, data: Bytes) -> None:
        """Writes or replaces a small file atomically."""
        temporary = _temporary(name)
        try:
            with self.create(temporary) as file:
                file.write(data)
            os.replace(self._path / temporary, self._path / name)
        except BaseException:
            with suppress(OSError):
                self.remove(temporary)
            raise
        self._sync()

    @contextmanager
    def create(self, name: str) -> Iterator[_WholeWrites]:
        """A large file, written in blocks; complete when the context exits without an error."""
        self._path.mkdir(parents=True, exist_ok=True)
        with open(self._path / name, "wb", buffering=0) as file:
            yield _WholeWrites(file)
            os.fsync(file.fileno())
        self._sync()

    @contextmanager
    def open(self, name: str) -> Iterator[Source]:
        """A file, to read byte ranges of."""
        with open(self._path / name, "rb", buffering=0) as file:
            yield _LocalSource(file.fileno())

    def remove(self, name: str) -> None:
        """Removes a file if it exists."""
        (self._path / name).unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Removes the folder and its contents."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self._path)

    def _sync(self) -> None:
        for folder in (self._path, self._path.parent):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _temporary(name: str) -> str:
    """A temporary name for a small file, unique for each writer, so that writers do not move each other's files."""
    return f".{name}.{uuid.uuid4().hex[:8]}.tmp"


_FOLIO = 4 << 20  # largest group of pages (folio) in bytes; Linux frees only whole groups
_BEHIND = 32 << 20  # bytes of a large file that may still be in flight to the disk


class _WholeWrites:
    """A raw file written sequentially, without filling the page cache.

    Each block starts its write-back at once, and its pages are dropped once they are on the disk. Otherwise dirty pages
    would fill the memory first. Fresh pages are expensive, most of all on a virtual machine, and a background save
    would slow training steps.
    """

    def __init__(self, file: Any) -> None:
        self._file, self._written = file, 0

    def write(self, data: Bytes) -> None:
        remaining = memoryview(data)
        while len(remaining):  # `write` may be partial
            nbytes = self._file.write(remaining)
            remaining = remaining[nbytes:]
            self._advise(self._written, nbytes)  # starts the write-back
            self._written += nbytes
            self._advise(self._written - nbytes - _BEHIND, nbytes)  # drops pages that are on the disk

    def _advise(self, offset: int, nbytes: int) -> None:
        if offset >= 0:
            _forget(self._file.fileno(), offset, nbytes)


def _forget(descriptor: int, offset: int, nbytes: int) -> None:
    if hasattr(os, "posix_fadvise"):  # Linux
        start = max(0, offset - _FOLIO)  # the group of pages across `offset` was not whole at the last call
        os.posix_fadvise(descriptor, start, offset + nbytes - start, os.POSIX_FADV_DONTNEED)


class _LocalSource:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read_into(self, offset: int, view: memoryview) -> int:
        """Reads into `view` from `offset`; returns the number of bytes read."""
        done = 0
        while done < len(view):
            read = os.preadv(self._descriptor, [view[done:]], offset + done)
            if not read:
                break
            done += read
        return done

    def forget(self, offset: int, nbytes: int) -> None:
        """Drops bytes from the page cache that will not be read again."""
        _forget(self._descriptor, offset, nbytes)


class ArrowFolder:
    """A folder on a file system of pyarrow: object stores, HDFS. Interface of `LocalFolder`."""

    remote = True

    def __init__(self, filesystem: pafs.FileSystem, inner: str, uri: str) -> None:
        self._files, self._inner, self._uri = filesystem, inner.rstrip("/"), uri

    @property
    def path(self) -> str:
        return self._uri

    @property
    def name(self) -> str:
        return self._inner.rpartition("/")[2]

    def sub(self, name: str) -> ArrowFolder:
        return ArrowFolder(self._files, f"{self._inner}/{name}", inside(self._uri, name))

    def parent(self) -> ArrowFolder:
        uri, mark, options = self._uri.partition("?")
        return ArrowFolder(self._files, self._inner.rpartition("/")[0], f"{uri.rpartition('/')[0]}{mark}{options}")

    def names(self) -> list[str]:
        infos = self._files.get_file_info(pafs.FileSelector(self._inner, allow_not_found=True))
        return sorted(info.base_name for info in infos)

    def files(self) -> dict[str, int]:
        infos = self._files.get_file_info(pafs.FileSelector(self._inner, allow_not_found=True, recursive=True))
        return {info.path[len(self._inner) + 1 :]: info.size for info in infos if info.is_file}

    def changed_at(self, name: str = "") -> float | None:
        """Always None: object stores and HDFS list new files at once, so no caller needs the age of a file."""
        return None

    def rename(self, target: Folder) -> bool:
        if self._files.type_name in _BUCKETS or not isinstance(target, ArrowFolder):
            return False
        self._files.move(self._inner, target._inner)
        return True

    def copy_in_storage(self, source: Folder, name: str, nbytes: int) -> bool:
        if not isinstance(source, ArrowFolder) or not source._files.equals(self._files):
            return False
        if self._files.type_name not in _BUCKETS or nbytes > _MOST_BYTES_OF_A_COPY:
            return False
        self._files.copy_file(source._path_of(name), self._path_of(name))
        return True

    def read(self, name: str) -> bytes:
        # Not a stream, which pyarrow reads in one request per 16 KiB.
        with self._files.open_input_file(self._path_of(name)) as file:
            data: bytes = file.readall()
            return data

    def write(self, name: str, data: Bytes) -> None:
        if self._files.type_name in _BUCKETS:
            with self.create(name) as stream:
                stream.write(data)
            return
        temporary = _temporary(name)
        with self.create(temporary) as stream:
            stream.write(data)
        self._files.move(self._path_of(temporary), self._path_of(name))

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        if self._files.type_name not in _BUCKETS:
            self._files.create_dir(self._inner, recursive=True)
        with self._files.open_output_stream(self._path_of(name)) as stream:
            yield stream

    @contextmanager
    def open(self, name: str) -> Iterator[Source]:
        with self._files.open_input_file(self._path_of(name)) as file:
            yield _ArrowSource(file, self.sub(name).path)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._files.delete_file(self._path_of(name))

    def remove_all(self) -> None:
        with suppress(FileNotFoundError):
            self._files.delete_dir(self._inner)

    def _path_of(self, name: str) -> str:
        return f"{self._inner}/{name}"


class _ArrowSource:
    def __init__(self, file: Any, uri: str) -> None:
        self._file, self._uri = file, uri

    def read_into(self, offset: int, view: memoryview) -> int:
        # The S3 client does not retry a 503 response that is longer than the range.
        data = with_patience(lambda: self._file.read_at(len(view), offset), self._uri, _PATIENCE)
        view[: len(data)] = data
        return len(data)

    def forget(self, offset: int, nbytes: int) -> None:
        """Does nothing: no page cache."""


Folder = LocalFolder | ArrowFolder
Source = _LocalSource | _ArrowSource
