"""Deltas of exports: what differs between an export and its parent, in the export's own number formats.

A delta is a folder. With its parent it makes the export that it was made from, file by file and byte by byte, which
the checksums in that export's index prove.

| file | |
|---|---|
| `delta.json` | parent, place in the chain, watermark, which rows of which files changed, checksums; written last |
| `export.json.new` | the index of the new export |
| `rows/FILE` | changed rows of FILE: row numbers (int64), then their bytes, part by part |
| `whole/FILE` | FILE, where it is new or most of it changed |

Rows of `tables.bin` are rows of tables; so an int8 row never has the scale of another version. Rows of the files of
dynamic ids are ids: new, moved and deleted ones.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from rayrec.inference import artifact
from rayrec.inference.artifact import IDS, INDEX, TABLES, ExportError, ExportIndex, read_index, scratch_folder

DELTA, NEW_INDEX, ROWS, WHOLE = "delta.json", "export.json.new", "rows", "whole"
FORMAT = 1
# A replica without a copy applies the whole chain: with more bytes, as a share of a full export, or more deltas, a full
# export is less work.
LARGEST_SHARE, LONGEST = 0.5, 100
_BLOCK_BYTES = 64  # rows of files without rows
_IDS_HEADER = 64
_READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Rows of a file: consecutive, of equal size.

    Args:
        begin: first byte of the first row in the file.
        row_bytes: bytes of a row.
        rows: number of rows in the delta.
    """

    begin: int
    row_bytes: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """`delta.json`.

    Args:
        version: of the new export.
        parent: version of the export that it is made from.
        parent_files: CRC-32 of all files of that export.
        base: version of the full export at the start of the chain.
        sequence: number of deltas since the full export, this one included.
        watermark: time of the newest data, in seconds since 1970; None if it is not known.
        chain_bytes: bytes of the deltas since the full export, this one included.
        changed: file → its changed rows.
        whole: files that are whole in the delta.
        files: path in the delta → (bytes, CRC-32).
    """

    version: str
    parent: str
    parent_files: int
    base: str
    sequence: int
    watermark: float | None
    chain_bytes: int
    changed: dict[str, list[Strip]]
    whole: list[str]
    files: dict[str, tuple[int, int]]

    @classmethod
    def parse(cls, data: bytes, path: str) -> Delta:
        """
        Raises:
            ExportError: It is not the index of a delta, or was changed.
        """
        try:
            raw = json.loads(data)
            if raw.pop("format") != FORMAT:
                raise ValueError("another format")
            checksum = raw.pop("crc32")
            if checksum != _crc_of(raw):
                raise ValueError("its text does not match its checksum")
            return _DELTA.validate_python(raw)
        except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
            text = str(error).partition("\n")[0]
            raise ExportError(f"{path} is damaged ({text}): copy the delta again, or publish a full export") from None

    def to_json(self) -> bytes:
        raw = _DELTA.dump_python(self, mode="json")
        return json.dumps({**raw, "format": FORMAT, "crc32": _crc_of(raw)}, indent=1).encode()


_DELTA = TypeAdapter(Delta)


def _crc_of(raw: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(raw, sort_keys=True).encode())


def files_checksum(index: ExportIndex) -> int:
    """One number for the contents of all files of an export."""
    return zlib.crc32(json.dumps(sorted(index.files.items())).encode())


def read_delta(folder: Path) -> Delta:
    """
    Raises:
        ExportError: The folder is not a complete delta.
    """
    try:
        return Delta.parse((folder / DELTA).read_bytes(), str(folder / DELTA))
    except OSError as error:
        raise ExportError(f"{folder} is not a complete delta: {DELTA}: {error.strerror}") from None


