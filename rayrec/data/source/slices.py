"""Reads slices of row groups into Arrow tables. Huge row groups are decoded in chunks.

An unreadable file yields nulls and an error; `data.read.bad_rows` decides what follows. A file that changed, or storage
that does not respond, raises, because the rows may be good. The decoded size of a row group is checked first: a few
kilobytes can expand to gigabytes.
"""

from __future__ import annotations

import json
import resource
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from rayrec.data.arrays.widening import widened
from rayrec.data.source.file_table import DataFile
from rayrec.data.source.filters import Condition, rows_that_pass
from rayrec.data.source.manifest import Manifest
from rayrec.data.source.row_share import ROW_SHARE, row_shares
from rayrec.data.source.windows import Slices
from rayrec.storage.errors import DataError, DataUnavailable, FileChanged
from rayrec.storage.parquet import open_parquet, unreadable
from rayrec.storage.retries import Patience, with_patience
from rayrec.storage.struct_fields import columns_named

Columns = tuple[tuple[str, pa.DataType], ...]

_CHUNK_ROWS = 65_536
# Row groups that stay open for further slices, at least.
_STREAMS = 64
# Limit of decoded bytes per read.
MAX_BYTES = 1 << 30
_CHUNK_BYTES = 128 << 20
# Bytes per value of an encoded text column below which its texts repeat. Arrow would look up every text of a column of
# distinct ones.
_REPEATED_BYTES = 6


@dataclass(frozen=True, slots=True)
class FileSlice:
    """Rows `[start, stop)` of a row group, with all that a process needs to read them."""

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
    """Rows `[start, stop)` of a table that could not be read and are null."""

    start: int
    stop: int
    error: DataError


@dataclass(frozen=True, slots=True)
class Origin:
    """Locates the rows of a table that was read from slices. `selected` are the rows taken, None for all."""

    slices: tuple[FileSlice, ...]
    selected: I64 | None

    def locate(self, row: int) -> tuple[str, int, int]:
        position = row if self.selected is None else int(self.selected[row])
        for item in self.slices:
            if position < item.rows:
                return item.uri, item.row_group, item.first_row + item.start + position
            position -= item.rows
        raise IndexError(row)


def within(slices: Sequence[FileSlice], start: int, stop: int) -> Iterator[FileSlice]:
    """The rows `[start, stop)` of the concatenated slices, as slices."""
    first_row = 0
    for item in slices:
        overlap_start, overlap_stop = max(start, first_row), min(stop, first_row + item.rows)
        if overlap_start < overlap_stop:
            yield replace(
                item, start=item.start + overlap_start - first_row, stop=item.start + overlap_stop - first_row
            )
        first_row += item.rows


def read_slices(
    slices: Sequence[FileSlice],
    columns: Columns,
    patience: Patience,
    streams: RowGroupStreams | None = None,
    encoded: Collection[str] = (),
) -> tuple[pa.Table, list[Unreadable]]:
    """Reads the rows of all slices; adjacent slices of a file in one call.

    Args:
        columns: names and types, as in the manifest.
        patience: retries of failed reads.
        streams: row groups that are already decoded in part; without them, decoding starts at the row group's start.
        encoded: text columns that may be returned dictionary-encoded.

    Returns:
        the table, and the ranges of rows that could not be read.

    Raises:
        DataUnavailable: the storage does not respond.
        FileChanged: a file was rewritten.
    """
    streams = streams or RowGroupStreams()
    tables: list[pa.Table] = []
    unreadable: list[Unreadable] = []
    first_row = 0
    for uri, group in groupby(slices, key=lambda item: item.uri):
        same_file = list(group)
        rows = sum(item.rows for item in same_file)
        try:
            tables += with_patience(partial(_read_file, same_file, columns, streams, encoded), uri, patience)
        except (DataUnavailable, FileChanged):
            raise  # the rows may be good
        except DataError as error:
            tables.append(pa.table({name: pa.nulls(rows, kind) for name, kind in columns}))
            unreadable.append(Unreadable(first_row, first_row + rows, error))
        first_row += rows
    table = tables[0] if len(tables) == 1 else pa.concat_tables(_alike(tables))
    plain = pa.schema([field.with_type(without_views(field.type)) for field in table.schema])
    return table if plain == table.schema else table.cast(plain), unreadable


