"""Reads parts of files into Arrow tables: whole row groups where possible, in chunks where they are huge.

A file that cannot be read gives nulls and an error beside them; what that means for the run is decided elsewhere. One
that was written anew, or whose storage is away, ends the reading: its rows may be good. How large a row group will be
is judged before it is decoded: a few kilobytes can hold many gigabytes.
"""

from __future__ import annotations

import json
import resource
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.types import is_dictionary

from rayrec.data.arrays.arrow_types import is_list, without_views
from rayrec.data.arrays.buffers import I64, Mask
from rayrec.data.arrays.lists import unnest
from rayrec.data.source.file_table import DataFile
from rayrec.data.source.filters import Condition, rows_that_pass
from rayrec.data.source.manifest import Manifest
from rayrec.data.source.windows import Slices
from rayrec.storage.errors import DataError, DataUnavailable, FileChanged
from rayrec.storage.parquet import open_parquet, unreadable
from rayrec.storage.retries import Patience, with_patience

Columns = tuple[tuple[str, pa.DataType], ...]

_CHUNK_ROWS = 65_536
_STREAMS = 64  # that are open at a time, at least
MOST_BYTES = 1 << 30  # that one read may decode
_CHUNK_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class FileSlice:
    """Rows `[start, stop)` of a row group, with all that is needed to read them anywhere."""

    file: DataFile
    row_group: int
    group_rows: int
    start: int
    stop: int
    first_row: int

    @property
    def uri(self) -> str:
        return self.file.uri

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Rows `[start, stop)` of a table that could not be read; they hold nulls."""

    start: int
    stop: int
    error: DataError


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the rows of a table that was read from slices come from; `wanted` are the rows taken, None for all."""

    slices: tuple[FileSlice, ...]
    wanted: I64 | None

    def locate(self, row: int) -> tuple[str, int, int]:
        at = row if self.wanted is None else int(self.wanted[row])
        for part in self.slices:
            if at < part.rows:
                return part.uri, part.row_group, part.first_row + part.start + at
            at -= part.rows
        raise IndexError(row)


def within(slices: Sequence[FileSlice], start: int, stop: int) -> Iterator[FileSlice]:
    """The parts of the slices that hold the rows `[start, stop)` of all of them."""
    at = 0
    for part in slices:
        first, last = max(start, at), min(stop, at + part.rows)
        if first < last:
            yield replace(part, start=part.start + first - at, stop=part.start + last - at)
        at += part.rows


def read_slices(
    slices: Sequence[FileSlice], columns: Columns, patience: Patience, streams: RowGroupStreams | None = None
) -> tuple[pa.Table, list[Unreadable]]:
    """The rows of all slices; neighbours in one file are read by one call.

    Args:
        columns: names and types, as in the manifest.
        patience: with reads that fail.
        streams: row groups that were decoded in part before; without, each slice is decoded from its group's start.

    Raises:
        DataUnavailable: the storage does not answer.
        FileChanged: a file was written anew.
    """
    streams = streams or RowGroupStreams()
    tables: list[pa.Table] = []
    missing: list[Unreadable] = []
    at = 0
    for uri, parts in groupby(slices, key=lambda part: part.uri):
        same_file = list(parts)
        rows = sum(part.rows for part in same_file)
        try:
            tables += with_patience(partial(_read_file, same_file, columns, streams), uri, patience)
        except (DataUnavailable, FileChanged):
            raise  # the rows may be good
        except DataError as error:
            tables.append(pa.table({name: pa.nulls(rows, kind) for name, kind in columns}))
            missing.append(Unreadable(at, at + rows, error))
        at += rows
    table = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
    plain = pa.schema([field.with_type(without_views(field.type)) for field in table.schema])
    return table if plain == table.schema else table.cast(plain), missing


def slices_of(manifest: Manifest, number: int) -> tuple[FileSlice, ...]:
    """The parts of files that a window consists of."""
    first, last = manifest.windows.edges[number : number + 2]
    found = manifest.windows.slices(np.arange(first, last))
    files, places = np.unique(found.file, return_inverse=True)
    return tuple(slices_from(replace(found, file=places.reshape(-1)), manifest.files.take(files)))


