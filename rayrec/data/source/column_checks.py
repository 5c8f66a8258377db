"""Checks the columns of a data set by its footers, and derives the file table: row sizes, excluded row groups."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec.data.arrays.buffers import I64, Mask
from rayrec.data.arrays.widening import differing, merged
from rayrec.data.mapping.column_types import check_types
from rayrec.data.mapping.schema import Schema
from rayrec.data.source.file_table import COLUMNS, FileTable, folders_of
from rayrec.data.source.filters import Condition
from rayrec.data.source.footer_index import HIGH, LOW, schemas_of
from rayrec.data.source.partitions import Partitioned, PartitionedFile, Types, with_partitions
from rayrec.data.source.row_share import ROW_SHARE, with_row_share
from rayrec.storage.column_names import check_names
from rayrec.storage.errors import DataError, suggestion

_FIELD_ID = b"PARQUET:field_id"
# Number of files that an error lists.
_NAMED = 5


def check_columns(partitioned: Partitioned, facts: pa.Table, schema: Schema, conditions: Sequence[Condition]) -> Types:
    """The types of the columns to read: for each column the widest type in any file.

    Raises:
        DataError: a column that is missing in all files, or in some while the schema does not accept nulls; a wrong
            type; types in different files without a common type; a file without its partition column.
    """
    codes, schemas = schemas_of(facts)
    if any(len(set(arrow.names)) < len(arrow.names) for arrow in schemas):
        files = zip(codes.tolist(), partitioned.files, strict=True)
        check_names((file.file.uri, schemas[code].names) for code, file in files)
    kinds: dict[tuple[int, tuple[str, ...]], PartitionedFile] = {}
    for code, file in zip(codes.tolist(), partitioned.files, strict=True):
        kinds.setdefault((code, tuple(file.values)), file)
    columns = list(dict.fromkeys([*schema.columns, *(c.column for c in conditions)]))
    schemas = [_renamed(arrow, _names_in(arrow, columns, partitioned)) for arrow in schemas]
    _refuse_values_in_metadata(partitioned, codes, schemas, columns)
    arrows = [
        with_partitions(schemas[code], {name: partitioned.types[name] for name in names}) for code, names in kinds
    ]
    if any(condition.column == ROW_SHARE for condition in conditions):
        arrows = [with_row_share(arrow) for arrow in arrows]
    types = dict[str, pa.DataType]()
    seen = dict[str, tuple[str, pa.DataType]]()
    in_some_file = {name for arrow in arrows for name in arrow.names}
    for arrow, file in zip(arrows, kinds.values(), strict=True):
        uri = file.file.uri
        lacking = [name for name in columns if name in in_some_file and name not in arrow.names]
        for name in lacking:
            in_other_case = name.lower() in map(str.lower, arrow.names)
            if name not in schema.optional_columns or in_other_case:
                raise _missing_in_some(name, partitioned, codes, schemas)
        check_types(schema, pa.schema([*arrow, *(pa.field(name, pa.null()) for name in lacking)]), uri)
        for condition in conditions:
            condition.check_in(arrow, uri)
        for name in columns:
            if name not in lacking:
                types[name] = merged(types, seen, name, arrow.field(name).type, uri)
    try:  # types that fit one by one may not fit together, e.g. ids of int64 and uint64
        check_types(schema, pa.schema(list(types.items())), partitioned.files[0].file.uri)
    except DataError as error:
        raise _of_two_files(error, seen, zip(arrows, kinds.values(), strict=True)) from error
    return {name: types[name] for name in columns}


def _refuse_values_in_metadata(
    partitioned: Partitioned, codes: I64, schemas: Sequence[pa.Schema], columns: Sequence[str]
) -> None:
    """Refuses a file without a partition column that only the table's metadata has; it would be read as null."""
    if not partitioned.in_metadata:
        return
    for code, file in zip(codes.tolist(), partitioned.files, strict=True):
        for name in partitioned.in_metadata.get(file.file.uri, ()):
            if name in columns and name not in schemas[code].names:
                raise DataError(
                    f"the file lacks the partition column {name!r}, whose value is only in the metadata of the table",
                    file=file.file.uri,
                    column=name,
                    fix="rewrite the table's files (rewrite_data_files), or use other columns",
                )


def _of_two_files(
    error: DataError,
    seen: Mapping[str, tuple[str, pa.DataType]],
    files: Iterable[tuple[pa.Schema, PartitionedFile]],
) -> DataError:
    """The error for a column with types that fit the schema in each file, but not together."""
    column = error.column
    if column is None or column not in seen:
        return error
    first_uri, first_kind = seen[column]
    for arrow, file in files:
        if column in arrow.names:
            kind = arrow.field(column).type
            if kind != first_kind and not pa.types.is_null(kind):
                return differing(column, kind, file.file.uri, first_kind, first_uri)
    return error