def _alike(tables: list[pa.Table]) -> list[pa.Table]:
    """The tables with the columns decoded that are not dictionary-encoded in all of them."""
    schema = tables[0].schema
    if all(table.schema.equals(schema) for table in tables):
        return tables
    fields = []
    for number, field in enumerate(schema):
        differs = len({table.schema.types[number] for table in tables}) > 1 and is_dictionary(field.type)
        fields.append(field.with_type(field.type.value_type) if differs else field)
    return [table.cast(pa.schema(fields)) for table in tables]


def slices_of(manifest: Manifest, number: int) -> tuple[FileSlice, ...]:
    """The slices of a window."""
    first_slice, last_slice = manifest.windows.edges[number : number + 2]
    columns = manifest.windows.slices(np.arange(first_slice, last_slice))
    files, file_index = np.unique(columns.file, return_inverse=True)
    return tuple(slices_from(replace(columns, file=file_index.reshape(-1)), manifest.files.take(files)))


def slices_from(columns: Slices, files: Sequence[DataFile]) -> list[FileSlice]:
    """Slice objects from columns; `columns.file` are indices into `files`."""
    values = (columns.row_group, columns.group_rows, columns.start, columns.stop, columns.first_row)
    rows = zip(columns.file.tolist(), *(column.tolist() for column in values), strict=True)
    return [FileSlice(files[file], *rest) for file, *rest in rows]


def passing(
    slices: Sequence[FileSlice], table: pa.Table, unreadable: Sequence[Unreadable], filters: Sequence[Condition]
) -> Mask:
    """True for rows that are not deleted and pass the filters, and for unreadable rows, which are reported later."""
    mask, first_row = rows_that_pass(table, filters), 0
    for item in slices:
        if item.file.deleted:
            rows = np.frombuffer(item.file.deleted, np.int64) - item.first_row - item.start
            mask[first_row + rows[slice(*np.searchsorted(rows, [0, item.rows]))]] = False
        first_row += item.rows
    for gap in unreadable:
        mask[gap.start : gap.stop] = True
    return mask


def _read_file(
    slices: Sequence[FileSlice], columns: Columns, streams: RowGroupStreams, encoded: Collection[str]
) -> list[pa.Table]:
    """Reads slices of one file, with partition columns."""
    file = slices[0].file
    partition, names_in_file = dict(file.partition), json.loads(file.names or "{}")
    names = [names_in_file.get(name, name) for name, _ in columns if name not in partition]
    try:
        in_file = {names_in_file.get(name, name) for name in encoded}
        tables = [*_tables(slices, [name for name in names if name is not None], streams, in_file)]
        if ROW_SHARE in names and ROW_SHARE not in tables[0].column_names:
            tables = [*_with_row_share(tables, slices)]
        return [_in_order(table, columns, partition, names_in_file) for table in tables]
    except (pa.ArrowException, OSError, KeyError) as error:
        streams.close()
        open_parquet(slices[0].uri, slices[0].file.version).close()  # raises FileChanged if the file was replaced
        raise unreadable(slices[0].uri, error) from error


def _with_row_share(tables: Sequence[pa.Table], slices: Sequence[FileSlice]) -> Iterator[pa.Table]:
    """Adds `row_share` to tables that together are the slices of one file."""
    rows = np.concatenate([np.arange(item.rows) + item.first_row + item.start for item in slices])
    shares, first = row_shares(slices[0].uri, slices[0].file.size_bytes, rows), 0
    for table in tables:
        yield table.append_column(ROW_SHARE, shares.slice(first, table.num_rows))
        first += table.num_rows


def _in_order(
    table: pa.Table,
    columns: Columns,
    partition: Mapping[str, int | str | None],
    names_in_file: Mapping[str, str | None],
) -> pa.Table:
    """Casts and reorders the columns of a file; adds partition columns, and nulls for missing columns."""
    arrays = []
    for name, kind in columns:
        if name in partition:
            arrays.append(pa.repeat(pa.scalar(partition[name], kind), table.num_rows))
        elif names_in_file.get(name, name) in table.column_names:
            array = table.column(names_in_file.get(name, name))
            is_encoded = is_dictionary(array.type) and array.type.value_type == kind
            arrays.append(array if is_encoded else widened(array, kind))
        else:  # the manifest has checked that the column may be missing
            arrays.append(pa.nulls(table.num_rows, kind))
    return pa.table(arrays, names=[name for name, _ in columns])


