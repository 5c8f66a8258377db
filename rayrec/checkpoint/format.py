"""The file format of a checkpoint's tensors: their numbers in safetensors files, and an index of these in JSON.

A safetensors file has a length, a JSON header with names, number formats, shapes and byte offsets, then raw numbers in
row-major order. All of that is known before the first number is written, so a file is written in one pass, and readers
exist for every language. The format is a page long (huggingface.co/docs/safetensors), so it is implemented here; tests
read the files with the safetensors package.

That format has no checksums and no tensors in several rectangles: those are in the index. It has the file, byte range
and checksums of each rectangle of each tensor, and a checksum of each file's header. Reading validates an index: file
names must match the writer's pattern, so that no path leaves the folder; every rectangle must be inside its file and
its tensor; and the rectangles of a tensor must fill the tensor.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import torch
from pydantic import AfterValidator, NonNegativeInt, PlainSerializer, PlainValidator, TypeAdapter, ValidationError

VERSION = 1
INDEX = "index.json"
PARTS = "parts"  # folder, during a save
ROWS, VALUES, NONZERO = "rows", "values", "nonzero"  # what an increment does not have whole
BLOCK_BYTES = 4 << 20
_DATA_FILE = re.compile(r"data-\d{5,}\.safetensors")

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def header(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """The bytes of a file before its numbers, which follow without gaps.

    Args:
        tensors: (name, number format, shape) of each tensor, in the order of their numbers.

    Raises:
        ValueError: a number format that safetensors does not support.
    """
    entries, begin = {}, 0
    for name, dtype, shape in tensors:
        if dtype not in NAMES:
            raise ValueError(f"{name}: cannot save numbers of {dtype}; use one of {list(NAMES.values())}")
        end = begin + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the numbers to 8 bytes
    return len(text).to_bytes(8, "little") + text


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The numbers in row-major order; a copy only if the tensor is on a device or not contiguous."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def data_file(rank: int) -> str:
    return f"data-{rank:05d}.safetensors"


def part_file(rank: int) -> str:
    """Name of a rank's part of the index, until rank 0 merges them."""
    return f"part-{rank:05d}.json"


def without_rows(keys: Iterable[str]) -> set[str]:
    """The keys of whole tensors."""
    return {key for key in keys if not key.startswith((f"{ROWS}/", f"{VALUES}/", f"{NONZERO}/"))}


def _dtype(name: object) -> torch.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"unknown number format {name!r}")
    return DTYPES[name]


def _supported(version: int) -> int:
    if version != VERSION:
        raise ValueError(f"the index has version {version!r}; this rayrec reads {VERSION}")
    return version


Counts = tuple[NonNegativeInt, ...]


class DataFile(NamedTuple):
    """A data file.

    Args:
        size: in bytes.
        header_size: bytes of the safetensors header, including the 8 bytes of its length.
    """

    size: NonNegativeInt
    header_size: NonNegativeInt
    header_crc32: NonNegativeInt


class Piece(NamedTuple):
    """A rectangle of a tensor, in row-major order from byte `begin` of `file`.

    Args:
        offsets, sizes: offsets and sizes of the rectangle, one number per dimension.
        block_rows: rows (of the first dimension) of a block; the last block may have fewer.
        crc32: checksum of each block.
    """

    offsets: Counts
    sizes: Counts
    file: str
    begin: NonNegativeInt
    block_rows: NonNegativeInt
    crc32: Counts

    @property
    def rows(self) -> int:
        """Size of the first dimension; 1 for a single number."""
        return self.sizes[0] if self.sizes else 1

    def row_bytes(self, itemsize: int) -> int:
        return math.prod(self.sizes[1:]) * itemsize


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor and its rectangles."""

    dtype: Annotated[torch.dtype, PlainValidator(_dtype), PlainSerializer(NAMES.__getitem__)]
    size: Counts
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """The index of a checkpoint, or one rank's part of it."""

    files: Mapping[str, DataFile]
    tensors: Mapping[str, SavedTensor]
    version: Annotated[int, AfterValidator(_supported)] = field(kw_only=True)

    def to_json(self) -> bytes:
        return _JSON.dump_json(self)

    @classmethod
    def from_json(cls, data: bytes, *, whole: bool = True) -> Index:
        """The index that `to_json` wrote.

        Args:
            whole: the rectangles must fill the tensors.

        Raises:
            ValueError: the data is not an index, or is inconsistent.
        """
        try:
            index = _JSON.validate_json(data, strict=True)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            message, path = problem["msg"].removeprefix("Value error, "), ".".join(map(str, problem["loc"]))
            raise ValueError(f"not an index: {message}" + (f" ({path})" if path else "")) from error
        for name in index.files:
            if not _DATA_FILE.fullmatch(name):
                raise ValueError(f"{name!r} is not a name of a data file")
        for key, tensor in index.tensors.items():
            _check(key, tensor, index.files, whole)
        return index

    @classmethod
    def joined(cls, parts: Sequence[Index]) -> Index:
        """Merge the indexes of several ranks.

        Raises:
            ValueError: the rectangles do not fill a tensor, or overlap.
        """
        files: dict[str, DataFile] = {}
        by_key: dict[str, list[SavedTensor]] = {}
        for rank_index in parts:
            files |= rank_index.files
            for key, tensor in rank_index.tensors.items():
                by_key.setdefault(key, []).append(tensor)
        tensors = {
            key: SavedTensor(tensors[-1].dtype, tensors[-1].size, tuple(p for tensor in tensors for p in tensor.pieces))
            for key, tensors in by_key.items()
        }
        for key, tensor in tensors.items():
            _check(key, tensor, files, whole=True)
        return cls(files, tensors, version=VERSION)

    def pieces(self) -> Iterator[tuple[str, SavedTensor, Piece]]:
        for key, tensor in self.tensors.items():
            for piece in tensor.pieces:
                yield key, tensor, piece


def _check(key: str, tensor: SavedTensor, files: Mapping[str, DataFile], whole: bool) -> None:
    itemsize, filled = tensor.dtype.itemsize, 0
    for piece in tensor.pieces:
        extents = zip(piece.offsets, piece.sizes, tensor.size, strict=True)
        inside = len(piece.sizes) == len(tensor.size) and all(offset + n <= size for offset, n, size in extents)
        nbytes = math.prod(piece.sizes) * itemsize
        file = files.get(piece.file)
        if not inside or file is None or not file.header_size <= piece.begin <= file.size - nbytes:
            raise ValueError(f"{key}: a rectangle is outside its tensor or file")
        blocks = -(-piece.rows // piece.block_rows) if piece.block_rows and nbytes else 0
        if len(piece.crc32) != blocks:
            raise ValueError(f"{key}: a rectangle has {len(piece.crc32)} checksums instead of {blocks}")
        filled += math.prod(piece.sizes)
    if whole and (filled != math.prod(tensor.size) or len({p.offsets for p in tensor.pieces}) != len(tensor.pieces)):
        raise ValueError(f"{key}: its rectangles have {filled:,} of {math.prod(tensor.size):,} numbers")


_JSON = TypeAdapter(Index)
