"""Tables beside the rows, whose columns are joined to rows by key and time: entities and events.

Entities are items or users with, e.g., a category and a price. With `valid_from`, a key has versions, and a row gets
the one that was valid at the time of the row. Of events, such as clicks, a row gets the last ones of its key that are
earlier than the row. In this file, "version" means a row of either table.

A table is indexed once per node, in the user's cache, and all processes map the index into memory; an export contains
the index of the columns that it reads. An index is a folder:

| file | contents |
|---|---|
| `about.json` | the format, the number of versions, the type of the keys, the columns |
| `keys` | `IdIndex` of the hashes of the keys |
| `names.arrow` | of keys that are strings: the keys, as binary; keys of the same hash follow each other |
| `first.npy` | if any have the same hash: [hashes + 1] int64, the first key of each hash, and the number of keys |
| `starts.npy` | [keys + 1] int64, the first version of each key |
| `times.npy` | [versions] int64, µs since 1970 when each version becomes valid, ascending in a key; with `valid_from` |
| `columns/N.arrow` | the values of a column, by version |
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import decoded, impossible_times, int64_of, is_text, micros_of, shown, without_views
from rayrec.data.arrays.buffers import I64, U64, Mask
from rayrec.data.arrays.lists import offsets_of
from rayrec.data.arrays.widening import concatenated
from rayrec.data.mapping.id_index import IdIndex, hashes_of
from rayrec.data.mapping.node_cache import node_folder
from rayrec.storage.cache import CACHE_BYTES, Held
from rayrec.storage.checksums import checksum
from rayrec.storage.column_names import column_missing
from rayrec.storage.errors import DataError
from rayrec.storage.files import Found
from rayrec.storage.parquet import open_parquet

Unit = Literal["s", "ms", "us", "ns"]
FORMAT = 2
_READABLE = (1, FORMAT)  # 1: without the names of keys, which were then known by their hash alone
ABOUT, KEYS, STARTS, TIMES, COLUMNS = "about.json", "keys", "starts.npy", "times.npy", "columns"
NAMES, FIRST = "names.arrow", "first.npy"
_ORDER, _VALUES = "order.npy", "values.arrow"  # in the cache: the source's row of each version, and one column
_LIMIT = ("RAYREC_ENTITIES_BYTES", CACHE_BYTES)
_SELECT_ROWS = 1 << 22
_KEPT = 64  # opened indexes in a process


class EntitySource(NamedTuple):
    """Where the versions of entities are.

    Args:
        path: a file, folder or glob, or an index of an export.
        key: column of the keys, integers or strings. Without `valid_from`, each key is there once.
        valid_from: column with the time when a version becomes valid.
        unit: unit of integer times, counted from 1970.
        events: several versions of a key may have the same time; they keep the order of the files.
        where: columns, each with the values of the rows that are read. Default: all rows.
    """

    path: str
    key: str
    valid_from: str | None = None
    unit: Unit = "s"
    events: bool = False
    where: tuple[tuple[str, tuple[int | str, ...]], ...] = ()


@lru_cache(_KEPT)
def open_entities(source: EntitySource) -> EntityTable:
    """Opens the index of a table of entities, and makes it if necessary.

    Raises:
        DataError: missing or unreadable files; a missing column; keys that are null, duplicated, or neither integers
            nor strings; times that are null, or neither timestamps, dates nor integers of the unit.
    """
    folder = Path(source.path)
    if (folder / ABOUT).exists():
        return _open_index(source, folder)
    from rayrec.data.formats.find_parquet import find_parquet  # a service opens indexes only

    files = find_parquet(source.path)
    key = _key(source, files)

    def make(folder: Path, _: int) -> str:
        _make_index(source, files, folder)
        return key

    held = _cached(key, files, make)
    return EntityTable.of(source, held.folder, held, files)


def _open_index(source: EntitySource, folder: Path) -> EntityTable:
    """Opens an index of an export, or a store of events, of which the events of `where` are selected first."""
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    if "store" not in about:
        return EntityTable.of(source, folder)
    check_store(folder, checksums=False)
    found, wanted = (about["key"], about["time"]), (source.key, source.valid_from)
    if found != wanted:
        problem = f"the store of events has key and time {found}, not {wanted}"
        raise DataError(problem, file=source.path, fix="correct `key` and `time` of the table in data.events")
    whole = EntityTable.of(source, folder)
    if not source.where:
        return whole
    key = _digest(about["store"], repr(source.where))

    def make(folder: Path, _: int) -> str:
        _select(whole, folder)
        return key

    assert whole.times is not None
    held = node_folder("entities", key, whole.times.nbytes, make, _LIMIT)
    return EntityTable.of(source, held.folder, held, whole=whole, name=key)


def check_store(folder: Path, *, checksums: bool = True) -> None:
    """Checks that the files of a store of events are complete.

    Args:
        checksums: also read every file and compare its checksum.

    Raises:
        DataError: a file is missing or damaged.
    """
    fix = "copy the whole folder again, or build the store again"
    listed = json.loads((folder / ABOUT).read_text(encoding="utf-8")).get("files", {})  # none in earlier versions
    for name, (size, crc) in listed.items():
        path = folder / name
        actual = path.stat().st_size if path.exists() else 0
        if actual != size:
            raise DataError(f"a file of the store has {actual:,} bytes instead of {size:,}", file=str(path), fix=fix)
        if checksums and checksum(path) != crc:
            raise DataError("a file of the store is damaged (wrong checksum)", file=str(path), fix=fix)


def close_entities() -> None:
    """Empties the cache of `open_entities`."""
    open_entities.cache_clear()


@dataclass(frozen=True)
class EntityTable:
    """The versions of entities, by key and time.

    Args:
        source: the table.
        text: True if the keys are strings.
        zoned: True if its times have a time zone; None for integers.
        names: the columns of the index.
        key_names: [keys] binary, the keys, if they are strings; None in an index of an earlier version of rayrec.
        first: [hashes + 1], the first key of each hash, if any keys have the same one.
        whole: the store of events of which these are a selection.
        name: key of the selection in the cache.
    """

    source: EntitySource
    text: bool
    zoned: bool | None
    names: tuple[str, ...]
    keys: IdIndex
    key_names: pa.Array | None
    first: I64 | None
    starts: I64
    times: I64 | None
    folder: Path
    files: Sequence[Found] = ()
    held: Held | None = None
    whole: EntityTable | None = None
    name: str = ""
    _columns: dict[str, tuple[pa.Array, Path | None, Held | None]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        source: EntitySource,
        folder: Path,
        held: Held | None = None,
        files: Sequence[Found] = (),
        whole: EntityTable | None = None,
        name: str = "",
    ) -> EntityTable:
        """Opens an index, in an export or in the cache."""
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        if about["format"] not in _READABLE:
            raise DataError(
                f"the index of entities has format {about['format']}, this version of rayrec reads {_READABLE}",
                file=str(folder),
                fix="export the run again",
            )
        times = np.load(folder / TIMES, mmap_mode="r") if source.valid_from is not None else None
        starts = np.load(folder / STARTS, mmap_mode="r")
        return cls(
            source=source,
            text=about["text"],
            zoned=about["zoned"],
            names=tuple(about["columns"]),
            keys=IdIndex.open(folder / KEYS),
            key_names=_mapped(folder / NAMES) if (folder / NAMES).exists() else None,
            first=np.load(folder / FIRST, mmap_mode="r") if (folder / FIRST).exists() else None,
            starts=starts,
            times=times,
            folder=folder,
            files=files,
            held=held,
            whole=whole,
            name=name,
        )

    def versions(self, keys: I64 | pa.Array, times: I64 | None = None) -> I64:
        """The version of each key: the last one that became valid at or before the time; -1 if there is none.

        Args:
            keys: [n] integers, or an Arrow array of strings. The result for nulls is undefined.
            times: [n] µs since 1970; without `valid_from`, None.
        """
        first, end = self._of_keys(keys)
        if times is None:
            return np.where(first < end, first, -1)
        later = self._first_after(first, end, times)
        return np.where(first < later, later - 1, -1)

    def last(self, keys: I64 | pa.Array, times: I64, count: int) -> tuple[I64, I64]:
        """The last events of each key that are earlier than the time.

        Args:
            keys: as in `versions`.
            times: [n] µs since 1970.
            count: most events of each.

        Returns:
            the events of all keys, oldest first, and their offsets [n + 1].
        """
        first, end = self._of_keys(keys)
        end = self._first_after(first, end, times - 1)
        lengths = np.minimum(end - first, count)
        offsets = offsets_of(lengths)
        events = np.repeat(end - lengths - offsets[:-1], lengths)
        events += np.arange(len(events))
        return events, offsets

    def has(self, keys: I64 | pa.Array) -> Mask:
        """[n], whether the table has each key, as in `versions`, at any time."""
        first, end = self._of_keys(keys)
        return first < end

    def _of_keys(self, keys: I64 | pa.Array) -> tuple[I64, I64]:
        """The range of each key's versions; empty for unknown keys."""
        found = self._found(keys)
        if len(self.starts) == 1:
            return np.zeros(len(found), np.int64), np.zeros(len(found), np.int64)
        key = np.maximum(found, 0)
        first = self.starts[key]
        return first, np.where(found < 0, first, self.starts[key + 1])

    def _found(self, keys: I64 | pa.Array) -> I64:
        """The position of each key, -1 for unknown keys."""
        found = self.keys.find(keys)
        if self.key_names is None:
            return found
        assert isinstance(keys, pa.Array)
        end = found + 1
        if self.first is not None:
            known = np.maximum(found, 0)
            found, end = np.where(found < 0, -1, self.first[known]), self.first[known + 1]
        texts, unsure = keys.cast(pa.large_binary()), np.flatnonzero(found >= 0)
        while len(unsure):  # the hash is that of other keys, too, or of another key alone
            names = self.key_names.take(pa.array(found[unsure]))
            equal = pc.equal(names, texts.take(pa.array(unsure))).fill_null(True)
            unsure = unsure[~equal.to_numpy(zero_copy_only=False)]
            found[unsure] += 1
            over = found[unsure] == end[unsure]
            found[unsure[over]] = -1
            unsure = unsure[~over]
        return found

    def _first_after(self, first: I64, end: I64, times: I64) -> I64:
        """The first version in each range that is later than a time; the end of the range if none is."""
        assert self.times is not None
        low, high = first.copy(), end.copy()
        while len(unknown := np.flatnonzero(low < high)):
            middle = (low[unknown] + high[unknown]) // 2
            later = self.times[middle] > times[unknown]
            high[unknown] = np.where(later, middle, high[unknown])
            low[unknown] = np.where(later, low[unknown], middle + 1)
        return low

    def values(self, name: str, versions: I64) -> pa.Array:
        """The values of a column for versions; null for -1.

        Raises:
            DataError: the table has no such column.
        """
        missing = versions < 0
        taken = self.column(name).take(pa.array(versions, mask=missing if missing.any() else None))
        return decoded(taken)

    def column(self, name: str) -> pa.Array:
        """A column by version.

        Raises:
            DataError: the table has no such column.
        """
        return self._opened(name)[0]

    def write(self, folder: Path, columns: list[str]) -> None:
        """Writes an index of some columns for `open_entities`.

        Raises:
            DataError: the table has no such column, or is a store with a damaged file.
        """
        if not self.files:
            check_store(self.folder if self.whole is None else self.whole.folder)
        (folder / COLUMNS).mkdir(parents=True)
        for name in (KEYS, NAMES, FIRST, STARTS, TIMES):
            if (self.folder / name).exists():
                shutil.copyfile(self.folder / name, folder / name)
        about = {"format": FORMAT, "text": self.text, "zoned": self.zoned, "columns": columns}
        for number, name in enumerate(columns):
            array, path, _ = self._opened(name)
            target = folder / COLUMNS / f"{number}.arrow"
            if path is None:
                write_column(array, target)
            else:
                shutil.copyfile(path, target)
        (folder / ABOUT).write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def _opened(self, name: str) -> tuple[pa.Array, Path | None, Held | None]:
        """A column, its file if it has one of its own, and what keeps the file in the cache."""
        if name not in self._columns and name not in self.names and name == self.source.valid_from:
            buffers = [None, pa.py_buffer(self.times)]  # the times of a store are not stored again
            kind = pa.timestamp("us", "UTC" if self.zoned else None)
            self._columns[name] = (
                pa.Array.from_buffers(kind, len(self.starts) and int(self.starts[-1]), buffers),
                None,
                None,
            )
        if name not in self._columns:
            if name not in self.names:
                schema = pa.schema([(other, pa.null()) for other in self.names])
                fix = "correct the name, or add the column to the table of entities"
                raise column_missing(name, schema, self.source.path, fix)
            in_cache = bool(self.files) or self.whole is not None
            self._columns[name] = self._of_cache(name) if in_cache else self._of_export(name)
        return self._columns[name]

    def _of_export(self, name: str) -> tuple[pa.Array, Path, None]:
        path = self.folder / COLUMNS / f"{self.names.index(name)}.arrow"
        return _mapped(path), path, None

    def _of_cache(self, name: str) -> tuple[pa.Array, Path, Held]:
        whole = self.whole
        key = _digest(_key(self.source, self.files) if whole is None else self.name, name)

        def make(folder: Path, _: int) -> str:
            order = pa.array(np.load(self.folder / _ORDER, mmap_mode="r"))
            column = _read(self.source, self.files, [name])[name] if whole is None else whole.column(name)
            write_column(column.take(order), folder / _VALUES)
            return key

        held = _cached(key, self.files, make)
        return _mapped(held.folder / _VALUES), held.folder / _VALUES, held


