"""What single files hold, by their footers and paths: columns, row groups, partitions, what filters rule out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.data.errors import DataError
from rayrec.data.mapping.columns import check_types
from rayrec.data.mapping.schema import Schema
from rayrec.data.source.filters import Condition, plain_type
from rayrec.data.source.footer_cache import FooterCache
from rayrec.data.source.partitions import Values, partitions_of
from rayrec.data.storage.files import Found
from rayrec.data.storage.locations import plain_path
from rayrec.data.storage.opening import unreadable

Partition = tuple[tuple[str, int | str | None], ...]
Types = dict[str, pa.DataType]

_FOOTER_THREADS = 16


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One file.

    Args:
        group_rows: rows of its row groups.
        row_bytes: about how many bytes a decoded row takes.
        partition: columns that its folders give, with their value.
        left_out: row groups in which no row can pass the filters.
    """

    uri: str
    size_bytes: int
    group_rows: tuple[int, ...]
    row_bytes: float
    partition: Partition = ()
    left_out: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PartitionedFile:
    """A file and the columns that its folders give."""

    file: Found
    values: Values


@dataclass(frozen=True, slots=True)
class Partitioned:
    """Files with their partitions, and the type of every partition column."""

    files: Sequence[PartitionedFile]
    types: Types

    @classmethod
    def of(cls, found: Sequence[Found], wanted: Collection[str] | None = None) -> Partitioned:
        """The partitions of files, as far as their columns are wanted (None: all)."""
        values, types = partitions_of([plain_path(file.uri) for file in found], wanted)
        return cls([PartitionedFile(*pair) for pair in zip(found, values, strict=True)], types)

    def that_pass(self, conditions: Sequence[Condition]) -> Partitioned:
        """Without the files that a condition on their folders rules out."""
        kept = np.ones(len(self.files), dtype=np.bool_)
        for condition in conditions:
            kind = self.types.get(condition.column)
            if kind is None:
                continue
            condition.check(kind, self.files[0].file.uri)
            here = np.array([condition.column in one.values for one in self.files])
            kept &= ~here | condition.holds(pa.array([one.values.get(condition.column) for one in self.files], kind))
        return Partitioned([one for one, keep in zip(self.files, kept, strict=True) if keep], self.types)


def read_footers(
    found: Partitioned, schema: Schema, conditions: Sequence[Condition], cache: FooterCache
) -> list[tuple[FileFacts, Types]]:
    """The facts of all files, and the types of the columns that are read.

    Raises:
        DataError: a file that is not Parquet, a column that is missing or has a wrong type.
    """
    with ThreadPoolExecutor(max(1, min(_FOOTER_THREADS, len(found.files)))) as pool:
        return list(pool.map(lambda one: _read_footer(one, found.types, schema, conditions, cache), found.files))


def check_same_types(footers: Sequence[tuple[FileFacts, Types]]) -> None:
    """That every column has one type in all files.

    Raises:
        DataError: it has not.
    """
    first, types = footers[0]
    for facts, found in footers[1:]:
        for column, kind in found.items():
            if kind != types[column]:
                raise DataError(
                    f"the column's type changes between files: {kind} here, {types[column]} in {first.uri}",
                    file=facts.uri,
                    column=column,
                    fix="write all files with one type for this column",
                )


def _read_footer(
    one: PartitionedFile, types: Types, schema: Schema, conditions: Sequence[Condition], cache: FooterCache
) -> tuple[FileFacts, Types]:
    uri, footer = one.file.uri, cache.read(one.file)
    try:
        arrow = footer.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        raise unreadable(uri, error) from error
    arrow = _with_partitions(arrow, {name: types[name] for name in one.values})
    check_types(schema, arrow, uri)
    for condition in conditions:
        condition.check_in(arrow, uri)
    groups = tuple(footer.row_group(g).num_rows for g in range(footer.num_row_groups))
    columns = list(dict.fromkeys([*schema.columns, *(c.column for c in conditions)]))
    in_file = [c for c in conditions if c.column not in one.values]
    left_out = _left_out(footer, arrow, in_file) if in_file else frozenset()
    row_bytes = _row_bytes(footer, set(columns))
    facts = FileFacts(uri, one.file.size_bytes, groups, row_bytes, tuple(one.values.items()), left_out)
    return facts, {name: arrow.field(name).type for name in columns}


def nothing_left(uri: str, conditions: Sequence[Condition]) -> DataError:
    """The error of a data set that has no row to read."""
    if not conditions:
        return DataError("the data set has no rows", file=uri, fix="check how the files were written")
    told = " and ".join(f"`{condition}`" for condition in conditions)
    return DataError(f"no row can pass the filters {told}; looked at files like this one", file=uri, fix="check them")


def with_partition(batch: pa.RecordBatch, one: PartitionedFile, types: Types) -> pa.Table:
    """All columns of a file's rows, those of its folders among them."""
    table = pa.Table.from_batches([batch]).drop_columns([n for n in batch.schema.names if n in one.values])
    for name, value in one.values.items():
        table = table.append_column(name, pa.repeat(pa.scalar(value, types[name]), len(table)))
    return table


def _with_partitions(arrow: pa.Schema, types: Types) -> pa.Schema:
    """A folder's value stands before a column of that name in the file."""
    fields = [field for field in arrow if field.name not in types]
    return pa.schema([*fields, *(pa.field(name, kind) for name, kind in types.items())])


def _left_out(footer: pq.FileMetaData, arrow: pa.Schema, conditions: Sequence[Condition]) -> frozenset[int]:
    """Row groups whose smallest and largest values say that no row can pass."""
    kept = np.ones(footer.num_row_groups, dtype=np.bool_)
    for condition in conditions:
        ends = _ends(footer, condition.column, arrow.field(condition.column).type)
        if ends is not None:
            kept &= condition.may_hold(*ends)
    return frozenset(np.flatnonzero(~kept).tolist())


def _ends(footer: pq.FileMetaData, column: str, kind: pa.DataType) -> tuple[pa.Array, pa.Array] | None:
    """The smallest and the largest value of every row group, null where they are not known."""
    kind = plain_type(kind)
    paths = [footer.schema.column(index).path for index in range(footer.num_columns)]
    if column not in paths:
        return None
    lows, highs = [], []
    for group in range(footer.num_row_groups):
        statistics = footer.row_group(group).column(paths.index(column)).statistics
        known = statistics is not None and statistics.has_min_max
        lows.append(statistics.min if known else None)
        highs.append(statistics.max if known else None)
    try:
        return pa.array(lows, kind), pa.array(highs, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None  # a type whose statistics pyarrow does not read


def _row_bytes(footer: pq.FileMetaData, columns: set[str]) -> float:
    """About how many bytes one row takes when decoded, judged by the file's first row group."""
    if not footer.num_rows:
        return 0.0
    group = next(g for g in map(footer.row_group, range(footer.num_row_groups)) if g.num_rows)
    total = 0
    for index in range(group.num_columns):
        chunk = group.column(index)
        if any(chunk.path_in_schema == c or chunk.path_in_schema.startswith(c + ".") for c in columns):
            total += max(chunk.total_uncompressed_size, 8 * chunk.num_values)
    return total / group.num_rows
