"""Reads vocabularies: the ids that have table rows of their own. `tools/vocabulary.py` writes them.

A vocabulary of more than `_IN_MEMORY` ids is looked up in an index file, which all processes of a node map into memory.
The file is made once per node, in the user's cache, and named by the ids; an export has it next to the vocabulary.
An index is checked against its vocabulary.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from rayrec.data.arrays.arrow_types import decoded, is_text, without_views
from rayrec.data.arrays.buffers import I64, U64
from rayrec.data.arrays.hashing import hash_texts
from rayrec.data.mapping.id_index import DuplicateHash, IdIndex, hashes_of
from rayrec.data.mapping.node_cache import node_folder
from rayrec.storage.errors import DataError
from rayrec.storage.locations import open_filesystem
from rayrec.storage.parquet import open_parquet

_FILE, _ID_BYTES = "index", 17
# Version of the layout and the hash of index files.
_FORMAT = 2
_IN_MEMORY = 65_536
_READ_IDS = 1 << 20
_LIMIT = ("RAYREC_VOCABULARY_BYTES", 32 << 30)


_OPENED: dict[str, IdIndex] = {}


def load_vocabulary(path: str) -> IdIndex:
    """Opens a vocabulary, and caches it: a Parquet file with a column `id`, or a text file with one id per line.

    A text file is UTF-8; its lines end with \\n or \\r\\n, and all other characters belong to ids. If every line is an
    integer as Python writes it (-7, but not 007 or 1_000), it is a vocabulary of integers. Text files are read into
    memory; use Parquet for large vocabularies.

    Raises:
        DataError: the file is missing or malformed, an id is duplicated, or the index next to the file belongs to other
            contents.
    """
    index = _OPENED.get(path)
    if index is None:
        # The index of a removed export is mapped into memory and takes disk space until it is closed.
        for opened in [*_OPENED]:
            if "://" not in opened and not os.path.exists(opened):
                _OPENED.pop(opened, None)
        index = _OPENED[path] = _open(path)
    return index


def close_vocabularies() -> None:
    """Empties the cache of `load_vocabulary`."""
    _OPENED.clear()


def _open(path: str) -> IdIndex:
    index_path, source = index_beside(path), _Source.of(path)
    if index_path.exists():
        return _open_beside(index_path, source)
    try:
        if source.size <= _IN_MEMORY:
            chunks = [hashes_of(ids) for ids in source.ids()]
            return IdIndex.of(np.concatenate([np.empty(0, np.uint64), *chunks]), source.text)
        return _cached_index(source)
    except DuplicateHash as error:
        raise _duplicate(source, error.positions) from error


def index_beside(path: str) -> Path:
    """The index file of a vocabulary in an export."""
    return Path(f"{path}.index")


def _open_beside(index_path: Path, source: _Source) -> IdIndex:
    """Opens the index of a vocabulary.

    Compares its size, and the positions of the first and the last ids, or of all ids if the vocabulary is newer.
    """
    try:
        index = IdIndex.open(index_path)
    except ValueError as error:
        raise _stale(index_path, f"the index is damaged ({error})") from error
    is_newer = os.stat(source.path).st_mtime_ns > index_path.stat().st_mtime_ns
    if (index.size, index.text) != (source.size, source.text) or not all(
        np.array_equal(index.find(ids), np.arange(start, start + len(ids)))
        for start, ids in source.positions(ends_only=not is_newer)
    ):
        raise _stale(index_path, f"the index does not contain the ids of {source.path}, which was changed after it")
    return index


def _stale(index_path: Path, problem: str) -> DataError:
    fix = "in an export, export the run again; elsewhere, remove the index, which is then made anew"
    return DataError(problem, file=str(index_path), fix=fix)


def vocabulary_checksum(path: str, size: int) -> str:
    """SHA-256 of the first `size` ids in order; appending ids to a vocabulary does not change it."""
    source = _Source.of(path)
    digest, remaining = hashlib.sha256(b"text" if source.text else b"integers"), size
    for ids in source.ids():
        first_ids = ids[:remaining]
        digest.update((hash_texts(first_ids) if isinstance(first_ids, pa.Array) else first_ids).astype("<u8").tobytes())
        remaining -= len(first_ids)
    return digest.hexdigest()


def ids_in(path: str) -> Iterator[I64 | pa.Array]:
    """All ids of a vocabulary in order, in chunks: integers, or Arrow arrays of strings."""
    return _Source.of(path).ids()


def counts_in(path: str) -> Iterator[I64]:
    """The counts of all ids of a vocabulary in order, in chunks; nothing if it has none."""
    if not path.endswith(".parquet"):
        return
    with open_parquet(path) as parquet:
        field = parquet.schema_arrow.names.count("count") and parquet.schema_arrow.field("count")
        if field and pa.types.is_integer(field.type):
            for batch in parquet.iter_batches(_READ_IDS, columns=["count"], use_threads=False):
                yield batch.column(0).fill_null(0).cast(pa.int64(), safe=False).to_numpy(zero_copy_only=False)


def first_id(path: str) -> str | int | None:
    """The first id of a vocabulary; None if it is empty. Raises as `load_vocabulary`."""
    source = _Source.of(path)
    if not source.size:
        return None
    return source.id_at(0) if source.text else int(source.id_at(0))


def first_text(path: str) -> str | None:
    """The first id of a vocabulary of strings that is not an integer, for an error message."""
    texts = (text for ids in ids_in(path) for text in map(str, ids.tolist()))
    return next((text for text in texts if not is_integer(text)), None)


@dataclass(frozen=True, slots=True)
class _Source:
    """The file of a vocabulary.

    Args:
        lines: the ids of a text file.
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
                raise DataError(f"a vocabulary contains integers or strings, not {kind}", file=path, column="id")
            return cls(path, is_text(kind), parquet.metadata.num_rows)

    def ids(self) -> Iterator[I64 | pa.Array]:
        """All ids in order, in chunks: integers, or Arrow arrays of strings."""
        if self.lines is not None:
            yield self._plain(self.lines)
            return
        with open_parquet(self.path) as parquet:
            yield from self._read(parquet, range(parquet.metadata.num_row_groups))

    def positions(self, *, ends_only: bool) -> Iterator[tuple[int, I64 | pa.Array]]:
        """Chunks of ids, each with the position of its first id.

        Args:
            ends_only: of a Parquet file, the first and the last row group only.
        """
        if self.lines is not None:
            yield 0, self._plain(self.lines)
            return
        with open_parquet(self.path) as parquet:
            sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.metadata.num_row_groups)]
            ends = {0, len(sizes) - 1} & {*range(len(sizes))}
            for group in sorted(ends) if ends_only else range(len(sizes)):
                position = sum(sizes[:group])
                for ids in self._read(parquet, [group]):
                    yield position, ids
                    position += len(ids)

    def _read(self, parquet: Any, groups: Sequence[int]) -> Iterator[I64 | pa.Array]:
        for batch in parquet.iter_batches(_READ_IDS, row_groups=groups, columns=["id"], use_threads=False):
            ids = batch.column(0)
            yield self._plain(decoded(ids.cast(without_views(ids.type))))

    def _plain(self, ids: pa.Array) -> I64 | pa.Array:
        if ids.null_count:
            raise DataError("a vocabulary cannot contain null", file=self.path, fix="remove the null")
        return ids if self.text else ids.cast(pa.int64(), safe=False).to_numpy(zero_copy_only=False)

    def id_at(self, position: int) -> str:
        """The id at a position, for an error message."""
        for ids in self.ids():
            if position < len(ids):
                return str(ids[position])
            position -= len(ids)
        raise IndexError(position)

    @property
    def version(self) -> str:
        """Identifies the contents of the file by size and modification time."""
        filesystem, inner = open_filesystem(self.path)
        info: pafs.FileInfo = filesystem.get_file_info(inner)
        return _digest(f"{_FORMAT} {info.size} {info.mtime_ns}")