def _make_index(source: EntitySource, files: Sequence[Found], folder: Path) -> None:
    """Writes an index without its columns, which are added when they are first read."""
    wanted = [source.key] + ([source.valid_from] if source.valid_from is not None else [])
    columns = _read(source, files, wanted)
    keys, text = keys_of(columns[source.key], source)
    times, zoned = times_of(columns[source.valid_from], source) if source.valid_from is not None else (None, None)
    hashes, numbers = numbered(keys)
    order = np.lexsort([array for array in (times, numbers, hashes) if array is not None])
    is_first = first_of_keys(hashes, numbers, order)
    again = np.zeros(len(order), np.bool_) if source.events else ~is_first
    if times is not None:
        again[1:] &= times[order][1:] == times[order][:-1]
    if again.any():
        raise _duplicate(source, columns, order, int(np.flatnonzero(again)[0]))
    starts = np.flatnonzero(is_first)
    write_keys(lambda: [hashes[order[starts]]], len(starts), text, folder)
    if isinstance(keys, pa.Array):
        write_column(keys.take(pa.array(order[starts])).cast(pa.large_binary()), folder / NAMES)
    np.save(folder / STARTS, np.append(starts, len(order)).astype(np.int64))
    np.save(folder / _ORDER, order)
    if times is not None:
        np.save(folder / TIMES, times[order])
    names = [name for name in _names_in(files) if name not in wanted] + wanted
    about = {"format": FORMAT, "text": text, "zoned": zoned, "columns": names}
    (folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")


def _select(whole: EntityTable, folder: Path) -> None:
    """Writes an index of the events of `where`, without its columns, which are added when they are first read."""
    conditions = whole.source.where
    chosen = np.ones(len(whole.column(conditions[0][0])), np.bool_)
    for name, values in conditions:
        column = whole.column(name)
        for start in range(0, len(column), _SELECT_ROWS):
            part = pa.chunked_array([decoded(column.slice(start, _SELECT_ROWS))])
            equal = _equal_one_of(part, name, values, whole.source.path)
            chosen[start : start + _SELECT_ROWS] &= equal.to_numpy()
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(chosen, dtype=np.int64)])
    order = np.flatnonzero(chosen)
    assert whole.times is not None
    np.save(folder / _ORDER, order)
    np.save(folder / TIMES, whole.times[order])
    np.save(folder / STARTS, before[whole.starts])
    for name in (KEYS, NAMES, FIRST):
        if (whole.folder / name).exists():
            shutil.copyfile(whole.folder / name, folder / name)
    about = {"format": FORMAT, "text": whole.text, "zoned": whole.zoned, "columns": list(whole.names)}
    (folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")


def numbered(keys: I64 | pa.Array) -> tuple[U64, I64 | None]:
    """The hash of each key; of strings also a number, which only equal keys share."""
    if not isinstance(keys, pa.Array):
        return hashes_of(keys), None
    encoded = keys.cast(pa.large_binary()).dictionary_encode()
    numbers = encoded.indices.to_numpy().astype(np.int64)
    return hashes_of(encoded.dictionary)[numbers], numbers


def first_of_keys(hashes: U64, numbers: I64 | None, order: I64) -> Mask:
    """[n], True at the first version of each key, in an order by hash and number."""
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = hashes[order][1:] != hashes[order][:-1]
    if numbers is not None:
        is_first[1:] |= numbers[order][1:] != numbers[order][:-1]
    return is_first


def write_keys(chunks: Callable[[], Iterable[U64]], count: int, text: bool, folder: Path) -> None:
    """Writes the index of the ascending hashes of keys, of which several may be equal."""
    size = sum(len(hashes) for hashes, _ in _distinct(chunks())) if text else count
    IdIndex.make((hashes for hashes, _ in _distinct(chunks())), size, text, folder / KEYS)
    if size < count:
        np.save(folder / FIRST, np.concatenate([*(first for _, first in _distinct(chunks())), np.array([count])]))


def _distinct(chunks: Iterable[U64]) -> Iterator[tuple[U64, I64]]:
    """The distinct hashes of each chunk, and the position of the first key of each."""
    start, last = 0, np.empty(0, np.uint64)
    for hashes in chunks:
        before = np.append(last, hashes[:-1]) if len(last) else np.append(~hashes[:1], hashes[:-1])
        first = np.flatnonzero(hashes != before[: len(hashes)])
        yield hashes[first], start + first
        start, last = start + len(hashes), hashes[-1:] if len(hashes) else last


def _read(source: EntitySource, files: Sequence[Found], columns: list[str]) -> dict[str, pa.Array]:
    """Columns of the rows that are read, in the order of the files."""
    conditions, tables = dict(source.where), []
    wanted = list(dict.fromkeys([*columns, *conditions]))
    for file in files:
        with open_parquet(file.uri) as parquet:
            for name in wanted:
                if name not in parquet.schema_arrow.names:
                    fix = "correct the name of the column, or add it to the table"
                    raise column_missing(name, parquet.schema_arrow, file.uri, fix)
            tables.append(parquet.read(wanted, use_threads=False))
    table = concatenated(tables, [file.uri for file in files])
    for name, values in conditions.items():
        table = table.filter(_equal_one_of(table.column(name), name, values, source.path))
    return {name: _one(table.column(name)) for name in columns}


def _equal_one_of(column: pa.ChunkedArray, name: str, values: Sequence[int | str], path: str) -> pa.ChunkedArray:
    kind = column.type.value_type if pat.is_dictionary(column.type) else column.type
    if pat.is_integer(kind) and kind.bit_width < 64:
        kind = pa.int64()  # a store has narrow integers
    try:
        return pc.is_in(column.cast(kind), pa.array(values).cast(kind))
    except (pa.ArrowException, TypeError) as error:
        problem = f"where: {name} is {kind}, and cannot be one of {[*values]}"
        raise DataError(problem, file=path, column=name, fix="give values of the column's type") from error


def _one(column: pa.ChunkedArray) -> pa.Array:
    kind = without_views(column.type)
    column = column if kind == column.type else column.cast(kind)
    return decoded(_large_chunks(column))


def _large_chunks(column: pa.ChunkedArray) -> pa.Array:
    """One array; texts and lists of more than 2³¹ bytes or values need offsets of 64 bits."""
    kind = _large_type(column.type)
    return (column if kind == column.type else column.cast(kind)).combine_chunks()


def _large_type(kind: pa.DataType) -> pa.DataType:
    if pat.is_string(kind):
        return pa.large_string()
    if pat.is_binary(kind):
        return pa.large_binary()
    return pa.large_list(_large_type(kind.value_type)) if pat.is_list(kind) else kind


def _names_in(files: Sequence[Found]) -> list[str]:
    with open_parquet(files[0].uri) as parquet:
        return list(parquet.schema_arrow.names)


def keys_of(array: pa.Array, source: EntitySource) -> tuple[I64 | pa.Array, bool]:
    if array.null_count:
        raise DataError(
            f"{array.null_count:,} of {len(array):,} entities have no key",
            file=source.path,
            column=source.key,
            fix="remove these rows from the table",
        )
    if is_text(array.type):
        return array, True
    if not pat.is_integer(array.type):
        raise DataError(
            f"keys of entities are integers or strings, not {array.type}",
            file=source.path,
            column=source.key,
            fix="cast the column to the type that the rows' column has",
        )
    return int64_of(array), False


def times_of(array: pa.Array, source: EntitySource) -> tuple[I64, bool | None]:
    column = source.valid_from
    if array.null_count:
        problem, fix = (
            f"{array.null_count:,} of {len(array):,} entities have no time",
            "set their times, or remove them",
        )
        raise DataError(problem, file=source.path, column=column, fix=fix)
    if pat.is_timestamp(array.type) or pat.is_date(array.type):
        zoned = pat.is_timestamp(array.type) and array.type.tz is not None
        return micros_of(array, source.unit), zoned
    if not pat.is_integer(array.type):
        raise DataError(
            f"times of entities are timestamps, dates or integers, not {array.type}",
            file=source.path,
            column=column,
            fix="convert the column, e.g. with rayrec data convert",
        )
    if len(outside := impossible_times(array, source.unit)):
        raise DataError(
            f"a time must be between 1970 and 2200 in {source.unit}",
            file=source.path,
            column=column,
            value=shown(array, int(outside[0])),
            fix=f"correct the column, or `unit` (now {source.unit})",
        )
    return micros_of(array, source.unit), None


def _duplicate(source: EntitySource, columns: dict[str, pa.Array], order: I64, position: int) -> DataError:
    rows = sorted(order[position - 1 : position + 1].tolist())
    keys = [shown(columns[source.key], row) for row in rows]
    where = f"rows {rows[0]} and {rows[1]} of the table"
    if source.valid_from is None:
        problem = f"a key is there twice, in {where}"
        fix = "keep one row per key, or set valid_from to the column with the time of each version"
        return DataError(problem, file=source.path, column=source.key, value=keys[0], fix=fix)
    time = shown(columns[source.valid_from], rows[0])
    problem = f"two versions of a key become valid at the same time, in {where}"
    value = f"{keys[0]} at {time}"
    return DataError(problem, file=source.path, column=source.key, value=value, fix="keep one of them")


def write_column(array: pa.Array, path: Path) -> None:
    batch = pa.record_batch([array], ["value"])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def _mapped(path: Path) -> pa.Array:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).get_batch(0).column(0)


def _cached(key: str, files: Sequence[Found], make: Callable[[Path, int], str]) -> Held:
    return node_folder("entities", key, sum(file.size_bytes for file in files), make, _LIMIT)


def _key(source: EntitySource, files: Sequence[Found]) -> str:
    """Names an index by the files and their versions."""
    return _digest(repr((FORMAT, source)), *map(repr, files))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:32]
