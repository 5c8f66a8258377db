"""`IdIndex`: the position of each id in a vocabulary, as an open-addressed hash table in memory or in a mapped file.

Ordered linear probing (Amble and Knuth 1974): hashes are ascending, and empty cells hold the largest uint64. A search
starts at the hash's home cell and ends at the first hash that is not smaller. A file, which `deploy/cpp/vocabulary.h`
also reads, has three uint64 (number of ids, 1 if they are strings, number of cells), then the uint64 hash and the
uint32 position of every cell: about 17 bytes per id.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rayrec.data.arrays.buffers import I64, U32, U64
from rayrec.data.arrays.hashing import hash_texts, mix64_array

_LOAD = 0.7
_EMPTY, _NO_POSITION = np.uint64((1 << 64) - 1), np.uint32((1 << 32) - 1)
_32 = np.uint64(32)
# The working set of a search of this many hashes fits the L2 cache.
_BLOCK = 16_384
_PART_IDS = 1 << 21
_HEAD_BYTES = 24


class DuplicateHash(Exception):
    """Two ids have the same hash.

    Attributes:
        positions: their positions.
    """

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"ids {first} and {second} have the same hash")
        self.positions = (first, second)


@dataclass(frozen=True, slots=True)
class IdIndex:
    """Hash table from ids to positions.

    Args:
        size: number of ids.
        text: True if the ids are strings.
        hashes: [cells], ascending, with empty cells between.
        positions: [cells], the positions of the ids.
        cached: keeps the cached file of the table.
    """

    size: int
    text: bool
    hashes: U64
    positions: U32
    cached: object = None

    @classmethod
    def of(cls, hashes: U64, text: bool) -> IdIndex:
        """Builds the table in memory from hashes in the order of their positions.

        Raises:
            DuplicateHash: two hashes are equal.
        """
        cells = _cells(len(hashes))
        no_cells = (np.empty(0, np.uint64), np.empty(0, np.uint32))
        cell_hashes, positions = next(_fill_cells([(hashes, np.arange(len(hashes), dtype=np.uint32))], cells), no_cells)
        return cls(len(hashes), text, *_padded(cell_hashes, positions, cells))

    @classmethod
    def open(cls, path: Path, cached: object = None) -> IdIndex:
        """Maps a file into memory; processes share its pages."""
        size, text, cells = np.fromfile(path, "<u8", 3).tolist()
        hashes = np.memmap(path, np.uint64, "r", _HEAD_BYTES, cells)
        positions = np.memmap(path, np.uint32, "r", _HEAD_BYTES + hashes.nbytes, cells)
        return cls(size, bool(text), np.asarray(hashes), np.asarray(positions), cached)

    def write(self, path: Path) -> None:
        """Writes a file for `open`."""
        with open(path, "wb") as file:
            for array in (_head(self.size, self.text, len(self.hashes)), self.hashes, self.positions):
                array.tofile(file)

    @staticmethod
    def make(chunks: Iterable[U64], size: int, text: bool, path: Path) -> None:
        """Writes a file for `open` in bounded memory. Temporary files in the same folder need the same space again.

        Args:
            chunks: hashes in the order of their positions.
            size: number of hashes.
            text: True if the ids are strings.

        Raises:
            DuplicateHash: two hashes are equal.
        """
        cells, written = _cells(size), 0
        with (
            tempfile.TemporaryDirectory(dir=path.parent) as spills,
            open(path, "wb") as file,
            open(Path(spills) / "positions", "w+b") as position_file,
        ):
            _head(size, text, cells).tofile(file)
            for hashes, positions in _fill_cells(_by_hash(chunks, size, Path(spills)), cells):
                hashes.tofile(file)
                positions.tofile(position_file)
                written += len(hashes)
            hashes, positions = _padded(np.empty(0, np.uint64), np.empty(0, np.uint32), cells - written)
            hashes.tofile(file)
            positions.tofile(position_file)
            position_file.seek(0)
            shutil.copyfileobj(position_file, file)
            file.seek(0)
            _head(size, text, written + len(hashes)).tofile(file)

    def find(self, ids: I64 | pa.Array) -> I64:
        """The position of each id, -1 for unknown ids.

        Args:
            ids: integers, or an Arrow array of strings. The result for nulls is undefined.
        """
        return self.find_hashes(hashes_of(ids))

    def find_hashes(self, hashes: U64) -> I64:
        """The position of each hash, -1 for unknown hashes."""
        out = np.empty(len(hashes), np.int64)
        cells = _cells(self.size)
        for start in range(0, len(hashes), _BLOCK):
            out[start : start + _BLOCK] = self._find(hashes[start : start + _BLOCK], cells)
        return out

    def _find(self, hashes: U64, cells: int) -> I64:
        cell = _home_cells(hashes, cells)
        cell_hashes = self.hashes.take(cell)
        searching = np.flatnonzero(cell_hashes < hashes)
        while len(searching):
            cell[searching] += 1
            next_hashes = self.hashes.take(cell[searching])
            cell_hashes[searching] = next_hashes
            searching = searching[next_hashes < hashes[searching]]
        positions = self.positions.take(cell)
        return np.where((cell_hashes == hashes) & (positions != _NO_POSITION), positions, np.int64(-1))


def hashes_of(ids: I64 | pa.Array) -> U64:
    """Hashes of integers, or of an Arrow array of strings."""
    return hash_texts(ids) if isinstance(ids, pa.Array) else mix64_array(ids, 0)


def _head(size: int, text: bool, cells: int) -> U64:
    return np.array([size, text, cells], "<u8")


def _cells(size: int) -> int:
    """Number of home cells."""
    return max(1, int(size / _LOAD))


def _home_cells(hashes: U64, cells: int) -> I64:
    """The cell where the search for each hash starts; ascends with the hash."""
    return (((hashes >> _32) * np.uint64(cells)) >> _32).view(np.int64)


def _by_hash(chunks: Iterable[U64], size: int, folder: Path) -> Iterator[tuple[U64, U32]]:
    """Partitions hashes and their positions by range of hashes, through files; yields the ranges in ascending order."""
    bits = max(0, (size // _PART_IDS).bit_length())
    shift, first_position = np.uint64(64 - bits), 0
    with ExitStack() as files:
        spills = [
            [files.enter_context(open(folder / f"{number}{kind}", "wb")) for kind in "hp"]
            for number in range(1 << bits)
        ]
        for hashes in chunks:
            partitions = (hashes >> shift).astype(np.uint16) if bits else np.zeros(len(hashes), np.uint16)
            order = np.argsort(partitions, kind="stable")
            ends = np.cumsum(np.bincount(partitions, minlength=len(spills))).tolist()
            sorted_hashes, positions = hashes[order], (order + first_position).astype(np.uint32)
            for spill, start, stop in zip(spills, [0, *ends], ends, strict=False):
                sorted_hashes[start:stop].tofile(spill[0])
                positions[start:stop].tofile(spill[1])
            first_position += len(hashes)
    for number in range(1 << bits):
        yield np.fromfile(folder / f"{number}h", np.uint64), np.fromfile(folder / f"{number}p", np.uint32)
        for kind in "hp":
            (folder / f"{number}{kind}").unlink()


def _fill_cells(partitions: Iterable[tuple[U64, U32]], cells: int) -> Iterator[tuple[U64, U32]]:
    """Yields the cells that each partition fills, in order.

    Raises:
        DuplicateHash: two hashes are equal.
    """
    num_ids, num_cells, last_shift = 0, 0, 0  # so far; the shift is cell minus rank of the last hash
    for hashes, positions in partitions:
        if not len(hashes):
            continue
        order = np.argsort(hashes)
        hashes, positions = hashes[order], positions[order]
        if len(same := np.flatnonzero(hashes[1:] == hashes[:-1])):
            raise DuplicateHash(*sorted(positions[same[0] : same[0] + 2].tolist()))
        rank = np.arange(num_ids, num_ids + len(hashes))
        shift = np.maximum(np.maximum.accumulate(_home_cells(hashes, cells) - rank), last_shift)
        cell = rank + shift - num_cells
        cell_hashes, cell_positions = np.full(cell[-1] + 1, _EMPTY), np.full(cell[-1] + 1, _NO_POSITION)
        cell_hashes[cell], cell_positions[cell] = hashes, positions
        yield cell_hashes, cell_positions
        num_ids, num_cells, last_shift = num_ids + len(hashes), num_cells + int(cell[-1]) + 1, int(shift[-1])


def _padded(hashes: U64, positions: U32, cells: int) -> tuple[Any, Any]:
    """Appends empty cells up to `cells`, and one more that ends every search."""
    count = max(0, cells - len(hashes)) + 1
    return np.append(hashes, np.full(count, _EMPTY)), np.append(positions, np.full(count, _NO_POSITION))