def write_delta(
    parent: Path, export: Path, out: Path, after: Delta | None = None, watermark: float | None = None
) -> Delta:
    """Writes what differs between two exports. The folder appears complete, or not at all.

    Args:
        parent, export: Complete exports, the new one second.
        out: Folder to create; must not exist.
        after: The delta that made the parent; None if the parent is a full export.

    Raises:
        ExportError: An export is damaged, or `out` exists or cannot be written.
    """
    if out.exists():
        raise ExportError(f"{out} already exists: choose another folder, or remove it")
    old, new = read_index(parent), read_index(export)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(out) as scratch:
            folder = scratch / "delta"
            folder.mkdir()
            changed, whole, crcs = dict[str, list[Strip]](), list[str](), dict[str, int]()
            for name, listed in new.files.items():
                if old.files.get(name) == listed:
                    continue
                strips = None
                if name in old.files:
                    strips, crc = _write_rows(parent / name, export / name, _parts(name, new), folder / ROWS / name)
                    crcs[f"{ROWS}/{name}"] = crc
                if strips is None:
                    artifact.copy_files(export, [name], folder / WHOLE)
                    whole.append(name)
                    crcs[f"{WHOLE}/{name}"] = listed[1]
                else:
                    changed[name] = strips
            (folder / NEW_INDEX).write_bytes((export / INDEX).read_bytes())
            files = artifact.listed_files(folder, {name: crc for name, crc in crcs.items() if (folder / name).exists()})
            nbytes = sum(size for size, _ in files.values())
            delta = Delta(
                version=new.version,
                parent=old.version,
                parent_files=files_checksum(old),
                base=old.version if after is None else after.base,
                sequence=1 if after is None else after.sequence + 1,
                watermark=watermark,
                chain_bytes=nbytes if after is None else after.chain_bytes + nbytes,
                changed=changed,
                whole=whole,
                files=files,
            )
            with open(folder / DELTA, "wb") as file:
                file.write(delta.to_json())
                os.fsync(file.fileno())
            folder.rename(out)
    except OSError as error:
        raise ExportError(f"{out} was not written: {error.filename or out}: {error.strerror or error}") from error
    return delta


def is_small(delta: Delta, export: ExportIndex) -> bool:
    """Whether the chain up to a delta has at most 100 deltas, and half of the bytes of the full export."""
    return delta.sequence <= LONGEST and delta.chain_bytes <= LARGEST_SHARE * sum(
        size for size, _ in export.files.values()
    )


def _parts(name: str, index: ExportIndex) -> list[tuple[int, int, int | None]]:
    """(first byte, bytes per row, number of rows or None for all that follow) of the rows of a file."""
    if name == TABLES:
        return [(place.begin, place.row_bytes, place.rows) for place in index.places]
    if name.startswith(f"{IDS}/"):
        return [(0, _IDS_HEADER, 1), (_IDS_HEADER, 8, None)]
    return [(0, _BLOCK_BYTES, None)]


