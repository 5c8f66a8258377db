"""Reads the footers of many files in parallel into one table of facts, independent of schema and filters.

`column_checks.py` and `manifest.py` evaluate the facts; `footer_index.py` stores them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import is_text
from rayrec.data.source.filters import compared_type
from rayrec.data.source.footer_index import FACTS, HIGH, LOW, FooterIndex, index_file
from rayrec.data.source.lake import TableFormat, open_table
from rayrec.storage.errors import DataError
from rayrec.storage.files import Found, find_files, format_of
from rayrec.storage.parallel import each, in_threads
from rayrec.storage.parquet import Footer, read_footer, unreadable
from rayrec.storage.retries import Patience, with_patience
from rayrec.storage.struct_fields import leaf_columns

Types = dict[str, pa.DataType]

FILES_PER_TASK = 64
FILES_FOR_RAY = 512


@dataclass(frozen=True, slots=True)
class FooterReading:
    """Options for reading footers.

    Args:
        index: facts of footers that were read before.
        patience: retries of failed reads.
        connect: context manager that connects to Ray; used for more than `FILES_FOR_RAY` files.
    """

    index: FooterIndex | None = None
    patience: Patience = field(default_factory=Patience)
    connect: Callable[[], AbstractContextManager[object]] = nullcontext


def read_footers(files: Sequence[Found], statistics: Collection[str] | None, reading: FooterReading) -> pa.Table:
    """The facts of all files, in order: the columns of `FACTS`, and minima and maxima of row groups.

    Args:
        statistics: columns that need minima and maxima; None: all columns with statistics.

    Raises:
        DataError: a file that is missing or is not Parquet.
    """
    index = reading.index or FooterIndex()
    known_positions, known = index.known(files, statistics)
    missing = np.setdiff1d(np.arange(len(files)), known_positions)
    if not len(missing):
        return known.take(pa.array(np.argsort(known_positions)))
    new = [files[number] for number in missing.tolist()]
    types = _types_of(_patiently(new[0], reading.patience), new[0].uri, statistics)
    chunks = [new[first : first + FILES_PER_TASK] for first in range(0, len(new), FILES_PER_TASK)]
    read_chunk = partial(_read_chunk, types=types, patience=reading.patience)
    with reading.connect() if len(new) > FILES_FOR_RAY else nullcontext():
        read = pa.concat_tables(list(each(read_chunk, chunks)) if len(chunks) > 1 else [read_chunk(new)])
    index.add(new, read)
    if not len(known_positions):
        return read
    facts = pa.concat_tables([known, _like(read, known)])
    return facts.take(pa.array(np.argsort(np.concatenate([known_positions, missing]))))


def _patiently(file: Found, patience: Patience) -> Footer:
    return with_patience(partial(read_footer, file.uri), file.uri, patience)


def _read_chunk(files: Sequence[Found], types: Types, patience: Patience) -> pa.Table:
    remote = "://" in files[0].uri
    footers = list(in_threads(partial(_patiently, patience=patience), files, 8)) if remote else None
    facts = _Facts(types)
    for number, file in enumerate(files):
        facts.add(file, _patiently(file, patience) if footers is None else footers[number])
    return facts.table()


class _Facts:
    """Builds the table of facts."""

    def __init__(self, types: Types) -> None:
        self._types = types
        self._columns: dict[str, list[object]] = {name: [] for name in FACTS.names}
        self._ends: dict[str, list[pa.Array]] = {side + name: [] for name in types for side in (LOW, HIGH)}
        self._last: tuple[pq.ParquetSchema, Mapping[bytes, bytes] | None, pa.Schema, bytes] | None = None

    def add(self, file: Found, footer: Footer) -> None:
        metadata, version = footer.metadata, footer.version
        arrow, written = self._schema(metadata, file.uri)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        values = (
            file.size_bytes, file.changed_ns, version.footer, version.etag, written,
            [group.num_rows for group in groups], _column_bytes(groups, arrow),
        )  # fmt: skip
        for name, value in zip(FACTS.names, values, strict=True):
            self._columns[name].append(value)
        paths = _leaf_paths(metadata.schema) if self._types else {}
        for name, kind in self._types.items():
            position = arrow.get_field_index(name)
            fits = position >= 0 and compared_type(arrow.field(position).type) == kind
            lows, highs = _ends(groups, paths.get(name) if fits else None, kind)
            self._ends[LOW + name].append(lows)
            self._ends[HIGH + name].append(highs)

    def table(self) -> pa.Table:
        columns = {column.name: pa.array(self._columns[column.name], column.type) for column in FACTS}
        lengths = columns["group_rows"].value_lengths().to_numpy()
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        for name, lists in self._ends.items():
            kind = self._types[name.removeprefix(LOW).removeprefix(HIGH)]
            flat = pa.concat_arrays([pa.array([], kind), *lists])
            columns[name] = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat)
        return pa.table({name: columns[name] for name in [*FACTS.names, *self._ends]})

    def _schema(self, metadata: pq.FileMetaData, uri: str) -> tuple[pa.Schema, bytes]:
        """The Arrow schema and its serialized form; reused if the previous file has the same schema."""
        last = self._last
        if last is None or not metadata.schema.equals(last[0]) or metadata.metadata != last[1]:
            try:
                arrow = leaf_columns(metadata.schema.to_arrow_schema()).remove_metadata()
                last = (metadata.schema, metadata.metadata, arrow, arrow.serialize().to_pybytes())
            except (pa.ArrowException, OSError) as error:
                raise unreadable(uri, error) from error
            self._last = last
        return last[2], last[3]


def _leaf_paths(schema: pq.ParquetSchema) -> dict[str, int]:
    """The position of each leaf column, by its path."""
    leaves = [schema.column(index) for index in range(len(schema))]
    # A column named `user.id` comes after the field of a struct, which it hides.
    order = sorted(range(len(leaves)), key=lambda index: leaves[index].name == leaves[index].path)
    return {leaves[index].path: index for index in order}


def _types_of(footer: Footer, uri: str, statistics: Collection[str] | None) -> Types:
    """The types in which the columns are compared, for columns that can have statistics."""
    try:
        arrow = leaf_columns(footer.metadata.schema.to_arrow_schema())
    except (pa.ArrowException, OSError) as error:
        raise unreadable(uri, error) from error
    kinds = {field.name: compared_type(field.type) for field in arrow}
    ordered = {name: kind for name, kind in kinds.items() if _ordered(kind)}
    return ordered if statistics is None else {name: ordered.get(name, pa.null()) for name in sorted(statistics)}


def _ordered(kind: pa.DataType) -> bool:
    return is_text(kind) or any(
        is_kind(kind) for is_kind in (pat.is_integer, pat.is_floating, pat.is_boolean, pat.is_temporal, pat.is_decimal)
    )


def _ends(groups: Sequence[pq.RowGroupMetaData], index: int | None, kind: pa.DataType) -> tuple[pa.Array, pa.Array]:
    """The minimum and maximum of every row group, null if unknown."""
    unknown = pa.nulls(len(groups), kind)
    # Of UUIDs the statistics are bytes, and the column is read as text.
    if index is None or (is_text(kind) and groups and groups[0].column(index).physical_type == "FIXED_LEN_BYTE_ARRAY"):
        return unknown, unknown
    lows, highs = [], []
    for group in groups:
        statistics = group.column(index).statistics
        has_min_max = statistics is not None and statistics.has_min_max
        lows.append(statistics.min if has_min_max else None)
        highs.append(statistics.max if has_min_max else None)
    try:
        return pa.array(lows, kind), pa.array(highs, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return unknown, unknown  # pyarrow cannot read the statistics of this type


def _column_bytes(groups: Iterable[pq.RowGroupMetaData], arrow: pa.Schema) -> list[float]:
    """Approximate decoded bytes per row of each column, from the first row group with rows."""
    names = arrow.names
    bytes_per_row = dict.fromkeys(names, 0.0)
    group = next((group for group in groups if group.num_rows), None)
    if group is None:
        return [0.0] * len(names)
    for index in range(group.num_columns):
        chunk = group.column(index)
        path = chunk.path_in_schema
        while path not in bytes_per_row and "." in path:
            path = path.rpartition(".")[0]
        if path in bytes_per_row:
            bytes_per_row[path] += max(chunk.total_uncompressed_size, 8 * chunk.num_values) / group.num_rows
    return [bytes_per_row[name] for name in names]


def _like(table: pa.Table, other: pa.Table) -> pa.Table:
    """The table with the columns of `other`; statistics that `table` lacks or has with another type are null."""
    columns = {}
    for column in other.schema:
        name = column.name
        if name in table.column_names and table.schema.field(name).type == column.type:
            columns[name] = table[name]
        else:
            rows = table["group_rows"].combine_chunks()
            nulls = pa.nulls(len(rows.flatten()), column.type.value_type)
            offsets = pa.array(np.concatenate([[0], np.cumsum(rows.value_lengths().to_numpy())]), pa.int32())
            columns[name] = pa.ListArray.from_arrays(offsets, nulls)
    return pa.table(columns)


@dataclass(frozen=True, slots=True)
class Indexed:
    """An index file: its path, and the counts of its files and rows."""

    path: str
    files: int
    row_groups: int
    rows: int


def write_index(
    paths: Sequence[str],
    out: str | None = None,
    columns: Collection[str] | None = None,
    table: TableFormat | None = None,
) -> Indexed:
    """Reads the footers of new and changed files, and writes the index of all files.

    Args:
        paths: files, folders, globs; local or URIs.
        out: path or URI of the index; default: in the folder, where runs look for it.
        table: each path is a table of this format; its newest version is read.
        columns: columns to store minima and maxima of, for filters; default: all with statistics.

    Raises:
        DataError: unreadable files, other formats than Parquet, or an index that cannot be written.
    """
    if out is None and (len(paths) > 1 or table is not None):
        reason = "a table has no folder" if table is not None else "several paths have no common folder"
        raise DataError(f"{reason} for the index", fix="name its file: --out FILE")
    path = index_file(paths[0]) if out is None else out
    index = FooterIndex.open(path)
    tables = [] if table is None else [open_table(table, table_path) for table_path in paths]
    files = [file for opened in tables for file in opened.files(opened.newest()).files] or find_files(paths)
    for file in files:
        if kind := format_of(file.uri):
            fix = "convert it first: rayrec data convert (runs cache the footers of files that they convert themselves)"
            raise DataError(f"an index covers Parquet files; this file is {kind}", file=file.uri, fix=fix)
    facts = read_footers(files, columns, FooterReading(index))
    if not index.save():
        raise DataError("cannot write the index", file=path, fix="name a writable file: --out FILE")
    groups = facts["group_rows"].combine_chunks().flatten()
    return Indexed(path, len(facts), len(groups), sum(groups.to_numpy().tolist()))
