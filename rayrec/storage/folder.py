"""Folders on any file system of pyarrow: whole small files, large files in pieces, ranges of bytes. No tensors.

What has been written is on the disk when a call returns (on a local file system: synced, and so is the folder). A small
file is there as a whole or not at all.
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
_PATIENCE = Patience(outage_s=2.0)  # of a range of a file: whoever reads a checkpoint waits for longer outages itself
_BUCKETS = ("s3", "gcs", "abfs")  # no folders there, and an object appears when it is complete


def open_folder(place: str | Path | Folder) -> Folder:
    """The folder that a path or URI means; it need not exist.

    Raises:
        DataError: a URI that pyarrow has no file system for.
    """
    if not isinstance(place, str | Path):
        return place
    if "://" not in str(place):
        return LocalFolder(Path(place))
    found = locate(str(place))
    local = isinstance(found.filesystem, pafs.LocalFileSystem)
    return LocalFolder(Path(found.path)) if local else ArrowFolder(found.filesystem, found.path, found.uri)


class LocalFolder:
    """A folder on a file system that the operating system has mounted; files in it are accessed by name.

    Errors are `OSError`, a missing file `FileNotFoundError`.
    """

    remote = False  # whether every request takes a while, however few bytes it is for

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def path(self) -> str:
        """As a user would write it."""
        return str(self._path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._path.name

    def sub(self, name: str) -> LocalFolder:
        """A folder inside this one."""
        return LocalFolder(self._path / name)

    def parent(self) -> LocalFolder:
        return LocalFolder(self._path.absolute().parent)

    def names(self) -> list[str]:
        """What lies here; nothing where the folder does not exist."""
        try:
            return sorted(os.listdir(self._path))
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def write(self, name: str, data: Bytes) -> None:
        """Replaces a small file."""
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
        """A large file, written in pieces; it is complete when the body is left without an error."""
        self._path.mkdir(parents=True, exist_ok=True)
        with open(self._path / name, "wb", buffering=0) as file:
            yield _WholeWrites(file)
            os.fsync(file.fileno())
        self._sync()

    @contextmanager
    def open(self, name: str) -> Iterator[Source]:
        """A file whose ranges are read."""
        with open(self._path / name, "rb", buffering=0) as file:
            yield _LocalSource(file.fileno())

    def remove(self, name: str) -> None:
        """A file; it need not be there."""
        (self._path / name).unlink(missing_ok=True)

    def remove_all(self) -> None:
        """The folder with all that is in it."""
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
    """Where a small file is written first: a name of its own for each writer, so that none moves another's away."""
    return f".{name}.{uuid.uuid4().hex[:8]}.tmp"


_FOLIO = 4 << 20  # the system keeps pages in groups of up to so many bytes, and gives back whole groups only
_BEHIND = 32 << 20  # bytes of a large file that the disk may be busy with


class _WholeWrites:
    """A raw file that is written from its begin to its end, past the page cache.

    Its pages go to the disk as they come and are given back when they are there. Left to the system they would fill
    the memory first: pages that were not in use before are dear, on a virtual machine above all, and a save beside
    training would take that time from the steps.
    """

    def __init__(self, file: Any) -> None:
        self._file, self._written = file, 0

    def write(self, data: Bytes) -> None:
        left = memoryview(data)
        while len(left):  # `write` may take a part only
            taken = self._file.write(left)
            left = left[taken:]
            self._advise(self._written, taken)  # starts writing
            self._written += taken
            self._advise(self._written - taken - _BEHIND, taken)  # gives back what is written

    def _advise(self, offset: int, nbytes: int) -> None:
        if offset >= 0:
            _forget(self._file.fileno(), offset, nbytes)


def _forget(descriptor: int, offset: int, nbytes: int) -> None:
    if hasattr(os, "posix_fadvise"):  # Linux
        begin = max(0, offset - _FOLIO)  # what lies across the begin stayed the last time
        os.posix_fadvise(descriptor, begin, offset + nbytes - begin, os.POSIX_FADV_DONTNEED)


class _LocalSource:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read_into(self, offset: int, view: memoryview) -> int:
        """Fills `view` from `offset` on; returns how many bytes there were."""
        done = 0
        while done < len(view):
            read = os.preadv(self._descriptor, [view[done:]], offset + done)
            if not read:
                break
            done += read
        return done

    def forget(self, offset: int, nbytes: int) -> None:
        """These bytes are not read again on this machine."""
        _forget(self._descriptor, offset, nbytes)


class ArrowFolder:
    """The same on a file system of pyarrow's own: object stores, HDFS."""

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
        place, mark, options = self._uri.partition("?")
        return ArrowFolder(self._files, self._inner.rpartition("/")[0], f"{place.rpartition('/')[0]}{mark}{options}")

    def names(self) -> list[str]:
        found = self._files.get_file_info(pafs.FileSelector(self._inner, allow_not_found=True))
        return sorted(info.base_name for info in found)

    def read(self, name: str) -> bytes:
        with self._files.open_input_stream(self._at(name)) as stream:
            data: bytes = stream.read()
            return data

    def write(self, name: str, data: Bytes) -> None:
        if self._files.type_name in _BUCKETS:
            with self.create(name) as stream:
                stream.write(data)
            return
        temporary = _temporary(name)
        with self.create(temporary) as stream:
            stream.write(data)
        self._files.move(self._at(temporary), self._at(name))

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        if self._files.type_name not in _BUCKETS:
            self._files.create_dir(self._inner, recursive=True)
        with self._files.open_output_stream(self._at(name)) as stream:
            yield stream

    @contextmanager
    def open(self, name: str) -> Iterator[Source]:
        with self._files.open_input_file(self._at(name)) as file:
            yield _ArrowSource(file, self.sub(name).path)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._files.delete_file(self._at(name))

    def remove_all(self) -> None:
        with suppress(FileNotFoundError):
            self._files.delete_dir(self._inner)

    def _at(self, name: str) -> str:
        return f"{self._inner}/{name}"


class _ArrowSource:
    def __init__(self, file: Any, uri: str) -> None:
        self._file, self._uri = file, uri

    def read_into(self, offset: int, view: memoryview) -> int:
        # S3's client does not retry a 503 whose text is longer than the range.
        data = with_patience(lambda: self._file.read_at(len(view), offset), self._uri, _PATIENCE)
        view[: len(data)] = data
        return len(data)

    def forget(self, offset: int, nbytes: int) -> None:
        """Nothing is kept."""


Folder = LocalFolder | ArrowFolder
Source = _LocalSource | _ArrowSource
