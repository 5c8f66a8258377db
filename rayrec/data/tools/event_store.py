"""Builds a store of events: the index that `data.events` reads, from a log of any size in bounded memory.

The rows of the log are divided by the hash of their key into parts on disk, which are then sorted one at a time by key
and time (external sort); a part that is too large is first cut by key and time. An interrupted build continues after
the last complete file or part. To append, the events of the store are written into the parts first.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import decoded, is_text, without_views
from rayrec.data.arrays.buffers import I64, U64, Mask
from rayrec.data.formats.find_parquet import find_parquet
from rayrec.data.mapping import entities as index
from rayrec.data.mapping.id_index import hashes_of
from rayrec.storage.checksums import checksum
from rayrec.storage.column_names import column_missing
from rayrec.storage.errors import DataError, first_line
from rayrec.storage.files import Found
from rayrec.storage.parquet import open_parquet

_READ_ROWS = 1 << 18
_BUILD_FORMAT = 2  # of the files of an unfinished build; count up when they change
_STATE, _PARTS, _OUT = "state.json", "parts", "out"
_MOST_PARTS = 256  # each has two files, which are open at a time
_SORT_COPIES = 4  # of a part in memory while it is sorted
_NAME_BYTES = 32  # of a key that is a string, about
_SAMPLE = 4096  # rows by which a part that is too large is cut


class StoreSpec(NamedTuple):
    """What a store holds.

    Args:
        key: column of the keys, e.g. of users: integers or strings.
        time: column with the time of each event.
        columns: columns that sequences may read: numbers, booleans, times and texts.
        unit: unit of integer times, counted from 1970.
    """

    key: str
    time: str
    columns: tuple[str, ...]
    unit: index.Unit = "s"


@dataclass(frozen=True, slots=True)
class Stored:
    """A finished store.

    Args:
        events: number of events.
        keys: number of keys.
        added: events of this build.
        nbytes: bytes of the store.
    """

    events: int
    keys: int
    added: int
    nbytes: int


def build_store(
    paths: str | Sequence[str],
    store: Path,
    spec: StoreSpec,
    *,
    append: bool = False,
    memory_bytes: int = 2 << 30,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Stored:
    """Makes a store, or adds events to one. After an interruption, call it again with the same arguments to continue.

    Readers of an earlier store keep it: the new one takes its place when it is complete.

    Args:
        paths: files, folders or globs of any format that `data.train` may have. Events of one key and time keep the
            order of the files, after those that the store has.
        store: folder of the store; `STORE.building` beside it needs about twice its space meanwhile.
        append: add to the store, which has the same columns.
        memory_bytes: about the most memory; texts are in memory once each in addition.

    Raises:
        DataError: a missing column; a null key or time; columns that are neither numbers, times nor texts; a store that
            exists without `append`, or of other columns with it.
    """
    files = find_parquet(paths)
    _restore(store)
    earlier = _Earlier(store, spec) if append and store.exists() else None
    if store.exists() and not append:
        raise DataError("the store exists", file=str(store), fix="add new files with --append, or remove it")
    building = _Building(store, spec, files, earlier, memory_bytes)
    building.divide(on_progress)
    building.sort(on_progress)
    return building.finish()


class _Column(NamedTuple):
    """A column in the parts: its type in the store, and whether its values are codes of texts."""

    kind: pa.DataType
    text: bool


class _Building:
    """The folder of a build, with its state on disk."""

    def __init__(
        self, store: Path, spec: StoreSpec, files: Sequence[Found], earlier: _Earlier | None, memory_bytes: int
    ) -> None:
        self.store, self.spec, self.files, self.earlier = store, spec, files, earlier
        self.folder = store.with_name(f"{store.name}.building")
        self.text, self.zoned, self.columns = _types(files, spec, earlier)
        fields = [("hash", "<u8"), ("time", "<i8"), *([("name", "<i8")] if self.text else [])]
        for number, column in enumerate(self.columns.values()):
            fields += [(f"v{number}", _stored_as(column)), (f"n{number}", "?")]
        self.dtype = np.dtype(fields)
        rows = sum(_rows(file) for file in files) + (0 if earlier is None else earlier.events)
        row_bytes = self.dtype.itemsize + (_NAME_BYTES if self.text else 0)
        self.most_rows = max(1, memory_bytes // (_SORT_COPIES * row_bytes))  # that are sorted at a time
        parts = math.ceil(rows / self.most_rows)
        self.bits = min(max(0, parts - 1).bit_length(), _MOST_PARTS.bit_length() - 1)
        digest = hashlib.sha256()
        added_to = "" if earlier is None else earlier.name
        for text in (repr(_BUILD_FORMAT), repr(spec), repr(self.bits), *map(repr, files), added_to):
            digest.update(text.encode() + b"\n")
        self.state: dict[str, Any] = self._resumed(digest.hexdigest())
        self.texts: dict[str, dict[str, int]] = {
            name: {text: code for code, text in enumerate(self.state["texts"].get(name, ()))}
            for name, column in self.columns.items()
            if column.text
        }

    def _resumed(self, made_of: str) -> dict[str, Any]:
        """The state of an interrupted build of the same input, or of a new one."""
        file = self.folder / _STATE
        if file.exists():
            state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            if state["made_of"] == made_of:
                return state
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / _PARTS).mkdir(parents=True)
        (self.folder / _OUT).mkdir()
        texts = {} if self.earlier is None else self.earlier.texts()
        return {
            "made_of": made_of, "files": 0, "merged": self.earlier is None, "parts": [0] * (1 << self.bits),
            "names": [(0, 0)] * (1 << self.bits), "name_bytes": 0, "sorted": 0, "events": 0,
            "keys": 0, "nulls": {}, "texts": texts,
        }  # fmt: skip

    def _save(self) -> None:
        self.state["texts"] = {name: list(codes) for name, codes in self.texts.items()}
        temporary = self.folder / f"{_STATE}.new"
        temporary.write_text(json.dumps(self.state), encoding="utf-8")
        temporary.replace(self.folder / _STATE)

    def divide(self, on_progress: Callable[[str], None]) -> None:
        """Writes all rows into the parts by the hash of their key."""
        if self.state["sorted"]:
            return
        paths = [self.folder / _PARTS / f"{number:03d}" for number in range(1 << self.bits)]
        names = [path.with_suffix(".names") for path in paths]
        sizes = [*self.state["parts"], *(size for size, _ in self.state["names"])]
        for path, size in zip([*paths, *names], sizes, strict=True):
            path.touch()
            os.truncate(path, size)  # without the rows of a file that was not finished
        with ExitStack() as stack:
            counts = [count for _, count in self.state["names"]]
            files = [[stack.enter_context(open(path, "ab")) for path in of] for of in (paths, names)]
            parts = _Parts(self.bits, files[0], files[1], counts)
            if not self.state["merged"]:
                assert self.earlier is not None
                for records, keys in self.earlier.records(self.dtype):
                    parts.write(records, keys)
                self._divided(parts, merged=True)
            for number in range(self.state["files"], len(self.files)):
                for records, keys in self._records(self.files[number]):
                    parts.write(records, keys)
                self._divided(parts, files=number + 1)
                on_progress(f"read {number + 1:,} of {len(self.files):,} files")

    def _divided(self, parts: _Parts, **changes: Any) -> None:
        self.state |= {**changes, **parts.flushed()}
        self._save()

    def _records(self, file: Found) -> Iterator[tuple[npt.NDArray[np.void], pa.Array | None]]:
        """The rows of a file with their keys, a batch at a time."""
        spec = self.spec
        source = index.EntitySource(file.uri, spec.key, spec.time, spec.unit, True)
        names = list(dict.fromkeys([spec.key, spec.time, *self.columns]))
        with open_parquet(file.uri) as parquet:
            for batch in parquet.iter_batches(_READ_ROWS, columns=names, use_threads=False):
                arrays = {
                    name: decoded(batch.column(name).cast(without_views(batch.column(name).type))) for name in names
                }
                records = np.zeros(batch.num_rows, self.dtype)
                keys, text = index.keys_of(arrays[spec.key], source)
                times, zoned = index.times_of(arrays[spec.time], source)
                if (text, zoned) != (self.text, self.zoned):
                    problem = "keys are integers or strings in all files, and times have a time zone in all or in none"
                    raise DataError(problem, file=file.uri, fix="convert the file")
                records["time"] = times
                if not isinstance(keys, pa.Array):
                    records["hash"] = hashes_of(keys)
                for number, name in enumerate(self.columns):
                    try:
                        self._fill(records, number, name, arrays[name])
                    except DataError as error:
                        raise error.at(file.uri, None, None) from error
                yield records, keys if isinstance(keys, pa.Array) else None

    def _fill(self, records: npt.NDArray[np.void], number: int, name: str, array: pa.Array) -> None:
        column = self.columns[name]
        records[f"n{number}"] = array.is_null().to_numpy(zero_copy_only=False)
        if column.text:
            encoded = array.cast(pa.large_string()).dictionary_encode()
            codes = self.texts[name]
            new = [codes.setdefault(text, len(codes)) for text in encoded.dictionary.to_pylist()]
            indices = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
            records[f"v{number}"] = np.where(records[f"n{number}"], 0, np.array(new or [0], np.int32)[indices])
            return
        try:
            values = array.cast(column.kind)
        except pa.ArrowException as error:
            problem = f"the column is {array.type}, but {column.kind} in the first file: {first_line(error)}"
            raise DataError(problem, column=name, fix="convert the file") from error
        if pat.is_temporal(column.kind):
            values = values.cast(pa.int32() if column.kind.bit_width == 32 else pa.int64())
        records[f"v{number}"] = values.fill_null(False if pat.is_boolean(values.type) else 0).to_numpy(
            zero_copy_only=False
        )

    def sort(self, on_progress: Callable[[str], None]) -> None:
        """Appends the parts to the output, each sorted by hash and time."""
        columns = [f"{kind}{number}" for number in range(len(self.columns)) for kind in "vn"]
        of_keys = ["hashes", "lengths", *(["name_lengths"] if self.text else [])]
        keys, events = self.state["keys"], self.state["events"]
        sizes = dict.fromkeys(of_keys, 8 * keys) | {"times": 8 * events, "name_bytes": self.state["name_bytes"]}
        sizes |= {name: self.dtype[name].itemsize * events for name in columns}
        paths = {name: self.folder / _OUT / name for name in sizes}
        for name, path in paths.items():
            path.touch()
            os.truncate(path, sizes[name])
        for number in range(self.state["sorted"], 1 << self.bits):
            texts = self._names(number) if self.text else None
            ids = None if texts is None else texts.dictionary_encode().indices.to_numpy().astype(np.int64)
            last = None  # the key that the piece before ends with
            for records in self._pieces(number, ids):
                hashes, of_key = records["hash"], None if ids is None else ids[records["name"]]
                order = np.lexsort([array for array in (records["time"], of_key, hashes) if array is not None])
                starts = np.flatnonzero(index.first_of_keys(hashes, of_key, order))
                lengths, key = np.diff(np.append(starts, len(order))), hashes if of_key is None else of_key
                again = int(last is not None and last == key[order[0]])
                if again:
                    _add_to_last(paths["lengths"], int(lengths[0]))
                last, first = key[order[-1]], order[starts[again:]]
                output = {"hashes": hashes[first], "lengths": lengths[again:], "times": records["time"][order]}
                output |= {name: records[name][order] for name in columns}
                if texts is not None:
                    output |= _raw_texts(texts.take(pa.array(records["name"][first])))
                    self.state["name_bytes"] += len(output["name_bytes"])
                for column, name in enumerate(self.columns):
                    self.state["nulls"][name] = self.state["nulls"].get(name, 0) + int(records[f"n{column}"].sum())
                for name, values in output.items():
                    with open(paths[name], "ab") as file:
                        values.tofile(file)
                keys, events = keys + len(first), events + len(order)
            self.state |= {"sorted": number + 1, "keys": keys, "events": events}
            self._save()
            on_progress(f"sorted {number + 1:,} of {1 << self.bits:,} parts")

    def _pieces(self, number: int, ids: I64 | None) -> Iterator[npt.NDArray[np.void]]:
        """The rows of a part, in pieces that fit the memory: each has later keys and times than the one before.

        A part is too large if a key has many events. Events of one key and time are always in the same piece.

        Args:
            ids: of each name of the part, a number that equal names share.
        """
        path, rows = self.folder / _PARTS / f"{number:03d}", self.state["parts"][number] // self.dtype.itemsize
        count = math.ceil(rows / self.most_rows)
        if count <= 1:
            if rows:
                yield np.fromfile(path, self.dtype, rows)
            return
        count = 2 * count  # because the cuts are those of a sample
        sample = np.concatenate([chunk[:: max(1, rows // _SAMPLE)].copy() for chunk in self._chunks(path, rows)])
        columns = _order_of(sample, ids)
        cuts = np.lexsort(columns[::-1])[np.arange(1, count) * len(sample) // count]
        paths = [path.with_suffix(f".{piece}") for piece in range(count)]
        with ExitStack() as stack:
            pieces = [stack.enter_context(open(path, "wb")) for path in paths]
            for chunk in self._chunks(path, rows):
                piece = np.zeros(len(chunk), np.int64)
                for cut in cuts:
                    piece += _not_before(_order_of(chunk, ids), [column[cut] for column in columns])
                for to, of in zip(pieces, range(count), strict=True):
                    chunk[piece == of].tofile(to)
        for path in paths:
            if path.stat().st_size:
                yield np.fromfile(path, self.dtype)
            path.unlink()

    def _chunks(self, path: Path, rows: int) -> Iterator[npt.NDArray[np.void]]:
        with open(path, "rb") as file:
            for start in range(0, rows, self.most_rows):
                yield np.fromfile(file, self.dtype, min(self.most_rows, rows - start))

    def _names(self, number: int) -> pa.Array:
        """The keys that the rows of a part name."""
        chunks, (size, _) = [pa.array([], pa.large_binary())], self.state["names"][number]
        with open(self.folder / _PARTS / f"{number:03d}.names", "rb") as file:
            while file.tell() < size:
                (count,) = np.fromfile(file, np.int64, 1)
                offsets = np.append(0, np.cumsum(np.fromfile(file, np.int64, count)))
                buffers = [None, pa.py_buffer(offsets), pa.py_buffer(file.read(offsets[-1]))]
                chunks.append(pa.Array.from_buffers(pa.large_binary(), count, buffers))
        return pa.concat_arrays(chunks)

    def finish(self) -> Stored:
        """Writes the index and puts it in the place of the store."""
        out, done, events = self.folder / _OUT, self.folder / "done", self.state["events"]
        shutil.rmtree(done, ignore_errors=True)
        (done / index.COLUMNS).mkdir(parents=True)
        keys = self.state["keys"]
        _save_npy(done / index.STARTS, keys + 1, _offsets(out / "lengths"))
        _save_npy(done / index.TIMES, events, _values(out / "times", np.int64))
        index.write_keys(lambda: _values(out / "hashes", np.uint64), keys, self.text, done)
        if self.text:
            self._write_names(done)
        for number, (name, column) in enumerate(self.columns.items()):
            self._write_column(number, name, column, done)
        about: dict[str, Any] = {
            "format": index.FORMAT,
            "text": self.text,
            "zoned": self.zoned,
            "columns": list(self.columns),
        }
        about |= {"store": self.state["made_of"], "unit": self.spec.unit, "key": self.spec.key, "time": self.spec.time}
        files = sorted(file for file in done.rglob("*") if file.is_file())
        about["files"] = {str(file.relative_to(done)): (file.stat().st_size, checksum(file)) for file in files}
        (done / index.ABOUT).write_text(json.dumps(about), encoding="utf-8")
        size = sum(file.stat().st_size for file in done.rglob("*") if file.is_file())
        added = events - (0 if self.earlier is None else self.earlier.events)
        if self.store.exists():
            self.store.rename(self.store.with_name(f"{self.store.name}.earlier"))
        done.rename(self.store)
        shutil.rmtree(self.store.with_name(f"{self.store.name}.earlier"), ignore_errors=True)
        shutil.rmtree(self.folder)
        return Stored(events, self.state["keys"], added, size)

    def _write_names(self, done: Path) -> None:
        """Writes the keys from mapped files, as columns."""
        out = self.folder / _OUT
        with open(out / "name_offsets", "wb") as file:
            for offsets in _offsets(out / "name_lengths"):
                offsets.tofile(file)
        buffers = [None, _buffer(out / "name_offsets"), _buffer(out / "name_bytes")]
        names = pa.Array.from_buffers(pa.large_binary(), self.state["keys"], buffers)
        index.write_column(names, done / index.NAMES)

    def _write_column(self, number: int, name: str, column: _Column, done: Path) -> None:
        """Writes a column as one batch from mapped files, in which it is not copied to memory."""
        raw, count = self.folder / _OUT / f"v{number}", self.state["events"]
        narrow = self._narrowed(raw, name, column)
        values = _buffer(narrow.path)
        nulls = None
        if self.state["nulls"].get(name):
            bits = self.folder / _OUT / f"bits{number}"
            with open(bits, "wb") as file:
                for _, is_null in _chunks(self.folder / _OUT / f"n{number}", np.dtype(np.bool_)):
                    np.packbits(~is_null, bitorder="little").tofile(file)
            nulls = _buffer(bits)
        array = pa.Array.from_buffers(narrow.kind, count, [nulls, values])
        if column.text:
            array = pa.DictionaryArray.from_arrays(array, pa.array(list(self.texts[name]), pa.large_string()))
        index.write_column(array, done / index.COLUMNS / f"{list(self.columns).index(name)}.arrow")

    def _narrowed(self, raw: Path, name: str, column: _Column) -> _Raw:
        """The values as the narrowest integers that hold them, or as bits of booleans."""
        stored = np.dtype(_stored_as(column))
        target, path = stored, raw.with_suffix(".narrow")
        kind = pa.int32() if column.text else column.kind
        if pat.is_boolean(kind):
            with open(path, "wb") as file:
                for _, values in _chunks(raw, stored):
                    np.packbits(values, bitorder="little").tofile(file)
            return _Raw(path, kind)
        if not pat.is_integer(kind):
            return _Raw(raw, kind)
        low = high = 0
        for _, values in _chunks(raw, stored):
            low, high = min(low, int(values.min(initial=0))), max(high, int(values.max(initial=0)))
        target = next(one for one in map(np.dtype, ("i1", "i2", "i4", "i8", "u8")) if _holds(one, low, high))
        if target.itemsize >= stored.itemsize:
            return _Raw(raw, kind)
        with open(path, "wb") as file:
            for _, values in _chunks(raw, stored):
                values.astype(target).tofile(file)
        return _Raw(path, pa.from_numpy_dtype(target))


class _Parts:
    """The files of all parts: rows, and the keys that are strings.

    A file of keys has, for each batch of rows that has rows in its part, the number of keys, their lengths, and their
    bytes. A row has the number of its key in the file.
    """

    def __init__(self, bits: int, rows: Sequence[BinaryIO], names: Sequence[BinaryIO], counts: list[int]) -> None:
        self._bits, self._rows, self._names, self._counts = bits, rows, names, counts

    def write(self, records: npt.NDArray[np.void], keys: pa.Array | None) -> None:
        """Appends rows to their parts; their hash is set unless `keys` has their keys."""
        if keys is not None:
            encoded = keys.cast(pa.large_binary()).dictionary_encode()
            of_row, hashes = encoded.indices.to_numpy(), hashes_of(encoded.dictionary)
            names = np.empty(len(hashes), np.int64)
            for part, chosen in self._divided(hashes):
                names[chosen] = self._counts[part] + np.arange(len(chosen))
                texts = _raw_texts(encoded.dictionary.take(pa.array(chosen)))
                for values in (np.array([len(chosen)]), texts["name_lengths"], texts["name_bytes"]):
                    values.tofile(self._names[part])
                self._counts[part] += len(chosen)
            records["hash"], records["name"] = hashes[of_row], names[of_row]
        for part, chosen in self._divided(records["hash"]):
            records[chosen].tofile(self._rows[part])

    def flushed(self) -> dict[str, Any]:
        """What the state says of the files."""
        for file in (*self._rows, *self._names):
            file.flush()
        names = [(file.tell(), count) for file, count in zip(self._names, self._counts, strict=True)]
        return {"parts": [file.tell() for file in self._rows], "names": names}

    def _divided(self, hashes: U64) -> Iterator[tuple[int, I64]]:
        """Parts, and the positions of their hashes."""
        if not self._bits:
            yield 0, np.arange(len(hashes))
            return
        part = (hashes >> np.uint64(64 - self._bits)).astype(np.int64)
        order = np.argsort(part, kind="stable")
        ends = np.cumsum(np.bincount(part, minlength=len(self._rows))).tolist()
        for number, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
            if start < stop:
                yield number, order[start:stop]


def _order_of(records: npt.NDArray[np.void], ids: I64 | None) -> list[npt.NDArray[Any]]:
    """What rows are sorted by, the first first."""
    return [records["hash"], *([] if ids is None else [ids[records["name"]]]), records["time"]]


def _not_before(columns: list[npt.NDArray[Any]], cut: list[Any]) -> Mask:
    """[n], whether rows come at or after a cut."""
    after, equal = np.zeros(len(columns[0]), np.bool_), np.ones(len(columns[0]), np.bool_)
    for column, value in zip(columns, cut, strict=True):
        after |= equal & (column > value)
        equal &= column == value
    return after | equal


def _add_to_last(path: Path, count: int) -> None:
    """Adds to the last int64 of a file."""
    with open(path, "r+b") as file:
        file.seek(-8, os.SEEK_END)
        (value,) = np.fromfile(file, np.int64, 1)
        file.seek(-8, os.SEEK_END)
        (value + np.array([count])).tofile(file)


def _raw_texts(texts: pa.Array) -> dict[str, npt.NDArray[Any]]:
    """Lengths and bytes of large binaries."""
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    values = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]] if len(texts) and data else np.empty(0, np.uint8)
    return {"name_lengths": np.diff(bounds), "name_bytes": values}


class _Raw(NamedTuple):
    path: Path
    kind: pa.DataType


class _Earlier:
    """The store that new events are added to."""

    def __init__(self, store: Path, spec: StoreSpec) -> None:
        about = json.loads((store / index.ABOUT).read_text(encoding="utf-8"))
        found = (about.get("key"), about.get("time"), tuple(about["columns"]), about.get("unit"))
        if "store" not in about or found != (spec.key, spec.time, spec.columns, spec.unit):
            raise DataError(
                f"the store has key, time, columns and unit {found}, not {tuple(spec)}",
                file=str(store),
                fix="name the same columns in the same order, or make another store",
            )
        index.check_store(store)
        self.name, self.text, self.zoned, self.spec = about["store"], about["text"], about["zoned"], spec
        source = index.EntitySource(str(store), spec.key, spec.time, spec.unit, True)
        self.table = index.EntityTable.of(source, store)
        assert self.table.times is not None
        self.events = len(self.table.times)
        if self.text and self.table.key_names is None:
            problem = "the store is of an earlier version of rayrec and lacks the texts of its keys"
            raise DataError(problem, file=str(store), fix="build it again from all files")

    def texts(self) -> dict[str, list[str]]:
        columns = {name: self.table.column(name) for name in self.spec.columns}
        return {name: array.dictionary.to_pylist() for name, array in columns.items() if pat.is_dictionary(array.type)}

    def records(self, dtype: np.dtype[Any]) -> Iterator[tuple[npt.NDArray[np.void], pa.Array | None]]:
        """The events by key and time with their keys, a batch at a time."""
        starts, times, names = np.asarray(self.table.starts), self.table.times, self.table.key_names
        hashes = np.empty(self.table.keys.size, np.uint64)
        known = self.table.keys.positions < self.table.keys.size
        hashes[self.table.keys.positions[known]] = self.table.keys.hashes[known]
        assert times is not None
        for start in range(0, self.events, _READ_ROWS):
            stop = min(start + _READ_ROWS, self.events)
            records = np.zeros(stop - start, dtype)
            key = np.searchsorted(starts, np.arange(start, stop), side="right") - 1
            records["time"] = times[start:stop]
            if names is None:
                records["hash"] = hashes[key]
            for number, name in enumerate(self.spec.columns):
                array = self.table.column(name).slice(start, stop - start)
                records[f"n{number}"] = array.is_null().to_numpy(zero_copy_only=False)
                values = array.indices if pat.is_dictionary(array.type) else array
                if pat.is_temporal(values.type):
                    values = values.cast(pa.int32() if values.type.bit_width == 32 else pa.int64())
                empty = False if pat.is_boolean(values.type) else 0
                records[f"v{number}"] = values.fill_null(empty).to_numpy(zero_copy_only=False)
            yield records, None if names is None else names.take(pa.array(key))


def _restore(store: Path) -> None:
    """Undoes a replacement that was interrupted between its two steps."""
    earlier = store.with_name(f"{store.name}.earlier")
    if earlier.exists() and not store.exists():
        earlier.rename(store)


def _types(
    files: Sequence[Found], spec: StoreSpec, earlier: _Earlier | None
) -> tuple[bool, bool | None, dict[str, _Column]]:
    """Whether keys are strings, whether times have a zone, and the columns."""
    with open_parquet(files[0].uri) as parquet:
        schema = parquet.schema_arrow
    for name in (spec.key, spec.time, *spec.columns):
        if name not in schema.names:
            raise column_missing(name, schema, files[0].uri, "correct the name of the column")
    key, time = _plain(schema.field(spec.key).type), _plain(schema.field(spec.time).type)
    text, zoned = (
        is_text(key),
        (time.tz is not None if pat.is_timestamp(time) else False if pat.is_date(time) else None),
    )
    columns: dict[str, _Column] = {}
    for name in spec.columns:
        kind = _plain(schema.field(name).type)
        if is_text(kind):
            columns[name] = _Column(pa.large_string(), text=True)
        elif pat.is_primitive(kind) and not pat.is_float16(kind):
            columns[name] = _Column(
                pa.int64() if pat.is_integer(kind) and not pat.is_uint64(kind) else kind, text=False
            )
        else:
            raise DataError(
                f"a store holds numbers, times and texts, not {kind}",
                file=files[0].uri,
                column=name,
                fix="leave the column out, or write its values into columns of their own",
            )
    if earlier is not None and (text, zoned) != (earlier.text, earlier.zoned):
        problem = "keys and times have other types than in the store"
        raise DataError(problem, file=files[0].uri, fix="convert the files")
    return text, zoned, columns


def _plain(kind: pa.DataType) -> pa.DataType:
    return without_views(kind.value_type if pat.is_dictionary(kind) else kind)


def _stored_as(column: _Column) -> str:
    """The NumPy type of a column in the parts."""
    if column.text:
        return "<i4"
    if pat.is_temporal(column.kind):
        return "<i4" if column.kind.bit_width == 32 else "<i8"
    return str(np.dtype(column.kind.to_pandas_dtype()).str)


def _rows(file: Found) -> int:
    with open_parquet(file.uri) as parquet:
        return int(parquet.metadata.num_rows)


def _holds(dtype: np.dtype[Any], low: int, high: int) -> bool:
    limits = np.iinfo(dtype)
    return bool(limits.min <= low and high <= limits.max)


def _chunks(path: Path, dtype: np.dtype[Any], count: int = 1 << 22) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """A file of values in chunks of a multiple of 8, each with the number of its first value."""
    start = 0
    with open(path, "rb") as file:
        while len(values := np.fromfile(file, dtype, count)):
            yield start, values
            start += len(values)


def _values(path: Path, kind: type[Any]) -> Iterator[npt.NDArray[Any]]:
    for _, values in _chunks(path, np.dtype(kind)):
        yield values


def _offsets(lengths: Path) -> Iterator[I64]:
    """0 and the running sums of the lengths of a file."""
    last = np.zeros(1, np.int64)
    yield last
    for values in _values(lengths, np.int64):
        yield last[-1:] + np.cumsum(values)
        last = last + values.sum()


def _save_npy(path: Path, count: int, chunks: Iterable[I64]) -> None:
    """As `np.save` of the chunks together."""
    with open(path, "wb") as file:
        head = {"descr": "<i8", "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, head)
        for values in chunks:
            values.tofile(file)


def _buffer(path: Path) -> pa.Buffer:
    if not path.stat().st_size:
        return pa.py_buffer(b"")
    with pa.memory_map(str(path)) as file:
        return file.read_buffer()