def _check_groups(parquet: pq.ParquetFile, slices: Sequence[FileSlice]) -> None:
    for item in slices:
        groups = parquet.metadata.num_row_groups
        if item.row_group >= groups or parquet.metadata.row_group(item.row_group).num_rows != item.group_rows:
            raise FileChanged(
                "the file's row groups changed during the run",
                file=item.uri,
                row_group=item.row_group,
                fix="do not overwrite files during a run; start the run again",
            )


def _tables(
    slices: Sequence[FileSlice], columns: list[str], streams: RowGroupStreams, encoded: Collection[str | None]
) -> Iterator[pa.Table]:
    for complete, group in groupby(slices, key=lambda item: item.rows == item.group_rows):
        group_slices = list(group)
        if not complete:
            yield from (streams.read(item, columns, encoded) for item in group_slices)
            continue
        first = group_slices[0]
        repeated = partial(_repeated_texts, encoded, first.row_group)
        with open_parquet(first.uri, first.file.version, repeated) as parquet:
            _check_groups(parquet, group_slices)
            for item in group_slices:
                check_size(parquet, item.uri, item.row_group, columns)
            # One thread per task: Ray runs as many tasks as there are CPUs.
            groups = [item.row_group for item in group_slices]
            yield columns_named(parquet.read_row_groups(groups, columns=columns, use_threads=False), columns)


def _repeated_texts(columns: Collection[str | None], row_group: int, metadata: pq.FileMetaData) -> list[str]:
    """Those of the columns whose texts repeat in a row group, so that their dictionary is much shorter."""
    if not columns or row_group >= metadata.num_row_groups:
        return []
    group = metadata.row_group(row_group)
    chunks = [group.column(index) for index in range(group.num_columns)]
    return [
        chunk.path_in_schema
        for chunk in chunks
        if chunk.path_in_schema in columns
        and chunk.physical_type == "BYTE_ARRAY"
        and chunk.has_dictionary_page
        and chunk.total_uncompressed_size < _REPEATED_BYTES * chunk.num_values
    ]


@dataclass(slots=True)
class _Stream:
    """A row group decoded up to row `position`; `rest` holds rows decoded beyond that."""

    parquet: pq.ParquetFile
    batches: Iterator[pa.RecordBatch]
    position: int = 0
    rest: pa.RecordBatch | None = None