def _missing_in_some(name: str, partitioned: Partitioned, codes: I64, schemas: Sequence[pa.Schema]) -> DataError:
    incomplete = [
        (file.file.uri, schemas[code].names)
        for code, file in zip(codes.tolist(), partitioned.files, strict=True)
        if name not in schemas[code].names and name not in file.values
    ]
    files = [uri for uri, _ in incomplete]
    listed = ", ".join(files[:_NAMED]) + (f" and {len(files) - _NAMED:,} more" if len(files) > _NAMED else "")
    return DataError(
        f"column {name!r} is missing in {len(files):,} of {len(partitioned.files):,} files: {listed}"
        f"{suggestion(name, incomplete[0][1])}",
        file=files[0],
        column=name,
        fix="add the column to these files; for a feature you can also set a `default`, or `on_null: empty`",
    )


def _names_in(arrow: pa.Schema, columns: Sequence[str], partitioned: Partitioned) -> dict[str, str | None]:
    """Names in the file of columns that are called differently there.

    None for a column that the file lacks although it has a column of that name (which was another one before).

    Raises:
        DataError: the table does not have the column.
    """
    if not partitioned.field_ids:
        return {name: partitioned.physical[name] for name in columns if name in partitioned.physical}
    for name in columns:
        if name not in partitioned.field_ids and name != ROW_SHARE:
            fix, uri = (
                f"correct the name; the table has {', '.join(partitioned.field_ids)}",
                partitioned.files[0].file.uri,
            )
            raise DataError(f"the table has no column {name!r} at this version", file=uri, column=name, fix=fix)
    ids = {int(field.metadata[_FIELD_ID]): field.name for field in arrow if _FIELD_ID in (field.metadata or {})}
    known = [name for name in columns if name in partitioned.field_ids]
    file_names = {name: ids.get(partitioned.field_ids[name]) for name in known} if ids else {}
    return {
        name: file_name
        for name, file_name in file_names.items()
        if file_name != name and (file_name is not None or name in arrow.names)
    }


def _renamed(arrow: pa.Schema, names: Mapping[str, str | None]) -> pa.Schema:
    """The file's schema with the names of the table."""
    table_names = {file_name: name for name, file_name in names.items()}
    fields = [field for field in arrow if field.name in table_names or field.name not in names]
    return pa.schema([field.with_name(table_names.get(field.name, field.name)) for field in fields])


def file_table(
    partitioned: Partitioned, facts: pa.Table, columns: Sequence[str], conditions: Sequence[Condition]
) -> FileTable:
    """The files of a data set in columns.

    Args:
        columns: the columns to read.
        conditions: filters.
    """
    folder_numbers, names, folders = folders_of(
        (file.file.uri for file in partitioned.files), (file.values for file in partitioned.files)
    )
    codes, schemas = schemas_of(facts)
    renames = [_names_in(schema, columns, partitioned) for schema in schemas]
    texts = [json.dumps(rename) if rename else None for rename in renames]
    lists = _list(facts, "group_rows")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lists.value_lengths().to_numpy(), dtype=np.int64)])
    arrays = [pa.array(folder_numbers, pa.int32()), pa.array(names, pa.string())]
    arrays += [_flat(facts, name) for name in ("size_bytes", "changed_ns", "footer", "etag")]
    arrays.append(pa.array(_row_bytes(facts, columns), pa.float32()))
    arrays.append(pa.array([file.file.deleted for file in partitioned.files], pa.binary()))
    arrays.append(pa.array([texts[code] for code in codes.tolist()], pa.string()))
    group_rows = lists.flatten().to_numpy().astype(np.int64)
    left_out = _left_out(partitioned, facts, offsets, conditions, [renames[code] for code in codes.tolist()])
    return FileTable(tuple(folders), pa.record_batch(arrays, schema=COLUMNS), offsets, group_rows, left_out)


def _flat(facts: pa.Table, name: str) -> pa.Array:
    column = facts[name].combine_chunks()
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column


def _list(facts: pa.Table, name: str) -> pa.ListArray:
    return _flat(facts, name)


def _row_bytes(facts: pa.Table, columns: Sequence[str]) -> npt.NDArray[np.float64]:
    """Approximate decoded size of a row of these columns, per file."""
    codes, schemas = schemas_of(facts)
    lists = _list(facts, "column_bytes")
    column_bytes, lengths = lists.flatten().to_numpy(), lists.value_lengths().to_numpy()
    offsets = np.cumsum(lengths) - lengths
    total = np.zeros(len(codes))
    for code, schema in enumerate(schemas):
        files = np.flatnonzero(codes == code)
        for position in (schema.get_field_index(name) for name in columns):
            if position >= 0:
                total[files] += column_bytes[offsets[files] + position]
    return total


def _left_out(
    partitioned: Partitioned,
    facts: pa.Table,
    offsets: I64,
    conditions: Sequence[Condition],
    renames: Sequence[Mapping[str, str | None]],
) -> Mask:
    """True for row groups in which the statistics exclude every row. Ignores columns with another name in the file."""
    out = np.zeros(offsets[-1], np.bool_)
    for condition in conditions:
        if LOW + condition.column not in facts.column_names:
            continue
        low, high = (_list(facts, side + condition.column).flatten() for side in (LOW, HIGH))
        if pa.types.is_null(low.type):
            continue
        name = condition.column
        in_file = np.array(
            [name not in {**file.values, **rename} for file, rename in zip(partitioned.files, renames, strict=True)]
        )
        out |= ~condition.may_hold(low, high) & np.repeat(in_file, np.diff(offsets))
    return out
