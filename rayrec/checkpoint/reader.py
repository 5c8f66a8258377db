"""Reads the requested blocks of a checkpoint, and verifies the checksum of each: to fill a sharded model, or to read
rows of single tensors."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rayrec.checkpoint.errors import CheckpointError, Damage, DamagedCheckpointError, RemovedCheckpointError
from rayrec.checkpoint.format import BLOCK_BYTES, INDEX, Index, Piece
from rayrec.checkpoint.manifest import MANIFEST, Manifest, sha256
from rayrec.storage.folder import Folder, Source
from rayrec.storage.parallel import in_threads

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem

    from rayrec.checkpoint.load_planner import LoadPlanner

_SMALL_READS, _LARGE_READS = 32, 4  # threads; pyarrow has 25 connections to an object store
_MISMATCH = "the bytes do not match their checksum"


class Reader:
    """The tensors of a committed checkpoint. A reusable context manager that keeps files open.

    Raises:
        DamagedCheckpointError: the index is missing or was changed.
        RemovedCheckpointError: the checkpoint no longer exists; also raised at the end of the context.
        OSError: it cannot be read.
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder = folder
        self.index = _read_index(folder, manifest)
        self._open = ExitStack()
        self._sources: dict[str, Source] = {}
        self._buffers = threading.local()

    def __enter__(self) -> Reader:
        self._checks = self._open.enter_context(ThreadPoolExecutor(1, "rayrec-checks"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._open.close()
        self._sources.clear()
        if isinstance(error, OSError) and _is_removed(self.folder):
            raise RemovedCheckpointError(self.folder.path) from error

    def fill(self, state: dict[str, Any]) -> None:
        """Fill the `Rectangles` of a state dict.

        Raises:
            DamagedCheckpointError: names a damage; some rectangles are filled.
        """
        from rayrec.checkpoint.load_planner import LoadPlanner, metadata

        planner = LoadPlanner()
        planner.set_up_planner(state, metadata(self.index.tensors))
        items = planner.create_local_plan().items
        pieces = {(key, piece.offsets): piece for key, _, piece in self.index.pieces()}
        items.sort(key=lambda item: _file_position(pieces, item))
        reads = []
        for item in items:
            key = item.storage_index.fqn
            piece = pieces[key, tuple(item.storage_index.offset or ())]
            rows = item.lengths[0] if item.lengths else 1
            nbytes = rows * piece.row_bytes(self.index.tensors[key].dtype.itemsize)
            reads.append((piece.file, nbytes, partial(self._fill_one, item, piece, planner)))
        self._read_all(reads)

    def tensor(self, key: str, rows: slice = slice(None)) -> torch.Tensor:
        """A saved tensor, or a range of its rows, in host memory."""
        saved = self.index.tensors[key]
        size = list(saved.size)
        start, stop, _ = rows.indices(size[0] if size else 1)
        if size:
            size[0] = max(0, stop - start)
        result, reads = torch.empty(size, dtype=saved.dtype), []
        for piece in saved.pieces:
            offset_rows = piece.offsets[0] if piece.offsets else 0
            low, high = max(offset_rows, start), min(offset_rows + piece.rows, stop)
            if low >= high:
                continue
            slices = [slice(offset, offset + n) for offset, n in zip(piece.offsets, piece.sizes, strict=True)]
            if slices:
                slices[0] = slice(low - start, high - start)
            read = partial(self._rows, key, piece, low - offset_rows, high - offset_rows, result[tuple(slices)])
            reads.append((piece.file, (high - low) * piece.row_bytes(saved.dtype.itemsize), read))
        self._read_all(reads)
        return result

    def borrow(self, key: str, rows: slice) -> torch.Tensor:
        """Rows of a tensor of one rectangle, in a buffer that the next read of this thread overwrites."""
        saved = self.index.tensors[key]
        (piece,) = saved.pieces
        low = rows.start - rows.start % piece.block_rows
        high = min(piece.rows, -(-rows.stop // piece.block_rows) * piece.block_rows)
        data = self._bytes(key, piece, low, high, piece.row_bytes(saved.dtype.itemsize)).view(saved.dtype)
        return data.view(high - low, *piece.sizes[1:])[rows.start - low : rows.stop - low]

    def open_files(self) -> None:
        """Open all data files, so that threads may read tensors."""
        for _ in in_threads(self._source, self.index.files, _SMALL_READS if self.folder.remote else 1):
            pass

    def _read_all(self, reads: Sequence[tuple[str, int, Callable[[], None]]]) -> None:
        """Run functions that each read a part of a file, in order; in threads if every request has a high latency.

        Args:
            reads: (file, bytes, function).
        """
        if not self.folder.remote:
            for _, _, read in reads:
                read()
            return
        for _ in in_threads(self._source, dict.fromkeys(file for file, _, _ in reads), _SMALL_READS):
            pass  # opens each file once
        # Each thread may need a buffer, so few threads read large parts.
        for threads, is_large in ((_SMALL_READS, False), (_LARGE_READS, True)):
            chosen = [read for _, nbytes, read in reads if (nbytes > BLOCK_BYTES) == is_large]
            for _ in in_threads(lambda read: read(), chosen, threads):
                pass

    def damages(self) -> Iterator[Damage]:
        """All damage of the data files. Reads every byte."""
        for name in self.index.files:
            try:
                self._source(name)
            except DamagedCheckpointError as error:
                yield from error.damages
        for key, saved, piece in self.index.pieces():
            if piece.file not in self._sources:
                continue  # reported already
            for start in range(len(piece.crc32)):
                low = start * piece.block_rows
                high = min(piece.rows, low + piece.block_rows)
                try:
                    self._bytes(key, piece, low, high, piece.row_bytes(saved.dtype.itemsize))
                except DamagedCheckpointError as error:
                    yield from error.damages

    def _fill_one(self, item: ReadItem, piece: Piece, planner: LoadPlanner) -> None:
        """Fill the intersection of a requested and a saved rectangle."""
        key, target = item.storage_index.fqn, planner.resolve_tensor(item)
        low = item.storage_offsets[0] if item.lengths else 0
        high = low + (item.lengths[0] if item.lengths else 1)
        inner = tuple(
            slice(offset, offset + n) for offset, n in zip(item.storage_offsets[1:], item.lengths[1:], strict=True)
        )
        self._rows(key, piece, low, high, target, inner)

    def _rows(
        self, key: str, piece: Piece, low: int, high: int, target: torch.Tensor, inner: tuple[slice, ...] = ()
    ) -> None:
        """Copy rows [low, high) of a saved rectangle to `target`; `inner` selects columns."""
        dtype = self.index.tensors[key].dtype
        row_bytes = piece.row_bytes(dtype.itemsize)
        if not row_bytes or high <= low:
            return
        block_start = low - low % piece.block_rows
        block_stop = min(piece.rows, -(-high // piece.block_rows) * piece.block_rows)
        direct = (
            (block_start, block_stop) == (low, high)
            and target.is_contiguous()
            and not target.is_cuda
            and target.dtype == dtype
            and target.numel() * dtype.itemsize == (high - low) * row_bytes
        )
        if direct:
            self._bytes(key, piece, low, high, row_bytes, target.detach().view(-1).view(torch.uint8))
            return
        data = self._bytes(key, piece, block_start, block_stop, row_bytes).view(dtype)
        blocks = data.view(block_stop - block_start, *piece.sizes[1:])
        rows = blocks[(slice(low - block_start, high - block_start), *inner)]
        target.copy_(rows if target.dim() else rows[0])

    def _bytes(
        self, key: str, piece: Piece, low: int, high: int, row_bytes: int, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Read and check rows [low, high) of a saved rectangle. They must be complete blocks.

        Args:
            into: receives the bytes; default: a buffer that the next call overwrites.
        """
        nbytes = (high - low) * row_bytes
        direct = into is not None  # other ranks hardly read these rows, so drop them from the page cache
        if into is None:
            buffer = getattr(self._buffers, "buffer", None)
            if buffer is None or len(buffer) < nbytes:
                buffer = self._buffers.buffer = torch.empty(nbytes, dtype=torch.uint8)
            into = buffer[:nbytes]
        view, source = into.numpy().data, self._source(piece.file)
        step = high - low if self.folder.remote else piece.block_rows
        checked: list[tuple[int, int, Callable[[], int] | None]] = []
        small = high - low <= piece.block_rows and not self.folder.remote  # then handing it to a thread takes longer
        for begin in range(low, high, step):
            end = min(high, begin + step)
            chunk = view[(begin - low) * row_bytes : (end - low) * row_bytes]
            read = source.read_into(piece.begin + begin * row_bytes, chunk)
            for start in range(begin, end, piece.block_rows):
                stop = min(end, start + piece.block_rows)
                block = chunk[(start - begin) * row_bytes : (stop - begin) * row_bytes]
                complete = (stop - begin) * row_bytes <= read
                crc32 = partial(zlib.crc32, block) if small else self._checks.submit(zlib.crc32, block).result
                checked.append((start, stop, crc32 if complete else None))
            if direct and not small:
                source.forget(piece.begin + begin * row_bytes, read)
        damages = []
        for start, stop, checksum in checked:
            if checksum is None:
                damages.append(self._damage(key, piece, start, stop, "the file ends before these rows"))
            elif checksum() != piece.crc32[start // piece.block_rows]:
                damages.append(self._damage(key, piece, start, stop, _MISMATCH))
        if damages:
            raise DamagedCheckpointError(self.folder.path, damages)
        return into

    def _damage(self, key: str, piece: Piece, start: int, stop: int, what: str) -> Damage:
        offset = piece.offsets[0] if piece.offsets else 0
        return Damage(piece.file, what, key, (offset + start, offset + stop))

    def _source(self, name: str) -> Source:
        """An open data file, with its header checked."""
        if name not in self._sources:
            file = self.index.files[name]
            head = memoryview(bytearray(file.header_size))
            try:
                source = self._open.enter_context(self.folder.open(name))
            except FileNotFoundError:
                raise _missing(self.folder, name) from None
            if source.read_into(0, head) != len(head) or zlib.crc32(head) != file.header_crc32:
                raise DamagedCheckpointError(self.folder.path, [Damage(name, "its header was changed")])
            self._sources[name] = source
        return self._sources[name]


def _file_position(pieces: dict[tuple[str, tuple[int, ...]], Piece], item: ReadItem) -> tuple[str, int]:
    """(file, first byte) of a rectangle, to read files sequentially."""
    piece = pieces[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
    return piece.file, piece.begin


def _is_removed(folder: Folder) -> bool:
    """Whether a committed checkpoint has been removed: a removal deletes the manifest first."""
    try:
        return MANIFEST not in folder.names()
    except OSError:
        return False


def _missing(folder: Folder, name: str) -> CheckpointError:
    if _is_removed(folder):
        return RemovedCheckpointError(folder.path)
    return DamagedCheckpointError(folder.path, [Damage(name, "the file is missing")])


def _read_index(folder: Folder, manifest: Manifest) -> Index:
    try:
        data = folder.read(INDEX)
    except FileNotFoundError:
        raise _missing(folder, INDEX) from None
    if len(data) != manifest.index_size or sha256(data) != manifest.index_sha256:
        raise DamagedCheckpointError(folder.path, [Damage(INDEX, _MISMATCH)])
    try:
        return Index.from_json(data)
    except ValueError as error:
        raise DamagedCheckpointError(folder.path, [Damage(INDEX, str(error))]) from error
