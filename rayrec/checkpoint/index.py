"""The index of a checkpoint: which bytes of which file are which rectangle of which tensor, and their checksums. JSON.

Nothing in an index is trusted: names of files are those that a writer gives, so that no path leaves the folder; every
place lies inside its file and its tensor; the pieces of a tensor fill it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint import ChunkStorageMetadata
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from rayrec.checkpoint.container import DTYPES, NAMES

VERSION = 1
INDEX = "index.json"
BLOCK_BYTES = 4 << 20
_DATA_FILE = re.compile(r"data-\d{5,}\.safetensors")


def data_file(rank: int) -> str:
    return f"data-{rank:05d}.safetensors"


def part_file(rank: int) -> str:
    """A rank's part of the index, until all are joined."""
    return f"part-{rank:05d}.json"


@dataclass(frozen=True, slots=True)
class DataFile:
    """Bytes of a file, and of its safetensors header with the eight that give its length."""

    size: int
    header_size: int
    header_crc32: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a tensor, in row-major order from byte `begin` of `file` on.

    Args:
        offsets, sizes: the rectangle, one number a dimension.
        block_rows: rows (of the first dimension) of a block; the last one may have fewer.
        crc32: checksum of each block.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    block_rows: int
    crc32: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Of the first dimension; 1 of a single number."""
        return self.sizes[0] if self.sizes else 1

    def row_bytes(self, itemsize: int) -> int:
        return math.prod(self.sizes[1:]) * itemsize


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A whole tensor, whatever its pieces."""

    dtype: torch.dtype
    size: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """All of a checkpoint, or what one rank wrote of it."""

    files: Mapping[str, DataFile]
    tensors: Mapping[str, SavedTensor] = field(default_factory=dict)

    def to_json(self) -> bytes:
        raw = {
            "version": VERSION,
            "files": {name: [file.size, file.header_size, file.header_crc32] for name, file in self.files.items()},
            "tensors": {
                key: {
                    "dtype": NAMES[tensor.dtype],
                    "size": tensor.size,
                    "pieces": [[p.offsets, p.sizes, p.file, p.begin, p.block_rows, p.crc32] for p in tensor.pieces],
                }
                for key, tensor in self.tensors.items()
            },
        }
        return json.dumps(raw, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes, *, whole: bool = True) -> Index:
        """The index that `to_json` wrote.

        Args:
            whole: its pieces must fill the tensors.

        Raises:
            ValueError: it is none, or says what cannot be.
        """
        try:
            raw = json.loads(data)
            if raw["version"] != VERSION:
                raise ValueError(f"version {raw['version']!r} of the index; this rayrec reads {VERSION}")
            files = {str(name): DataFile(*_counts(file, 3)) for name, file in raw["files"].items()}
            tensors = {str(key): _tensor(tensor) for key, tensor in raw["tensors"].items()}
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise ValueError(f"not an index: {type(error).__name__}: {error}") from error
        index = cls(files, tensors)
        for name in files:
            if not _DATA_FILE.fullmatch(name):
                raise ValueError(f"{name!r} is no file of a checkpoint")
        for key, tensor in tensors.items():
            _check(key, tensor, files, whole)
        return index

    @classmethod
    def joined(cls, parts: Sequence[Index]) -> Index:
        """One index of what several ranks wrote.

        Raises:
            ValueError: the ranks' pieces do not fill a tensor, or overlap.
        """
        files: dict[str, DataFile] = {}
        tensors: dict[str, SavedTensor] = {}
        for part in parts:
            files |= part.files
            for key, tensor in part.tensors.items():
                before = tensors[key].pieces if key in tensors else ()
                tensors[key] = SavedTensor(tensor.dtype, tensor.size, (*before, *tensor.pieces))
        for key, tensor in tensors.items():
            _check(key, tensor, files, whole=True)
        return cls(files, tensors)

    def metadata(self) -> Metadata:
        """As DCP's planners read it."""
        return Metadata({key: _metadata(tensor) for key, tensor in self.tensors.items()})

    def pieces(self) -> Iterator[tuple[str, SavedTensor, Piece]]:
        for key, tensor in self.tensors.items():
            for piece in tensor.pieces:
                yield key, tensor, piece


def _metadata(tensor: SavedTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in tensor.pieces]
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.size), chunks)


def _tensor(raw: Mapping[str, Any]) -> SavedTensor:
    if raw["dtype"] not in DTYPES:
        raise ValueError(f"unknown number format {raw['dtype']!r}")
    pieces = [
        Piece(_counts(offsets), _counts(sizes), str(file), _count(begin), _count(rows), _counts(sums))
        for offsets, sizes, file, begin, rows, sums in raw["pieces"]
    ]
    return SavedTensor(DTYPES[raw["dtype"]], _counts(raw["size"]), tuple(pieces))


def _count(raw: Any) -> int:
    return _counts([raw])[0]


def _counts(raw: Sequence[Any], length: int | None = None) -> tuple[int, ...]:
    """Whole numbers of at least 0."""
    if not all(type(x) is int and x >= 0 for x in raw) or length not in (None, len(raw)):
        raise ValueError(f"{raw!r} are not the numbers of an index")
    return tuple(raw)


def _check(key: str, tensor: SavedTensor, files: Mapping[str, DataFile], whole: bool) -> None:
    itemsize, filled = tensor.dtype.itemsize, 0
    for piece in tensor.pieces:
        places = zip(piece.offsets, piece.sizes, tensor.size, strict=True)
        inside = len(piece.sizes) == len(tensor.size) and all(at + n <= size for at, n, size in places)
        nbytes = math.prod(piece.sizes) * itemsize
        file = files.get(piece.file)
        if not inside or file is None or not file.header_size <= piece.begin <= file.size - nbytes:
            raise ValueError(f"{key}: a piece lies outside its tensor or file")
        blocks = -(-piece.rows // piece.block_rows) if piece.block_rows and nbytes else 0
        if len(piece.crc32) != blocks:
            raise ValueError(f"{key}: a piece has {len(piece.crc32)} checksums instead of {blocks}")
        filled += math.prod(piece.sizes)
    if whole and (filled != math.prod(tensor.size) or len({p.offsets for p in tensor.pieces}) != len(tensor.pieces)):
        raise ValueError(f"{key}: its pieces hold {filled:,} of {math.prod(tensor.size):,} numbers")
