"""Files with the columns that their folders give: Hive partitions, folders named `key=value`."""

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

READ_ROWS = 65_536
NULL = "__HIVE_DEFAULT_PARTITION__"
Values = dict[str, int | str | None]

_INT = re.compile(r"-?\d{1,18}")
Types = dict[str, pa.DataType]


@dataclass(frozen=True, slots=True)
class PartitionedFile:
    """A file and the columns that its folders give."""

    file: Found
    values: Values


@dataclass(frozen=True, slots=True)
class Partitioned:
    """Files with their partitions, the type of every partition column, and as in `TableFiles` how columns are found."""

    files: Sequence[PartitionedFile]
    types: Types
    field_ids: Mapping[str, int] = field(default_factory=dict)
    physical: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, found: Sequence[Found], wanted: Collection[str] | None = None, as_text: Collection[str] = ()
    ) -> Partitioned:
        """The partitions of files, as far as their columns are wanted (None: all)."""
        values, types = partitions_of([plain_path(file.uri) for file in found], wanted, as_text)
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
        return replace(self, files=[one for one, keep in zip(self.files, kept, strict=True) if keep])


def find_partitioned(
    paths: str | Sequence[str] | TableFiles, wanted: Collection[str], as_text: Collection[str] = ()
) -> Partitioned:
    """The files of paths, or of a table's version, with the partitions in their names; raises as `find_parquet`.

    Args:
        wanted, as_text: as in `partitions_of`.
    """
    if isinstance(paths, TableFiles):
        found = Partitioned.of(paths.files, wanted if paths.hive else (), as_text)
        return replace(found, field_ids=paths.field_ids, physical=paths.physical)
    return Partitioned.of(find_parquet(paths), wanted, as_text)


def with_partition(batch: pa.RecordBatch, one: PartitionedFile, types: Types) -> pa.Table:
    """All columns of a file's rows, those of its folders among them."""
    table = pa.Table.from_batches([batch]).drop_columns([n for n in batch.schema.names if n in one.values])
    for name, value in one.values.items():
        table = table.append_column(name, pa.repeat(pa.scalar(value, types[name]), len(table)))
    return table


def tables_of(
    one: PartitionedFile,
    types: Types,
    columns: Sequence[str] | None = None,
    conditions: Sequence[Condition] = (),
    at_once: int | None = None,
) -> Iterator[pa.Table]:
    """A file's rows that pass, a part at a time, with the columns of its folders; raises as `open_parquet`.

    Args:
        columns: that are read; None: all.
        at_once: rows of a part, before conditions, at most.
    """
    with open_parquet(one.file.uri, Version(one.file.size_bytes)) as parquet:
        names = None if columns is None else [name for name in columns if name not in one.values]
        if names == []:
            names = parquet.schema_arrow.names[:1]  # which say how many rows there are
        for batch in parquet.iter_batches(min(at_once or READ_ROWS, READ_ROWS), columns=names, use_threads=False):
            yield only_passing(with_partition(batch, one, types), conditions, one.file.uri)


def with_partitions(arrow: pa.Schema, types: Types) -> pa.Schema:
    """A folder's value stands before a column of that name in the file."""
    fields = [field for field in arrow if field.name not in types]
    return pa.schema([*fields, *(pa.field(name, kind) for name, kind in types.items())])


def nothing_left(uri: str, conditions: Sequence[Condition]) -> DataError:
    """The error of a data set that has no row to read."""
    if not conditions:
        return DataError("the data set has no rows", file=uri, fix="check how the files were written")
    wanted = " and ".join(f"`{condition}`" for condition in conditions)
    return DataError(f"no row can pass the filters {wanted}; looked at files like this one", file=uri, fix="check them")


def partitions_of(
    uris: Sequence[str], wanted: Collection[str] | None, as_text: Collection[str] = ()
) -> tuple[list[Values], dict[str, pa.DataType]]:
    """The partition columns of each file, and their types: int64 where all values are whole numbers, else string.

    Args:
        wanted: columns that are read from folder names; None: all.
        as_text: columns whose whole numbers stay texts.

    Raises:
        DataError: a key that comes twice in one path.
    """
    texts = [_texts(uri, wanted) for uri in uris]
    types: dict[str, pa.DataType] = {}
    for name in sorted({name for found in texts for name in found}):
        values = [found.get(name) for found in texts]
        whole = name not in as_text and all(value is None or _INT.fullmatch(value) for value in values)
        types[name] = pa.int64() if whole and any(value is not None for value in values) else pa.string()
    numbers = {name for name, kind in types.items() if kind == pa.int64()}
    found = ({name: int(text) if text and name in numbers else text for name, text in one.items()} for one in texts)
    return list(found), types


def _texts(uri: str, wanted: Collection[str] | None) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for folder in uri.split("/")[:-1]:
        key, equals, value = folder.partition("=")
        name = unquote(key)
        if not equals or not name or (wanted is not None and name not in wanted):
            continue
        if name in found:
            raise DataError(f"two folders of the path are named {name}=…", file=uri, fix="rename one of them")
        found[name] = None if value == NULL else unquote(value)
    return found
