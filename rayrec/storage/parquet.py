"""Opens Parquet files; reports files that cannot be read or that were overwritten."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from rayrec.storage.column_names import check_names
from rayrec.storage.errors import DataError, FileChanged, first_line
from rayrec.storage.file_kinds import LONGEST, kind_of
from rayrec.storage.locations import open_filesystem

_KEPT_BYTES = 64 << 20
_TAIL_BYTES = 64 << 10  # contains nearly every footer: one request to object storage


@dataclass(frozen=True, slots=True)
class Version:
    """Identifies the contents of a file, to detect that it was overwritten. An unknown field is None.

    Args:
        changed_ns: time of the last change, on a local file system.
        footer: hash of the Parquet footer.
        etag: hash of the ETag in object storage.
    """

    size_bytes: int
    changed_ns: int | None = None
    footer: int | None = None
    etag: int | None = None


@dataclass(frozen=True, slots=True)
class Footer:
    """The footer of a file, and the version of the file."""

    metadata: pq.FileMetaData
    version: Version


class _FooterCache:
    """Recently read footers by URI and file state: the windows of a file are read one after the other."""

    def __init__(self) -> None:
        self._footers, self._bytes, self._lock = OrderedDict[object, Footer](), 0, threading.Lock()

    def get(self, key: object) -> Footer | None:
        return self._footers.get(key)

    def put(self, key: object, footer: Footer) -> None:
        with self._lock:
            if key not in self._footers:
                self._bytes += footer.metadata.serialized_size
            self._footers[key] = footer
            while self._bytes > _KEPT_BYTES:
                self._bytes -= self._footers.popitem(last=False)[1].metadata.serialized_size


_FOOTERS = _FooterCache()


def read_footer(uri: str) -> Footer:
    """The footer of a file, usually with one read of its end.

    Raises:
        DataError: as `open_parquet`.
    """
    return _open(uri)[1]


def open_parquet(
    uri: str,
    version: Version | None = None,
    read_dictionary: Callable[[pq.FileMetaData], Sequence[str]] = lambda _: (),
) -> pq.ParquetFile:
    """Opens a file and reads its footer.

    Args:
        version: expected version.
        read_dictionary: From the footer, returns the paths of text columns to keep dictionary-encoded.

    Raises:
        FileChanged: the file has another version.
        DataError: the file is missing, is not Parquet, or has two columns of one name.
    """
    source, footer = _open(uri, version)
    try:
        remote = footer.version.changed_ns is None
        encoded = list(read_dictionary(footer.metadata))
        parquet = pq.ParquetFile(source, metadata=footer.metadata, pre_buffer=remote, read_dictionary=encoded)
    except (pa.ArrowInvalid, OSError) as error:
        raise unreadable(uri, error) from error
    check_names([(uri, parquet.schema_arrow.names)])
    return parquet


def _open(uri: str, expected: Version | None = None) -> tuple[pa.NativeFile, Footer]:
    filesystem, path = open_filesystem(uri)
    try:
        # Before the file is opened: otherwise the footer of a file that is replaced in between would be cached
        # under the state of the new file.
        stat = os.stat(path) if isinstance(filesystem, pafs.LocalFileSystem) else None
        source = filesystem.open_input_file(path)
        size = source.size()
        if expected is not None and size != expected.size_bytes:
            raise _changed(uri, f"{size} bytes now, {expected.size_bytes} before")
        etag = _etag(source)
        state = etag if stat is None else (stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
        footer, raw = _FOOTERS.get((uri, size, state)), b""
        if footer is not None:
            version = footer.version
        else:
            raw = _raw_footer(source, size)
            version = Version(size, stat and stat.st_mtime_ns, _hash(raw), etag)
        if expected is not None and (difference := _difference(version, expected)) is not None:
            raise _changed(uri, f"{difference} than before")
        if footer is None:
            footer = Footer(pq.read_metadata(pa.BufferReader(raw)), version)
            if state is not None:
                _FOOTERS.put((uri, size, state), footer)
    except FileNotFoundError as error:
        raise DataError("the file is gone", file=uri, fix="restore it, and check that every node sees it") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise unreadable(uri, error) from error
    return source, footer


def _raw_footer(source: pa.NativeFile, size: int) -> bytes:
    """The footer with its length and magic bytes; of another file, bytes that make pyarrow raise an error."""
    tail = source.read_at(min(size, _TAIL_BYTES), max(0, size - _TAIL_BYTES))
    needed = int.from_bytes(tail[-8:-4], "little") + 8
    if tail[-4:] != b"PAR1" or needed > size:
        return bytes(tail)
    return bytes(tail[-needed:] if needed <= len(tail) else source.read_at(needed, size - needed))


def _difference(version: Version, expected: Version) -> str | None:
    if expected.footer is not None and version.footer != expected.footer:
        return "another footer"
    if None not in (expected.etag, version.etag) and version.etag != expected.etag:
        return "another ETag"
    if expected.changed_ns and version.changed_ns and not _same_time(version.changed_ns, expected.changed_ns):
        return "another time of change"
    return None


def _same_time(a_ns: int, b_ns: int) -> bool:
    """Compares in seconds if one of the times has no fraction: some file systems store whole seconds."""
    if a_ns % 1_000_000_000 and b_ns % 1_000_000_000:
        return a_ns == b_ns
    return a_ns // 1_000_000_000 == b_ns // 1_000_000_000


def _changed(uri: str, difference: str) -> FileChanged:
    return FileChanged(
        f"the file changed while the run was going on: {difference}",
        file=uri,
        fix="do not write to files that are being read, add new ones; start the run again",
    )


def _hash(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little", signed=True)


def _etag(source: pa.NativeFile) -> int | None:
    try:
        metadata = {str(key).lower(): value for key, value in (source.metadata() or {}).items()}
    except (pa.ArrowException, OSError, AttributeError):
        return None
    etag = next((value for key, value in metadata.items() if "etag" in key), None)
    return None if not etag else _hash(etag if isinstance(etag, bytes) else str(etag).encode())


def unreadable(uri: str, error: Exception) -> DataError:
    """The error of a file that exists but is not readable."""
    problem, fix = first_line(error), "write the file again, or remove it"
    if (kind := file_kind(uri)) is not None and kind[0] != "Parquet":
        problem, fix = f"it is {kind[0]}", kind[1]
    return DataError(f"the file is not readable as Parquet: {problem}", file=uri, fix=fix)


def file_kind(uri: str) -> tuple[str, str] | None:
    """As `kind_of`, of a file; None if it cannot be read."""
    try:
        filesystem, path = open_filesystem(uri)
        with filesystem.open_input_file(path) as source:
            return kind_of(source.read(LONGEST))
    except OSError:
        return None
