"""Where each of many ids stands: an open-addressed table of 64-bit hashes, in memory or in a file that processes map.

About 17 bytes an id. Hashes lie in ascending order, an empty cell being the largest number, so a search goes from a
hash's own cell to the first that is not smaller (linear probing in order, Amble and Knuth 1974). A file, which
`deploy/cpp/vocabulary.h` reads too, has the uint64 ids, whether they are strings, and cells; then a hash a cell, and
then a place a cell. Where files lie is `vocabulary.py`'s matter.
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
_EMPTY, _NO_PLACE = np.uint64((1 << 64) - 1), np.uint32((1 << 32) - 1)
_32 = np.uint64(32)
_BLOCK = 16_384  # what a search holds stays in the second-level cache
_PART_IDS = 1 << 21
_HEAD_BYTES = 24


class Twice(Exception):
    """Two ids have one hash.

    Args:
        places: where they stand.
    """

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"ids {first} and {second} have one hash")
        self.places = (first, second)


@dataclass(frozen=True, slots=True)
class IdIndex:
    """Hashes of ids and their places.

    Args:
        size: how many ids there are.
        text: whether they are strings.
        hashes: [cells + more], ascending but for empty cells.
        places: of the ids in those cells.
        held: what keeps the file of both.
    """

    size: int
    text: bool
    hashes: U64
    places: U32
    held: object = None

    @classmethod
    def of(cls, hashes: U64, text: bool) -> IdIndex:
        """That of hashes in the order of their places, in memory.

        Raises:
            Twice: a hash is there twice.
        """
        cells = _cells(len(hashes))
        none = (np.empty(0, np.uint64), np.empty(0, np.uint32))
        kept, places = next(_placed([(hashes, np.arange(len(hashes), dtype=np.uint32))], cells), none)
        return cls(len(hashes), text, *_with_end(kept, places, cells))

    @classmethod
    def open(cls, path: Path, held: object = None) -> IdIndex:
        """That of a file; its pages are shared with all processes that open it."""
        size, text, cells = np.fromfile(path, "<u8", 3).tolist()
        hashes = np.memmap(path, np.uint64, "r", _HEAD_BYTES, cells)
        places = np.memmap(path, np.uint32, "r", _HEAD_BYTES + hashes.nbytes, cells)
        return cls(size, bool(text), np.asarray(hashes), np.asarray(places), held)

    def write(self, path: Path) -> None:
        """Writes the file that `open` reads."""
        with open(path, "wb") as file:
            for part in (_head(self.size, self.text, len(self.hashes)), self.hashes, self.places):
                part.tofile(file)

    @staticmethod
    def make(chunks: Iterable[U64], size: int, text: bool, path: Path) -> None:
        """Makes such a file in bounded memory, in a folder that takes as much again meanwhile.

        Args:
            chunks: hashes in the order of their places; size: how many; text: of what.

        Raises:
            Twice: a hash is there twice.
        """
        cells, written = _cells(size), 0
        with (
            tempfile.TemporaryDirectory(dir=path.parent) as spills,
            open(path, "wb") as file,
            open(Path(spills) / "places", "w+b") as places,
        ):
            _head(size, text, cells).tofile(file)
            for kept, at in _placed(_by_hash(chunks, size, Path(spills)), cells):
                kept.tofile(file)
                at.tofile(places)
                written += len(kept)
            kept, at = _with_end(np.empty(0, np.uint64), np.empty(0, np.uint32), cells - written)
            kept.tofile(file)
            at.tofile(places)
            places.seek(0)
            shutil.copyfileobj(places, file)
            file.seek(0)
            _head(size, text, written + len(kept)).tofile(file)

    def find(self, ids: I64 | pa.Array) -> I64:
        """The place of each id, -1 where it is not there.

        Args:
            ids: integers, or an Arrow array of strings; what a null finds means nothing.
        """
        return self.find_hashes(hashes_of(ids))

    def find_hashes(self, hashes: U64) -> I64:
        """The same of hashes."""
        out = np.empty(len(hashes), np.int64)
        cells = _cells(self.size)
        for start in range(0, len(hashes), _BLOCK):
            out[start : start + _BLOCK] = self._find(hashes[start : start + _BLOCK], cells)
        return out

    def _find(self, hashes: U64, cells: int) -> I64:
        at = _home(hashes, cells)
        there = self.hashes.take(at)
        before = np.flatnonzero(there < hashes)
        while len(before):
            at[before] += 1
            now = self.hashes.take(at[before])
            there[before] = now
            before = before[now < hashes[before]]
        places = self.places.take(at)
        return np.where((there == hashes) & (places != _NO_PLACE), places, np.int64(-1))


def hashes_of(ids: I64 | pa.Array) -> U64:
    """What stands for ids: integers, or an Arrow array of strings."""
    return hash_texts(ids) if isinstance(ids, pa.Array) else mix64_array(ids, 0)


def _head(size: int, text: bool, cells: int) -> U64:
    return np.array([size, text, cells], "<u8")


def _cells(size: int) -> int:
    """How many cells hashes are spread over."""
    return max(1, int(size / _LOAD))


def _home(hashes: U64, cells: int) -> I64:
    """The cell that each would have if it were alone; rises with the hash."""
    return (((hashes >> _32) * np.uint64(cells)) >> _32).view(np.int64)


def _by_hash(chunks: Iterable[U64], size: int, folder: Path) -> Iterator[tuple[U64, U32]]:
    """The hashes and their places in parts, each of a range of hashes, ranges ascending."""
    bits = max(0, (size // _PART_IDS).bit_length())
    shift, at = np.uint64(64 - bits), 0
    with ExitStack() as files:
        spills = [
            [files.enter_context(open(folder / f"{part}{kind}", "wb")) for kind in "hp"] for part in range(1 << bits)
        ]
        for hashes in chunks:
            numbers = (hashes >> shift).astype(np.uint16) if bits else np.zeros(len(hashes), np.uint16)
            order = np.argsort(numbers, kind="stable")
            ends = np.cumsum(np.bincount(numbers, minlength=len(spills))).tolist()
            sorted_hashes, places = hashes[order], (order + at).astype(np.uint32)
            for spill, first, stop in zip(spills, [0, *ends], ends, strict=False):
                sorted_hashes[first:stop].tofile(spill[0])
                places[first:stop].tofile(spill[1])
            at += len(hashes)
    for part in range(1 << bits):
        yield np.fromfile(folder / f"{part}h", np.uint64), np.fromfile(folder / f"{part}p", np.uint32)
        for kind in "hp":
            (folder / f"{part}{kind}").unlink()


def _placed(parts: Iterable[tuple[U64, U32]], cells: int) -> Iterator[tuple[U64, U32]]:
    """The table's cells part after part, as far as each part reaches.

    Raises:
        Twice: a hash is there twice.
    """
    first, used, ahead = 0, 0, 0  # ids, cells, and how far beyond its number the last id stands
    for hashes, places in parts:
        if not len(hashes):
            continue
        order = np.argsort(hashes)
        hashes, places = hashes[order], places[order]
        if len(same := np.flatnonzero(hashes[1:] == hashes[:-1])):
            raise Twice(*sorted(places[same[0] : same[0] + 2].tolist()))
        number = np.arange(first, first + len(hashes))
        shift = np.maximum(np.maximum.accumulate(_home(hashes, cells) - number), ahead)
        at = number + shift - used
        kept: tuple[U64, U32] = np.full(at[-1] + 1, _EMPTY), np.full(at[-1] + 1, _NO_PLACE)
        kept[0][at], kept[1][at] = hashes, places
        yield kept
        first, used, ahead = first + len(hashes), used + int(at[-1]) + 1, int(shift[-1])


def _with_end(hashes: U64, places: U32, cells: int) -> tuple[Any, Any]:
    """With empty cells up to `cells`, and one more."""
    more = max(0, cells - len(hashes)) + 1
    return np.append(hashes, np.full(more, _EMPTY)), np.append(places, np.full(more, _NO_PLACE))
