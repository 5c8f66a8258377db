"""Vocabularies: which ids have a table row of their own. Read and looked up here; `tools/` counts them.

One of more ids than `_IN_MEMORY` is looked up in a file that is made once a node, in the user's cache, and shared by
all of its processes and by all copies of the vocabulary; one of an export in the file beside it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from rayrec.data.arrays.arrow_types import decoded, is_text, without_views
from rayrec.data.arrays.buffers import I64, U64
from rayrec.data.arrays.hashing import hash_texts
from rayrec.data.mapping.id_index import IdIndex, Twice, hashes_of
from rayrec.storage.cache import Cache
from rayrec.storage.errors import DataError
from rayrec.storage.locations import cache_folder, open_filesystem
from rayrec.storage.parquet import open_parquet

_FILE, _ID_BYTES = "index", 17
_FORMAT = 2  # another layout or hash, another number
_IN_MEMORY = 65_536
_READ_IDS = 1 << 20
_LIMIT, _BYTES = "RAYREC_VOCABULARY_BYTES", 32 << 30


@lru_cache(maxsize=256)
def load_vocabulary(path: str) -> IdIndex:
    """Opens a vocabulary: a Parquet file with a column `id`, or a text file with one id a line. Kept open.

    A text file of nothing but integers is a vocabulary of integers, and is read as a whole: long ones are Parquet.

    Raises:
        DataError: the file is missing or of another form, or an id is there twice.
    """
    beside = Path(f"{path}.index")
    if beside.exists():
        return IdIndex.open(beside)
    source = _Source.of(path)
    try:
        if source.size <= _IN_MEMORY:
            chunks = [hashes_of(ids) for ids in source.ids()]
            return IdIndex.of(np.concatenate([np.empty(0, np.uint64), *chunks]), source.text)
        return _shared(source)
    except Twice as error:
        raise _twice(source, error.places) from error


def vocabulary_checksum(path: str, size: int) -> str:
    """SHA-256 over the first `size` ids of a vocabulary in their order, so that growth at its end is no change."""
    source = _Source.of(path)
    digest, left = hashlib.sha256(b"text" if source.text else b"integers"), size
    for ids in source.ids():
        some = ids[:left]
        digest.update((hash_texts(some) if isinstance(some, pa.Array) else some).astype("<u8").tobytes())
        left -= len(some)
    return digest.hexdigest()


def ids_in(path: str) -> Iterator[I64 | pa.Array]:
    """All ids of a vocabulary in their order, a part at a time: integers, or an Arrow array of strings."""
    return _Source.of(path).ids()


def first_id(path: str) -> str | int | None:
    """The first id of a vocabulary, in its own type; None of an empty one. Raises as `load_vocabulary`."""
    source = _Source.of(path)
    if not source.size:
        return None
    return source.id_at(0) if source.text else int(source.id_at(0))


@dataclass(frozen=True, slots=True)
class _Source:
    """A vocabulary's file.

    Args:
        lines: its ids, of a text file.
    """

    path: str
    text: bool
    size: int
    lines: pa.Array | None = None

    @classmethod
    def of(cls, path: str) -> _Source:
        if not path.endswith(".parquet"):
            lines = _read_text(path)
            return cls(path, is_text(lines.type), len(lines), lines)
        with open_parquet(path) as parquet:
            if "id" not in parquet.schema_arrow.names:
                raise DataError("a vocabulary needs a column `id`", file=path, column="id", fix="rename its column")
            kind = without_views(parquet.schema_arrow.field("id").type)
            if not is_text(kind) and not pa.types.is_integer(kind):
                raise DataError(f"a vocabulary holds integers or strings, not {kind}", file=path, column="id")
            return cls(path, is_text(kind), parquet.metadata.num_rows)

    def ids(self) -> Iterator[I64 | pa.Array]:
        """All ids in their order, a part at a time: integers, or an Arrow array of strings."""
        for part in self._parts():
            if part.null_count:
                raise DataError("a vocabulary cannot hold null", file=self.path, fix="remove the null")
            yield part if self.text else part.cast(pa.int64(), safe=False).to_numpy(zero_copy_only=False)

    def _parts(self) -> Iterator[pa.Array]:
        if self.lines is not None:
            yield self.lines
            return
        with open_parquet(self.path) as parquet:
            for batch in parquet.iter_batches(_READ_IDS, columns=["id"], use_threads=False):
                ids = batch.column(0)
                ids = ids.cast(without_views(ids.type))
                yield decoded(ids)

    def id_at(self, place: int) -> str:
        """One id, for an error."""
        for ids in self.ids():
            if place < len(ids):
                return str(ids[place])
            place -= len(ids)
        raise IndexError(place)

    @property
    def version(self) -> str:
        """Identifies the file's contents by its size and time."""
        filesystem, inner = open_filesystem(self.path)
        info: pafs.FileInfo = filesystem.get_file_info(inner)
        return _digest(f"{_FORMAT} {info.size} {info.mtime_ns}")


def _twice(source: _Source, places: tuple[int, int]) -> DataError:
    one, other = (source.id_at(place) for place in places)
    if one == other:
        return DataError("an id is in the vocabulary twice", file=source.path, value=one, fix="keep each id once")
    problem = f"two ids have one 64-bit hash, {one} and {other}"
    return DataError(problem, file=source.path, fix="leave one of them out")


def _shared(source: _Source) -> IdIndex:
    """The vocabulary's index on this node, made by whoever comes first; its folder is named by the ids, to which the
    name and version of a file lead."""
    limit = os.environ.get(_LIMIT, str(_BYTES))
    if not limit.isdigit():
        raise DataError(f"{_LIMIT}={limit} is no number of bytes", fix=f"write one, e.g. {_LIMIT}={_BYTES}")

    def make(folder: Path, _: int) -> str:
        digest = hashlib.sha256(f"{_FORMAT} {source.text}".encode())
        chunks = _digested(map(hashes_of, source.ids()), digest)
        IdIndex.make(chunks, source.size, source.text, folder / _FILE)
        return digest.hexdigest()[:32]

    key = f"{_digest(source.path)}-{source.version}"
    held = Cache(_cache(), int(limit)).folder(key, _ID_BYTES * source.size, make)
    return IdIndex.open(held.folder / _FILE, held)


def _digested(chunks: Iterable[U64], digest: Any) -> Iterator[U64]:
    for chunk in chunks:
        digest.update(chunk.tobytes())
        yield chunk


def _cache() -> Path:
    """A folder on this node that can be written to."""
    cache = cache_folder("vocabularies")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            return cache
    except OSError:
        pass
    cache = Path(tempfile.gettempdir()) / f"rayrec-{os.getuid()}" / "vocabularies"
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    return cache


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_text(path: str) -> pa.Array:
    filesystem, inner = open_filesystem(path)
    try:
        with filesystem.open_input_stream(inner) as stream:
            lines = stream.read().decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the vocabulary cannot be read: {error}", file=path, fix="check the path") from error
    try:
        return pa.array([int(line) for line in lines], pa.int64())
    except (ValueError, OverflowError):
        return pa.array(lines, pa.string())
