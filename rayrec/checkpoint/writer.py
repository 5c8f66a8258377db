"""One rank's share of a checkpoint: a data file, and its part of the index.

A piece is a tensor of the file, named `KEY@OFFSET,OFFSET` (`container.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rayrec.checkpoint.container import header, host_bytes
from rayrec.checkpoint.index import BLOCK_BYTES, VERSION, DataFile, Index, Piece, SavedTensor, data_file
from rayrec.checkpoint.pace import Pace
from rayrec.storage.folder import Folder


@dataclass(frozen=True, slots=True)
class Item:
    """A piece that this rank writes: a rectangle of a tensor of size `size`, from `offsets` on."""

    key: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor


def snapshot(items: Sequence[Item]) -> list[Item]:
    """Copies in host memory, pinned where they come from a GPU."""
    copies = []
    for item in items:
        on_gpu = item.tensor.is_cuda
        host = torch.empty(item.tensor.shape, dtype=item.tensor.dtype, pin_memory=on_gpu)
        host.copy_(item.tensor, non_blocking=on_gpu)
        copies.append(Item(item.key, item.size, item.offsets, host))
    if any(item.tensor.is_cuda for item in items):
        torch.cuda.current_stream().synchronize()
    return copies


def write(folder: Folder, rank: int, items: Sequence[Item], pace: Pace | None = None) -> Index:
    """Write a rank's pieces and return its part of the index; no more than a piece is copied at a time.

    Raises:
        OSError: the file cannot be written; what there is of it is removed.
        StoppedError: `pace` was stopped meanwhile.
        ValueError: a number format that safetensors does not know.
    """
    name, pace = data_file(rank), pace or Pace()
    items = sorted(items, key=lambda item: -item.tensor.element_size())  # numbers lie at multiples of their size
    head = header((_place(item), item.tensor.dtype, item.tensor.shape) for item in items)
    begin, pieces = len(head), []
    try:
        with folder.create(name) as file:
            file.write(head)
            for item in items:
                block_rows = _block_rows(item.tensor)
                sums = []
                for block in _blocks(item.tensor, block_rows):
                    pace.rest()
                    sums.append(zlib.crc32(block))
                    file.write(block)
                pieces.append(Piece(item.offsets, tuple(item.tensor.shape), name, begin, block_rows, tuple(sums)))
                begin += item.tensor.nbytes
    except BaseException:
        folder.remove(name)  # it may be what fills the disk
        raise
    return _index(items, pieces, {name: DataFile(begin, len(head), zlib.crc32(head))})


def _index(items: Sequence[Item], pieces: Sequence[Piece], files: dict[str, DataFile]) -> Index:
    tensors: dict[str, SavedTensor] = {}
    for item, piece in zip(items, pieces, strict=True):
        before = tensors[item.key].pieces if item.key in tensors else ()
        tensors[item.key] = SavedTensor(item.tensor.dtype, item.size, (*before, piece))
    return Index(files, tensors, version=VERSION)


def _place(item: Item) -> str:
    return f"{item.key}@{','.join(map(str, item.offsets))}"


def _block_rows(tensor: torch.Tensor) -> int:
    rows = tensor.shape[0] if tensor.dim() else 1
    return max(1, BLOCK_BYTES * rows // max(1, tensor.nbytes))


def _blocks(tensor: torch.Tensor, block_rows: int) -> Iterator[memoryview]:
    rows = tensor if tensor.dim() else tensor[None]
    for start in range(0, len(rows) if tensor.numel() else 0, block_rows):
        yield host_bytes(rows[start : start + block_rows])
