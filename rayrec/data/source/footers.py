"""Footers of many files: read in parallel, into columns for any later schema and filters.

What follows from them for one data set is `manifest.py`'s matter, where they are kept is `footer_index.py`'s.
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
from rayrec.data.source.filters import plain_type
from rayrec.data.source.footer_index import FACTS, HIGH, LOW, FooterIndex, index_file
from rayrec.data.source.lake import TableFormat, open_table
from rayrec.storage.errors import DataError
from rayrec.storage.files import Found, find_files, format_of
from rayrec.storage.parallel import each, in_threads
from rayrec.storage.parquet import Footer, read_footer, unreadable
from rayrec.storage.retries import Patience, with_patience

Types = dict[str, pa.DataType]

FILES_PER_TASK = 64
FILES_FOR_RAY = 512


@dataclass(frozen=True, slots=True)
class FooterReading:
    """How footers are read.

    Args:
        index: those that were read before.
        patience: with reads that fail.
        connect: connects Ray for the time of a block, where there are more than `FILES_FOR_RAY` to read.
    """

    index: FooterIndex | None = None
    patience: Patience = field(default_factory=Patience)
    connect: Callable[[], AbstractContextManager[object]] = nullcontext


def read_footers(found: Sequence[Found], statistics: Collection[str] | None, how: FooterReading) -> pa.Table:
    """The facts of all files, in their order: the columns of `FACTS`, and of some columns the ends of every row group.

    Args:
        statistics: of which columns; None: of all that have some.

    Raises:
        DataError: a file that is gone or is not Parquet.
    """
    index = how.index or FooterIndex()
    places, known = index.known(found, statistics)
    missing = np.setdiff1d(np.arange(len(found)), places)
    if not len(missing):
        return known.take(pa.array(np.argsort(places)))
    new = [found[number] for number in missing.tolist()]
    types = _types_of(_patiently(new[0], how.patience), new[0].uri, statistics)
    chunks = [new[first : first + FILES_PER_TASK] for first in range(0, len(new), FILES_PER_TASK)]
    read_chunk = partial(_read_chunk, types=types, patience=how.patience)
    with how.connect() if len(new) > FILES_FOR_RAY else nullcontext():
        read = pa.concat_tables(list(each(read_chunk, chunks)) if len(chunks) > 1 else [read_chunk(new)])
    index.add(new, read)
    if not len(places):
        return read
    both = pa.concat_tables([known, _like(read, known)])
    return both.take(pa.array(np.argsort(np.concatenate([places, missing]))))


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
    """Collects the facts of files, column by column."""

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
        paths = {metadata.schema.column(index).path: index for index in range(metadata.num_columns)}
        for name, kind in self._types.items():
            place = arrow.get_field_index(name)
            fits = place >= 0 and plain_type(arrow.field(place).type) == kind
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
        """The Arrow schema, made once for files that are alike."""
        last = self._last
        if last is None or not metadata.schema.equals(last[0]) or metadata.metadata != last[1]:
            try:
                arrow = metadata.schema.to_arrow_schema().remove_metadata()
                last = (metadata.schema, metadata.metadata, arrow, arrow.serialize().to_pybytes())
            except (pa.ArrowException, OSError) as error:
                raise unreadable(uri, error) from error
            self._last = last
        return last[2], last[3]


def _types_of(footer: Footer, uri: str, statistics: Collection[str] | None) -> Types:
    """The types that values of columns are compared in, as far as there can be statistics of them."""
    try:
        arrow = footer.metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        raise unreadable(uri, error) from error
    kinds = {field.name: plain_type(field.type) for field in arrow}
    ordered = {name: kind for name, kind in kinds.items() if _ordered(kind)}
    return ordered if statistics is None else {name: ordered.get(name, pa.null()) for name in sorted(statistics)}


def _ordered(kind: pa.DataType) -> bool:
    return is_text(kind) or any(
        is_kind(kind) for is_kind in (pat.is_integer, pat.is_floating, pat.is_boolean, pat.is_temporal, pat.is_decimal)
    )


def _ends(groups: Sequence[pq.RowGroupMetaData], index: int | None, kind: pa.DataType) -> tuple[pa.Array, pa.Array]:
    """The smallest and the largest value of every row group, null where they are not known."""
    unknown = pa.nulls(len(groups), kind)
    if index is None:
        return unknown, unknown
    lows, highs = [], []
    for group in groups:
        statistics = group.column(index).statistics
        known = statistics is not None and statistics.has_min_max
        lows.append(statistics.min if known else None)
        highs.append(statistics.max if known else None)
    try:
        return pa.array(lows, kind), pa.array(highs, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return unknown, unknown  # a type whose statistics pyarrow does not read


def _column_bytes(groups: Iterable[pq.RowGroupMetaData], arrow: pa.Schema) -> list[float]:
    """About how many bytes a decoded row takes in each column, judged by the file's first row group with rows."""
    names = arrow.names
    found = dict.fromkeys(names, 0.0)
    group = next((group for group in groups if group.num_rows), None)
    if group is None:
        return [0.0] * len(names)
    for index in range(group.num_columns):
        chunk = group.column(index)
        path = chunk.path_in_schema
        while path not in found and "." in path:
            path = path.rpartition(".")[0]
        if path in found:
            found[path] += max(chunk.total_uncompressed_size, 8 * chunk.num_values) / group.num_rows
    return [found[name] for name in names]


def _like(table: pa.Table, other: pa.Table) -> pa.Table:
    """With the columns of the other; statistics of another type there are not known here."""
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
    """An index: its path, and what it holds."""

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
    """Reads the footers of files that are new or changed, and writes what all say.

    Args:
        paths: files, folders, globs; local or URIs.
        out: path or URI of the index; default: in the folder, where runs look for it.
        table: each path is a table of this format, whose newest version is read.
        columns: whose smallest and largest values are kept, for filters; default: all that have some.

    Raises:
        DataError: files that cannot be read or are no Parquet, or an index that cannot be written.
    """
    if out is None and (len(paths) > 1 or table is not None):
        what = "a table has no folder of its own" if table is not None else "several paths have no folder of their own"
        raise DataError(f"{what} for the index", fix="name its file: --out FILE")
    place = index_file(paths[0]) if out is None else out
    index = FooterIndex.open(place)
    opened = [] if table is None else [open_table(table, path) for path in paths]
    found = [file for one in opened for file in one.files(one.newest()).files] or find_files(paths)
    for file in found:
        if kind := format_of(file.uri):
            fix = "convert it first: rayrec data convert; a run that is given such files keeps what it made of them"
            raise DataError(f"an index is of Parquet files, and this is {kind}", file=file.uri, fix=fix)
    facts = read_footers(found, columns, FooterReading(index))
    if not index.save():
        raise DataError("the index cannot be written", file=place, fix="name a file that can be: --out FILE")
    groups = facts["group_rows"].combine_chunks().flatten()
    return Indexed(place, len(facts), len(groups), sum(groups.to_numpy().tolist()))