def slices_from(columns: Slices, files: Sequence[DataFile]) -> list[FileSlice]:
    """Slices whose files are numbered by their places in `files`."""
    values = (columns.row_group, columns.group_rows, columns.start, columns.stop, columns.first_row)
    rows = zip(columns.file.tolist(), *(column.tolist() for column in values), strict=True)
    return [FileSlice(files[file], *rest) for file, *rest in rows]


def passing(
    slices: Sequence[FileSlice], table: pa.Table, missing: Sequence[Unreadable], filters: Sequence[Condition]
) -> Mask:
    """For every row of slices whether it is not deleted and passes the filters; unreadable rows do, to be reported."""
    mask, at = rows_that_pass(table, filters), 0
    for part in slices:
        if part.file.deleted:
            rows = np.frombuffer(part.file.deleted, np.int64) - part.first_row - part.start
            mask[at + rows[slice(*np.searchsorted(rows, [0, part.rows]))]] = False
        at += part.rows
    for some in missing:
        mask[some.start : some.stop] = True
    return mask


def _read_file(parts: Sequence[FileSlice], columns: Columns, streams: RowGroupStreams) -> list[pa.Table]:
    """Slices of one file, its partitions among their columns."""
    file = parts[0].file
    partition, own = dict(file.partition), json.loads(file.names or "{}")
    names = [own.get(name, name) for name, _ in columns if name not in partition]
    try:
        tables = _tables(parts, [name for name in names if name is not None], streams)
        return [_in_order(table, columns, partition, own) for table in tables]
    except (pa.ArrowException, OSError, KeyError) as error:
        streams.close()
        open_parquet(parts[0].uri, parts[0].file.version).close()  # which says so of a file that is another one now
        raise unreadable(parts[0].uri, error) from error


def _in_order(
    table: pa.Table, columns: Columns, partition: Mapping[str, int | str | None], own: Mapping[str, str | None]
) -> pa.Table:
    """The columns in their order and types, whatever those are in the file; null where the file lacks one."""
    arrays = []
    for name, kind in columns:
        if name in partition:
            arrays.append(pa.repeat(pa.scalar(partition[name], kind), table.num_rows))
        elif own.get(name, name) in table.column_names:
            found = table.column(own.get(name, name))
            arrays.append(found if found.type == kind else found.cast(kind))
        else:  # the manifest refuses files that may not
            arrays.append(pa.nulls(table.num_rows, kind))
    return pa.table(arrays, names=[name for name, _ in columns])


def _check_groups(parquet: pq.ParquetFile, parts: Sequence[FileSlice]) -> None:
    for part in parts:
        groups = parquet.metadata.num_row_groups
        if part.row_group >= groups or parquet.metadata.row_group(part.row_group).num_rows != part.group_rows:
            raise FileChanged(
                "the file's row groups changed while the run was going on",
                file=part.uri,
                row_group=part.row_group,
                fix="do not write to files that are being read; start the run again",
            )


def _tables(parts: Sequence[FileSlice], columns: list[str], streams: RowGroupStreams) -> Iterator[pa.Table]:
    for whole, group in groupby(parts, key=lambda part: part.rows == part.group_rows):
        some = list(group)
        if not whole:
            yield from (streams.read(part, columns) for part in some)
            continue
        with open_parquet(some[0].uri, some[0].file.version) as parquet:
            _check_groups(parquet, some)
            for part in some:
                check_size(parquet, part.uri, part.row_group, columns)
            # One thread a task: Ray runs as many tasks as there are CPUs.
            yield parquet.read_row_groups([part.row_group for part in some], columns=columns, use_threads=False)


@dataclass(slots=True)
class _Stream:
    """A row group that is decoded as far as row `at`; `rest` holds what was decoded beyond."""

    parquet: pq.ParquetFile
    batches: Iterator[pa.RecordBatch]
    at: int = 0
    rest: pa.RecordBatch | None = None