class RowGroupStreams:
    """Decoders of row groups that are too large for memory; each continues where the previous slice ended.

    Not thread-safe.

    Args:
        count: row groups that are read in turn. A row group that had to be closed is decoded from its start again. At
            most half of the process's file limit stays open.
        min_open: row groups that stay open in any case.
        chunk_rows: rows to decode at a time.
    """

    def __init__(self, count: int = 1, min_open: int = _STREAMS, chunk_rows: int = _CHUNK_ROWS) -> None:
        self._limit = max(min_open, min(count, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        self._chunk_rows = chunk_rows
        self._open: OrderedDict[tuple[str, int], _Stream] = OrderedDict()

    def read(self, item: FileSlice, columns: list[str], encoded: Collection[str | None] = ()) -> pa.Table:
        """Reads a slice. Slices of a row group in ascending order decode it once.

        Args:
            encoded: text columns that may be returned dictionary-encoded.

        Raises:
            DataError, pyarrow.ArrowException, OSError: as `open_parquet` and pyarrow.
        """
        key = (item.uri, item.row_group)
        stream = self._open.pop(key, None)
        if stream is None or stream.position > item.start:
            stream = _begin(item, columns, self._chunk_rows, encoded)
        batches = []
        while stream.position < item.stop:
            batch = next(stream.batches) if stream.rest is None else stream.rest
            stream.rest = None
            offset, end = max(item.start - stream.position, 0), min(item.stop - stream.position, batch.num_rows)
            if offset < end:
                batches.append(batch.slice(offset, end - offset))
            stream.position += end
            if end < batch.num_rows:
                stream.rest = batch.slice(end)
        if stream.position < item.group_rows:
            self._open[key] = stream
        else:
            stream.parquet.close()
        while len(self._open) > self._limit:
            self._open.popitem(last=False)[1].parquet.close()
        return columns_named(pa.Table.from_batches(batches), columns)

    def close(self) -> None:
        """Closes all row groups."""
        while self._open:
            self._open.popitem()[1].parquet.close()


def _begin(item: FileSlice, columns: list[str], chunk_rows: int, encoded: Collection[str | None]) -> _Stream:
    parquet = open_parquet(item.uri, item.file.version, partial(_repeated_texts, encoded, item.row_group))
    _check_groups(parquet, [item])
    is_slice_sized = chunk_rows // 2 < item.rows <= 2 * chunk_rows  # one of several slices of equal size
    rows = check_size(parquet, item.uri, item.row_group, columns, item.rows if is_slice_sized else chunk_rows)
    batches = parquet.iter_batches(rows, row_groups=[item.row_group], columns=columns, use_threads=False)
    return _Stream(parquet, batches)


def check_size(
    parquet: pq.ParquetFile,
    uri: str,
    row_group: int,
    columns: Sequence[str],
    chunk_rows: int | None = None,
    *,
    max_bytes: int | None = None,
    chunk_bytes: int = _CHUNK_BYTES,
) -> int:
    """Rows of a row group to decode at a time.

    Args:
        columns: the columns to read.
        chunk_rows: maximum rows of a chunk; None: the complete row group.
        max_bytes: limit of decoded bytes; None: `MAX_BYTES`.
        chunk_bytes: target size of a chunk.

    Raises:
        DataError: decoding would need more than `max_bytes`, by the footer or by the longest text in a dictionary.
    """
    max_bytes = MAX_BYTES if max_bytes is None else max_bytes
    group = parquet.metadata.row_group(row_group)
    chunks = [group.column(index) for index in range(group.num_columns)]
    read_chunks = [chunk for chunk in chunks if _column_of(chunk.path_in_schema, columns) is not None]
    sizes = [max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in read_chunks]
    bytes_per_row = sum(sizes) / max(1, group.num_rows)
    rows = max(1, group.num_rows if chunk_rows is None else min(chunk_rows, group.num_rows))
    if chunk_rows is not None and rows * bytes_per_row > chunk_bytes:
        rows = max(1, int(chunk_bytes / bytes_per_row))
    if rows * bytes_per_row > max_bytes:
        raise _too_large(uri, row_group, max_bytes, int(rows * bytes_per_row), rows)
    # A text is stored once in the dictionary but decoded for every row; it is at most as long as the dictionary page.
    texts = [c for c in read_chunks if c.physical_type == "BYTE_ARRAY" and c.has_dictionary_page]
    occurrences = {c.path_in_schema: rows * c.num_values / max(1, group.num_rows) for c in texts}
    suspects = [
        c.path_in_schema for c in texts if occurrences[c.path_in_schema] * c.total_uncompressed_size > max_bytes
    ]
    for path, longest in _longest(uri, row_group, suspects).items() if suspects else ():
        if occurrences[path] * longest > max_bytes:
            column = _column_of(path, columns)
            raise _too_large(uri, row_group, max_bytes, int(occurrences[path] * longest), rows, column)
    return rows


def _column_of(path: str, columns: Sequence[str]) -> str | None:
    """The column, struct or field of a struct among `columns` that a path of the Parquet schema belongs to."""
    while path and path not in columns:
        path = path.rpartition(".")[0]
    return path or None


def _longest(uri: str, row_group: int, paths: list[str]) -> dict[str, int]:
    """Bytes of the longest text in each column's dictionary. Reads the dictionary, not the rows."""
    with open_parquet(uri, read_dictionary=lambda _: paths) as parquet:
        batch = next(parquet.iter_batches(1, row_groups=[row_group], columns=paths, use_threads=False))
    longest = {}
    for path in paths:
        leaf = batch.column(_column_of(path, batch.schema.names) or path)
        while pa.types.is_struct(leaf.type):
            leaf = leaf.field(0)
        leaf = unnest(leaf).leaf if is_list(leaf.type) else leaf
        longest[path] = (pc.max(pc.binary_length(leaf.dictionary)).as_py() or 0) if is_dictionary(leaf.type) else 0
    return longest


def _too_large(
    uri: str, row_group: int, max_bytes: int, needed: int, rows: int, column: str | None = None
) -> DataError:
    return DataError(
        f"decoding {rows:,} rows needs {needed / 1e9:,.1f} GB of memory (limit {max_bytes / 1e9:,.1f} GB)",
        file=uri,
        row_group=row_group,
        column=column,
        fix="rewrite the file with smaller row groups and shorter values, or remove it if you do not trust it",
    )
