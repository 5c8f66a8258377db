"""Writes one rank's share of a checkpoint: a data file, and its part of the index.

Each saved rectangle is a tensor of the file, named `KEY@OFFSET,OFFSET`.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rayrec.checkpoint.format import (
    BLOCK_BYTES,
    VERSION,
    DataFile,
    Index,
    Piece,
    SavedTensor,
    data_file,
    header,
    host_bytes,
)
from rayrec.storage.folder import Folder

# Share of one CPU per rank that a write may use when training needs all CPUs. A step is as slow as its slowest rank,
# and is delayed by more than the writer's CPU time (caches, memory bandwidth): with shares of 0.05 and 0.025, steps of
# two ranks took 1.11 and 1.04 times as long.
SHARE = 0.025
# CPU seconds before the first pause, so that small checkpoints are written without delay.
FREE_S = 0.05


class StoppedError(Exception):
    """The save was abandoned."""


class Throttle:
    """Limits the CPU use of a thread that writes during training: the thread calls `pause` after each block.

    A lower priority alone is not enough: the thread then runs while its rank waits for another rank, and the kernel
    does not interrupt a copy to the page cache when the step continues.

    Args:
        share: fraction of one CPU that the thread may use; 1: no limit.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        self._stopped, self._unlimited = threading.Event(), threading.Event()
        self._cpu_s = FREE_S  # at the last pause
        self._active_at = time.monotonic()
        self._cause: Exception = StoppedError()
        self.awaited: frozenset[str] = frozenset()  # files of other ranks that the thread waits for
        self.awaited_since = self._active_at

    @property
    def stalled_s(self) -> float:
        """Seconds since the thread last called `pause` or `wait`."""
        return time.monotonic() - self._active_at

    def release(self) -> None:
        """Remove the limit, because a caller waits for the thread."""
        self._unlimited.set()

    def stop(self, cause: Exception | None = None) -> None:
        """Abandon the save: `pause` and `wait` raise `cause` from now on; default: `StoppedError`."""
        self._cause = cause or self._cause
        self._stopped.set()
        self._unlimited.set()

    def pause(self) -> None:
        """Sleep until the thread has used no more than its share since the last call.

        Raises:
            StoppedError: the save was given up.
        """
        if (cpu_s := time.thread_time()) > self._cpu_s:
            self._unlimited.wait((cpu_s - self._cpu_s) * (1.0 / self._share - 1.0))
            self._cpu_s = time.thread_time()
        self.wait(0.0)

    def wait(self, seconds: float) -> None:
        """Sleep while waiting for another rank.

        Raises:
            Exception: the cause of `stop`.
        """
        self._active_at = time.monotonic()
        if self._stopped.wait(seconds):
            raise self._cause


@dataclass(frozen=True, slots=True)
class Item:
    """A rectangle of a tensor that this rank writes.

    Args:
        key: key of the tensor.
        size: shape of the full tensor.
        offsets: offsets of the rectangle in the full tensor.
    """

    key: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor


def snapshot(items: Sequence[Item]) -> list[Item]:
    """Copies in host memory; pinned if the tensor is on a GPU."""
    copies = []
    for item in items:
        on_gpu = item.tensor.is_cuda
        host = torch.empty(item.tensor.shape, dtype=item.tensor.dtype, pin_memory=on_gpu)
        host.copy_(item.tensor, non_blocking=on_gpu)
        copies.append(Item(item.key, item.size, item.offsets, host))
    if any(item.tensor.is_cuda for item in items):
        torch.cuda.current_stream().synchronize()
    return copies


Block = Callable[[Item, slice], torch.Tensor]
"""Returns a range of rows of an item; of a single number, the only one."""


def _own(item: Item, rows: slice) -> torch.Tensor:
    return (item.tensor if item.tensor.dim() else item.tensor[None])[rows]


def write(
    folder: Folder, rank: int, items: Sequence[Item], throttle: Throttle | None = None, block_of: Block = _own
) -> Index:
    """Write a rank's items and return its part of the index. Copies at most one block at a time.

    Args:
        block_of: returns what is written; the items' tensors may then be on the meta device.

    Raises:
        OSError: the file cannot be written; the incomplete file is removed.
        StoppedError: the throttle was stopped.
        ValueError: a number format that safetensors does not support.
    """
    name, throttle = data_file(rank), throttle or Throttle()
    # Sorted by element size, largest first, so that all numbers are aligned.
    items = sorted(items, key=lambda item: -item.tensor.element_size())
    head = header((_tensor_name(item), item.tensor.dtype, item.tensor.shape) for item in items)
    begin, pieces = len(head), []
    try:
        with folder.create(name) as file:
            file.write(head)
            for item in items:
                block_rows = _block_rows(item.tensor)
                checksums = []
                for rows in _blocks(item.tensor, block_rows):
                    throttle.pause()
                    block = host_bytes(block_of(item, rows))
                    checksums.append(zlib.crc32(block))
                    file.write(block)
                shape = tuple(item.tensor.shape)
                pieces.append(Piece(item.offsets, shape, name, begin, block_rows, tuple(checksums)))
                begin += item.tensor.nbytes
    except BaseException:
        folder.remove(name)  # it may have filled the disk
        raise
    return _index(items, pieces, {name: DataFile(begin, len(head), zlib.crc32(head))})


def _index(items: Sequence[Item], pieces: Sequence[Piece], files: dict[str, DataFile]) -> Index:
    tensors: dict[str, SavedTensor] = {}
    for item, piece in zip(items, pieces, strict=True):
        earlier = tensors[item.key].pieces if item.key in tensors else ()
        tensors[item.key] = SavedTensor(item.tensor.dtype, item.size, (*earlier, piece))
    return Index(files, tensors, version=VERSION)


def _tensor_name(item: Item) -> str:
    return f"{item.key}@{','.join(map(str, item.offsets))}"


def _block_rows(tensor: torch.Tensor) -> int:
    rows = tensor.shape[0] if tensor.dim() else 1
    return max(1, BLOCK_BYTES * rows // max(1, tensor.nbytes))


def _blocks(tensor: torch.Tensor, block_rows: int) -> Iterator[slice]:
    rows = 0 if not tensor.numel() else len(tensor) if tensor.dim() else 1
    for start in range(0, rows, block_rows):
        yield slice(start, min(start + block_rows, rows))
