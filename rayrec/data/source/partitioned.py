"""Files with the columns that their folders give."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from rayrec.data.errors import DataError
from rayrec.data.source.filters import Condition
from rayrec.data.source.lake import TableFiles
from rayrec.data.source.partitions import Values, partitions_of
from rayrec.data.storage.files import Found, find_files
from rayrec.data.storage.locations import plain_path

Types = dict[str, pa.DataType]


@dataclass(frozen=True, slots=True)
class PartitionedFile:
    """A file and the columns that its folders give."""

    file: Found
    values: Values


@dataclass(frozen=True, slots=True)
class Partitioned:
    """Files with their partitions, the type of every partition column, and the numbers that a table has for columns."""

    files: Sequence[PartitionedFile]
    types: Types
    field_ids: Mapping[str, int] = field(default_factory=dict)

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
    """The files of paths, or of a table's version, with the partitions in their names; raises as `find_files`.

    Args:
        wanted, as_text: as in `partitions_of`.
    """
    if isinstance(paths, TableFiles):
        found = Partitioned.of(paths.files, wanted if paths.hive else (), as_text)
        return replace(found, field_ids=paths.field_ids)
    return Partitioned.of(find_files(paths), wanted, as_text)


def with_partition(batch: pa.RecordBatch, one: PartitionedFile, types: Types) -> pa.Table:
    """All columns of a file's rows, those of its folders among them."""
    table = pa.Table.from_batches([batch]).drop_columns([n for n in batch.schema.names if n in one.values])
    for name, value in one.values.items():
        table = table.append_column(name, pa.repeat(pa.scalar(value, types[name]), len(table)))
    return table


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