def _duplicate(source: _Source, positions: tuple[int, int]) -> DataError:
    first, second = (source.id_at(position) for position in positions)
    if first == second:
        return DataError("an id is in the vocabulary twice", file=source.path, value=first, fix="remove the duplicate")
    problem = f"the ids {first} and {second} have the same 64-bit hash"
    return DataError(problem, file=source.path, fix="remove one of them")


def _cached_index(source: _Source) -> IdIndex:
    """The index file on this node, made by the first process that needs it.

    The cache maps the file's path and version to a folder named by the hash of the ids, so copies share one index.
    """

    def make(folder: Path, _: int) -> str:
        digest = hashlib.sha256(f"{_FORMAT} {source.text}".encode())
        chunks = _digested(map(hashes_of, source.ids()), digest)
        IdIndex.make(chunks, source.size, source.text, folder / _FILE)
        return digest.hexdigest()[:32]

    key = f"{_digest(source.path)}-{source.version}"
    cached = node_folder("vocabularies", key, _ID_BYTES * source.size, make, _LIMIT)
    return IdIndex.open(cached.folder / _FILE, cached)


def _digested(chunks: Iterable[U64], digest: Any) -> Iterator[U64]:
    for chunk in chunks:
        digest.update(chunk.tobytes())
        yield chunk


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_text(path: str) -> pa.Array:
    filesystem, inner = open_filesystem(path)
    try:
        with filesystem.open_input_stream(inner) as stream:
            text = stream.read().decode("utf-8-sig")  # some editors write a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the vocabulary: {error}", file=path, fix="check the path") from error
    # `splitlines` would also split at other characters (U+0085, U+2028), which ids may contain.
    *lines, rest = text.replace("\r\n", "\n").split("\n")
    lines += [rest] if rest else []
    if all(map(is_integer, lines)):
        return pa.array([int(line) for line in lines], pa.int64())
    return pa.array(lines, pa.string())


def is_integer(line: str) -> bool:
    """True if the line of a text file is an integer of 64 bits, as `str` writes it."""
    try:
        number = int(line)
        return str(number) == line and -(1 << 63) <= number < 1 << 63
    except ValueError:
        return False
