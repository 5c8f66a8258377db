"""Hive partitions: folders named `key=value` become columns of the files below them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from rayrec.data.formats.find_parquet import find_parquet
from rayrec.data.source.filters import Condition, only_passing
from rayrec.data.source.lake import TableFiles
from rayrec.storage.errors import DataError
from rayrec.storage.files import Found
from rayrec.storage.locations import plain_path
from rayrec.storage.parquet import Version, open_parquet
from rayrec.storage.struct_fields import columns_named, leaf_table

READ_ROWS = 65_536
NULL = "__HIVE_DEFAULT_PARTITION__"
Values = dict[str, int | str | None]
# One partition column, or several that are read as one, and a value of theirs.
Columns = str | tuple[str, ...]
Value = int | str | tuple[int | str, ...]

_INT = re.compile(r"-?[0-9]{1,18}")
Types = dict[str, pa.DataType]


@dataclass(frozen=True, slots=True)
class PartitionedFile:
    """A file and the values of its partition columns."""

    file: Found
    values: Values


@dataclass(frozen=True, slots=True)
class Partitioned:
    """Files with their partition values, the types of partition columns, and facts of columns as in `TableFiles`."""

    files: Sequence[PartitionedFile]
    types: Types
    field_ids: Mapping[str, int] = field(default_factory=dict)
    physical: Mapping[str, str] = field(default_factory=dict)
    in_metadata: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        files: Sequence[Found],
        wanted: Collection[str] | None = None,
        as_text: Collection[str] = (),
        declared: Types | None = None,
    ) -> Partitioned:
        """Parses the partitions of files; `wanted` selects columns (None: all)."""
        values, types = partitions_of([plain_path(file.uri) for file in files], wanted, as_text, declared)
        return cls([PartitionedFile(*pair) for pair in zip(files, values, strict=True)], types)

    def that_pass(self, conditions: Sequence[Condition]) -> Partitioned:
        """A copy without the files that a condition on partition columns excludes."""
        passing = np.ones(len(self.files), dtype=np.bool_)
        for condition in conditions:
            kind = self.types.get(condition.column)
            if kind is None:
                continue
            condition.check(kind, self.files[0].file.uri)
            has_column = np.array([condition.column in file.values for file in self.files])
            passing &= ~has_column | condition.holds(
                pa.array([file.values.get(condition.column) for file in self.files], kind)
            )
        return replace(self, files=[file for file, keep in zip(self.files, passing, strict=True) if keep])


def find_partitioned(
    paths: str | Sequence[str] | TableFiles, wanted: Collection[str], as_text: Collection[str] = ()
) -> Partitioned:
    """The files of paths, or of a version of a table, with their partitions. Raises as `find_parquet`.

    Args:
        wanted, as_text: as in `partitions_of`.
    """
    if isinstance(paths, TableFiles):
        files = Partitioned.of(paths.files, wanted if paths.hive else (), as_text, {**paths.partition_types})
        return replace(files, field_ids=paths.field_ids, physical=paths.physical, in_metadata=paths.in_metadata)
    return Partitioned.of(find_parquet(paths), wanted, as_text)


def columns_of(column: str | Sequence[str]) -> tuple[str, ...]:
    """The names of one or several partition columns."""
    return (column,) if isinstance(column, str) else tuple(column)


def value_of(column: Columns, values: Mapping[str, int | str | None]) -> Value | None:
    """The value of one or several partition columns; None if one is missing or null."""
    if isinstance(column, str):
        return values.get(column)
    several = tuple(value for value in map(values.get, column) if value is not None)
    return several if len(several) == len(column) else None


def with_partition(rows: pa.Table, file: PartitionedFile, types: Types) -> pa.Table:
    """Adds the partition columns to rows of a file."""
    table = rows.drop_columns([name for name in rows.column_names if name in file.values])
    for name, value in file.values.items():
        table = table.append_column(name, pa.repeat(pa.scalar(value, types[name]), len(table)))
    return table


def tables_of(
    file: PartitionedFile,
    types: Types,
    columns: Sequence[str] | None = None,
    conditions: Sequence[Condition] = (),
    at_once: int | None = None,
) -> Iterator[pa.Table]:
    """Reads a file in chunks: the rows that satisfy the conditions, with partition columns. Raises as `open_parquet`.

    Args:
        columns: columns to read; None: all, with the fields of structs as columns.
        at_once: maximum rows of a chunk, before conditions.
    """
    with open_parquet(file.file.uri, Version(file.file.size_bytes)) as parquet:
        names = None if columns is None else [name for name in columns if name not in file.values]
        if names == []:
            names = parquet.schema_arrow.names[:1]  # any column, for the number of rows
        first_row = 0
        for batch in parquet.iter_batches(min(at_once or READ_ROWS, READ_ROWS), columns=names, use_threads=False):
            rows = leaf_table(batch) if names is None else columns_named(batch, names)
            yield only_passing(with_partition(rows, file, types), conditions, file.file, first_row)
            first_row += batch.num_rows


def with_partitions(arrow: pa.Schema, types: Types) -> pa.Schema:
    """The schema with partition columns; they replace columns of the same name in the file."""
    fields = [field for field in arrow if field.name not in types]
    return pa.schema([*fields, *(pa.field(name, kind) for name, kind in types.items())])


def nothing_left(uri: str, conditions: Sequence[Condition]) -> DataError:
    """The error for a data set without rows."""
    if not conditions:
        return DataError("the data set has no rows", file=uri, fix="check how the files were written")
    text = " and ".join(f"`{condition}`" for condition in conditions)
    return DataError(f"no row can pass the filters {text}; this is one of the files", file=uri, fix="check the filters")


def partitions_of(
    uris: Sequence[str],
    wanted: Collection[str] | None,
    as_text: Collection[str] = (),
    declared: Types | None = None,
) -> tuple[list[Values], dict[str, pa.DataType]]:
    """The partition columns of each file, and their types: int64 where all values are whole numbers, else string.

    Args:
        wanted: columns to read from folder names; None: all.
        as_text: columns that stay strings.
        declared: int64 or string for columns with a type declared by the table.

    Raises:
        DataError: a key that occurs twice in one path.
    """
    texts = [_texts(uri, wanted) for uri in uris]
    types: dict[str, pa.DataType] = {}
    for name in sorted({name for file_texts in texts for name in file_texts}):
        values = [file_texts.get(name) for file_texts in texts]
        if name not in as_text and declared and name in declared:
            types[name] = declared[name]
            continue
        integers = name not in as_text and all(value is None or _INT.fullmatch(value) for value in values)
        types[name] = pa.int64() if integers and any(value is not None for value in values) else pa.string()
    numbers = {name for name, kind in types.items() if kind == pa.int64()}
    parsed = [
        {name: int(text) if text and name in numbers else text for name, text in file_texts.items()}
        for file_texts in texts
    ]
    return parsed, types


def _texts(uri: str, wanted: Collection[str] | None) -> dict[str, str | None]:
    values: dict[str, str | None] = {}
    if "=" not in uri:
        return values
    for folder in uri.split("/")[:-1]:
        key, equals, value = folder.partition("=")
        name = unquote(key)
        if not equals or not name or (wanted is not None and name not in wanted):
            continue
        if name in values:
            raise DataError(f"two folders of the path are named {name}=…", file=uri, fix="rename one of them")
        values[name] = None if value == NULL else unquote(value)
    return values