class RowGroupStreams:
    """Row groups too large to be in memory whole, decoded in chunks: who reads on goes on where the last part ended.

    Not for several threads at once.

    Args:
        most: row groups that are read in turn: one that had to be closed is decoded from its start again. No more are
            open than half of the files that the process may have.
    """

    def __init__(self, most: int = 1) -> None:
        self._most = max(_STREAMS, min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        self._open: OrderedDict[tuple[str, int], _Stream] = OrderedDict()

    def read(self, part: FileSlice, columns: list[str]) -> pa.Table:
        """A part of a row group; parts of one that come in their order cost one decoding of it.

        Raises:
            DataError, pyarrow.ArrowException, OSError: as `open_parquet` and pyarrow.
        """
        key = (part.uri, part.row_group)
        stream = self._open.pop(key, None)
        if stream is None or stream.at > part.start:
            stream = _begin(part, columns)
        kept = []
        while stream.at < part.stop:
            batch = next(stream.batches) if stream.rest is None else stream.rest
            stream.rest = None
            first, last = max(part.start - stream.at, 0), min(part.stop - stream.at, batch.num_rows)
            if first < last:
                kept.append(batch.slice(first, last - first))
            stream.at += last
            if last < batch.num_rows:
                stream.rest = batch.slice(last)
        if stream.at < part.group_rows:
            self._open[key] = stream
        else:
            stream.parquet.close()
        while len(self._open) > self._most:
            self._open.popitem(last=False)[1].parquet.close()
        return pa.Table.from_batches(kept)

    def close(self) -> None:
        """Forgets what was decoded."""
        while self._open:
            self._open.popitem()[1].parquet.close()


def _begin(part: FileSlice, columns: list[str]) -> _Stream:
    parquet = open_parquet(part.uri, part.file.version)
    _check_groups(parquet, [part])
    whole = _CHUNK_ROWS // 2 < part.rows <= 2 * _CHUNK_ROWS  # one of many of that size: decoded on demand
    rows = check_size(parquet, part.uri, part.row_group, columns, part.rows if whole else _CHUNK_ROWS)
    batches = parquet.iter_batches(rows, row_groups=[part.row_group], columns=columns, use_threads=False)
    return _Stream(parquet, batches)


def check_size(
    parquet: pq.ParquetFile, uri: str, row_group: int, columns: Sequence[str], chunk_rows: int | None = None
) -> int:
    """How many rows of a row group to decode at a time.

    Args:
        columns: that are read.
        chunk_rows: decode at most so many; None: all of them at once.

    Raises:
        DataError: that would take more than `MOST_BYTES`, by what the footer says or by the longest of its texts.
    """
    group = parquet.metadata.row_group(row_group)
    chunks = [group.column(index) for index in range(group.num_columns)]
    read = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]
    sizes = [max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in read]
    a_row = sum(sizes) / max(1, group.num_rows)
    rows = max(1, group.num_rows if chunk_rows is None else min(chunk_rows, group.num_rows))
    if chunk_rows is not None and rows * a_row > _CHUNK_BYTES:
        rows = max(1, int(_CHUNK_BYTES / a_row))
    if rows * a_row > MOST_BYTES:
        raise _too_large(uri, row_group, int(rows * a_row), rows)
    # Texts that a dictionary page holds once come as often as rows name them: each is as long as the page, at most.
    texts = [c for c in read if c.physical_type == "BYTE_ARRAY" and c.has_dictionary_page]
    times = {c.path_in_schema: rows * c.num_values / max(1, group.num_rows) for c in texts}
    doubtful = [c.path_in_schema for c in texts if times[c.path_in_schema] * c.total_uncompressed_size > MOST_BYTES]
    for path, longest in _longest(uri, row_group, doubtful).items() if doubtful else ():
        if times[path] * longest > MOST_BYTES:
            raise _too_large(uri, row_group, int(times[path] * longest), rows, path.partition(".")[0])
    return rows


def _longest(uri: str, row_group: int, paths: list[str]) -> dict[str, int]:
    """Bytes of the longest text in the dictionary of each column; it is read, its rows are not."""
    with open_parquet(uri, read_dictionary=paths) as parquet:
        batch = next(parquet.iter_batches(1, row_groups=[row_group], columns=paths, use_threads=False))
    found = {}
    for path in paths:
        leaf = batch.column(path.partition(".")[0])
        leaf = unnest(leaf).leaf if is_list(leaf.type) else leaf
        found[path] = (pc.max(pc.binary_length(leaf.dictionary)).as_py() or 0) if is_dictionary(leaf.type) else 0
    return found


def _too_large(uri: str, row_group: int, needed: int, rows: int, column: str | None = None) -> DataError:
    return DataError(
        f"{rows:,} rows would take {needed / 1e9:,.1f} GB of memory when they are decoded",
        file=uri,
        row_group=row_group,
        column=column,
        fix="write the file with smaller row groups and shorter values, if it can be trusted; else remove it",
    )