def _write_rows(
    old: Path, new: Path, parts: Sequence[tuple[int, int, int | None]], out: Path
) -> tuple[list[Strip] | None, int]:
    """Writes the rows that differ; None, and nothing written, if a copy of the file is not much larger.

    Returns:
        The strips, and the CRC-32 of what was written.
    """
    if old.stat().st_size != new.stat().st_size or not new.stat().st_size:
        return None, 0
    before, after = np.memmap(old, np.uint8, "r"), np.memmap(new, np.uint8, "r")
    strips, crc, written = list[Strip](), 0, 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "wb") as file:
        covered = 0
        for begin, row_bytes, count in parts:
            size = (len(after) - begin) // row_bytes * row_bytes if count is None else count * row_bytes
            rows = _different(before, after, begin, row_bytes, size // row_bytes)
            covered = begin + size
            for part_begin, part_bytes, part in ((begin, row_bytes, rows), *_tail(before, after, covered, count)):
                if not len(part):
                    continue
                data = _rows_of(after, part_begin, part_bytes, part)
                for block in (part.astype("<i8").tobytes(), data.tobytes()):
                    crc = zlib.crc32(block, crc)
                    written += file.write(block)
                strips.append(Strip(begin=part_begin, row_bytes=part_bytes, rows=len(part)))
            if written > LARGEST_SHARE * len(after):
                break
        os.fsync(file.fileno())
    if written > LARGEST_SHARE * len(after):
        out.unlink()
        return None, 0
    return strips, crc


def _tail(
    before: np.ndarray, after: np.ndarray, begin: int, count: int | None
) -> Iterator[tuple[int, int, np.ndarray]]:
    """The bytes after the last whole row of a file, as one row, if they differ."""
    rest = len(after) - begin
    if count is None and rest and not np.array_equal(before[begin:], after[begin:]):
        yield begin, rest, np.zeros(1, np.int64)


def _different(before: np.ndarray, after: np.ndarray, begin: int, row_bytes: int, count: int) -> np.ndarray:
    """Numbers of the rows that differ, ascending."""
    found, step = [np.empty(0, np.int64)], max(1, _READ_BYTES // row_bytes)
    for start in range(0, count, step):
        stop = min(count, start + step)
        low, high = begin + start * row_bytes, begin + stop * row_bytes
        if not np.array_equal(before[low:high], after[low:high]):
            rows = (before[low:high] != after[low:high]).reshape(stop - start, row_bytes).any(1)
            found.append(np.flatnonzero(rows) + start)
    return np.concatenate(found)


def _rows_of(data: np.ndarray, begin: int, row_bytes: int, rows: np.ndarray) -> np.ndarray:
    count = int(rows[-1]) + 1
    return np.ascontiguousarray(data[begin : begin + count * row_bytes].reshape(count, row_bytes)[rows])


def check_chain(base: ExportIndex, deltas: Sequence[Delta]) -> None:
    """Checks that deltas follow each other, from an export on.

    Raises:
        ExportError: A delta is lost, doubled or out of order; names it.
    """
    version, seen = base.version, {base.version}
    first = deltas[0].sequence if deltas and deltas[0].base != base.version else 1
    for number, delta in enumerate(deltas, first):
        if delta.version in seen:
            raise ExportError(f"the delta {delta.version} comes twice: apply each delta once, in order")
        if delta.parent != version or delta.sequence != number or delta.base != deltas[0].base:
            raise ExportError(
                f"the delta {delta.version}, number {delta.sequence} after {delta.base}, needs {delta.parent}, but "
                f"follows {version}: a delta is lost or out of order; get it, or take a full export"
            )
        version = delta.version
        seen.add(version)


def apply_deltas(base: Path, deltas: Sequence[Path], out: Path) -> ExportIndex:
    """Makes the export of the last delta, with the same bytes in every file as the export that it was made from.

    Args:
        base: The full export at the start of the chain, or one that deltas of it made.
        deltas: All deltas since, in order.
        out: Empty folder to fill.

    Raises:
        ExportError: A delta is missing, doubled, out of order or damaged, or belongs to another export; names it.
        OSError: A file cannot be read or written.
    """
    base_index, steps = read_index(base), [read_delta(folder) for folder in deltas]
    check_chain(base_index, steps)
    indexes = [base_index]
    for folder, step in zip(deltas, steps, strict=True):
        artifact.check_listed(folder, step.files)
        if step.parent_files != files_checksum(indexes[-1]):
            raise ExportError(
                f"{folder} was made from another export with the version {step.parent}: publish a full one"
            )
        indexes.append(ExportIndex.parse((folder / NEW_INDEX).read_bytes(), str(folder / NEW_INDEX)))
    index = indexes[-1]
    for name in index.files:
        wholes = [number for number, step in enumerate(steps) if name in step.whole]
        first = wholes[-1] + 1 if wholes else 0
        artifact.copy_files(deltas[first - 1] / WHOLE if first else base, [name], out)
        for folder, step in list(zip(deltas, steps, strict=True))[first:]:
            if name in step.changed:
                _patch(out / name, folder / ROWS / name, step.changed[name])
    try:
        artifact.check_listed(out, index.files)
    except ExportError as error:
        raise ExportError(
            f"{base} with its deltas is not the export {index.version} ({error}): take a full one"
        ) from None
    (out / INDEX).write_bytes((deltas[-1] / NEW_INDEX if deltas else base / INDEX).read_bytes())
    return index


def _patch(path: Path, source: Path, strips: Sequence[Strip]) -> None:
    target, data, at = np.memmap(path, np.uint8, "r+"), np.memmap(source, np.uint8, "r"), 0
    for strip in strips:
        rows = data[at : at + 8 * strip.rows].view("<i8")
        at += 8 * strip.rows
        values = data[at : at + strip.row_bytes * strip.rows].reshape(strip.rows, strip.row_bytes)
        at += strip.row_bytes * strip.rows
        count = int(rows[-1]) + 1
        target[strip.begin : strip.begin + count * strip.row_bytes].reshape(count, strip.row_bytes)[rows] = values
    target.flush()
