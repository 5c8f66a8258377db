"""What footers say of one data set: that its columns fit, how large its rows are, which row groups filters rule out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec.data.errors import DataError, suggestion
from rayrec.data.mapping.arrow_types import wider
from rayrec.data.mapping.columns import check_types
from rayrec.data.mapping.schema import Schema
from rayrec.data.source.file_table import COLUMNS, I64, FileTable, Mask, folders_of
from rayrec.data.source.filters import Condition
from rayrec.data.source.footer_index import HIGH, LOW
from rayrec.data.source.partitioned import Partitioned, PartitionedFile, Types, with_partitions

_FIELD_ID = b"PARQUET:field_id"
_NAMED = 5  # files, in an error


def check_columns(found: Partitioned, facts: pa.Table, schema: Schema, conditions: Sequence[Condition]) -> Types:
    """The types of the columns that are read: of each the widest that it has in any file.

    Raises:
        DataError: a column that is missing, in all files or, where the schema does not take nulls, in some; one of a
            wrong type, or of types that no type holds together.
    """
    codes, schemas = _schemas(facts)
    kinds: dict[tuple[int, tuple[str, ...]], PartitionedFile] = {}
    for code, one in zip(codes.tolist(), found.files, strict=True):
        kinds.setdefault((code, tuple(one.values)), one)
    columns = list(dict.fromkeys([*schema.columns, *(c.column for c in conditions)]))
    for (code, _), one in kinds.items():
        _check_field_ids(schemas[code], columns, found.field_ids, one.file.uri)
    arrows = [with_partitions(schemas[code], {name: found.types[name] for name in names}) for code, names in kinds]
    first = {
        name: (one.file.uri, arrow.field(name).type)
        for arrow, one in reversed([*zip(arrows, kinds.values(), strict=True)])
        for name in columns
        if arrow.get_field_index(name) >= 0
    }
    types = {name: kind for name, (_, kind) in first.items()}
    for arrow, one in zip(arrows, kinds.values(), strict=True):
        uri = one.file.uri
        lacking = [name for name in columns if name in first and name not in arrow.names]
        for name in lacking:
            in_other_case = name.lower() in map(str.lower, arrow.names)
            if name not in schema.spare_columns or in_other_case:
                raise _missing_in_some(name, found, codes, schemas)
        check_types(schema, pa.schema([*arrow, *(pa.field(name, first[name][1]) for name in lacking)]), uri)
        for condition in conditions:
            condition.check_in(arrow, uri)
        for name, kind in ((name, arrow.field(name).type) for name in columns if name not in lacking):
            wide = wider(types[name], kind)
            if wide is None:
                raise DataError(
                    f"the column's type changes between files: {kind} here, {first[name][1]} in {first[name][0]}",
                    file=uri,
                    column=name,
                    fix="write all files with one type for this column",
                )
            types[name] = wide
    return {name: types[name] for name in columns}


def _missing_in_some(name: str, found: Partitioned, codes: I64, schemas: Sequence[pa.Schema]) -> DataError:
    lacking = [
        (one.file.uri, schemas[code].names)
        for code, one in zip(codes.tolist(), found.files, strict=True)
        if name not in schemas[code].names and name not in one.values
    ]
    files = [uri for uri, _ in lacking]
    named = ", ".join(files[:_NAMED]) + (f" and {len(files) - _NAMED:,} more" if len(files) > _NAMED else "")
    return DataError(
        f"column {name!r} is missing in {len(files):,} of {len(found.files):,} files: {named}"
        f"{suggestion(name, lacking[0][1])}",
        file=files[0],
        column=name,
        fix="add it to them; of a feature the schema may also say what stands for a null: a default, or on_null: empty",
    )


def _check_field_ids(arrow: pa.Schema, columns: Sequence[str], wanted: Mapping[str, int], uri: str) -> None:
    """That a file's columns are those that its table means by their names; `wanted` is empty where it has no numbers.

    Raises:
        DataError: one was renamed, or dropped and added again.
    """
    ids = {one.name: int(one.metadata[_FIELD_ID]) for one in arrow if _FIELD_ID in (one.metadata or {})}
    for name in columns if wanted else ():
        if name not in wanted:
            fix = f"correct its name; the table has {', '.join(wanted)}"
            raise DataError(f"the table has no column {name!r} at this version", file=uri, column=name, fix=fix)
        before = next((other for other, number in ids.items() if number == wanted[name]), name)
        if before != name or ids.get(name, wanted[name]) != wanted[name]:
            has = "another column" if before == name else f"another column, and the table's is {before!r} here"
            raise DataError(
                f"{name!r} is {has}: columns of the table were renamed, or dropped and added again, and files are read "
                "by the names of their columns",
                file=uri,
                column=name,
                fix="rewrite the table's older files (rewrite_data_files), or read a version from before the change",
            )


def file_table(
    found: Partitioned, facts: pa.Table, columns: Sequence[str], conditions: Sequence[Condition]
) -> FileTable:
    """The files of a data set in columns.

    Args:
        columns: what is read.
        conditions: filters of rows.
    """
    which, names, folders = folders_of((one.file.uri for one in found.files), (one.values for one in found.files))
    lists = _list(facts, "group_rows")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lists.value_lengths().to_numpy(), dtype=np.int64)])
    arrays = [pa.array(which, pa.int32()), pa.array(names, pa.string())]
    arrays += [_flat(facts, name) for name in ("size_bytes", "changed_ns", "footer", "etag")]
    arrays.append(pa.array(_row_bytes(facts, columns), pa.float32()))
    group_rows = lists.flatten().to_numpy().astype(np.int64)
    left_out = _left_out(found, facts, offsets, conditions)
    return FileTable(tuple(folders), pa.record_batch(arrays, schema=COLUMNS), offsets, group_rows, left_out)


def _schemas(facts: pa.Table) -> tuple[I64, list[pa.Schema]]:
    """The schema of each file as a number, and the schemas."""
    found = facts["schema"].unify_dictionaries().combine_chunks()
    found = found.chunk(0) if isinstance(found, pa.ChunkedArray) else found
    schemas = [pa.ipc.read_schema(pa.BufferReader(raw)) for raw in found.dictionary.to_pylist()]
    return found.indices.to_numpy().astype(np.int64), schemas


def _flat(facts: pa.Table, name: str) -> pa.Array:
    found = facts[name].combine_chunks()
    return found.chunk(0) if isinstance(found, pa.ChunkedArray) else found


def _list(facts: pa.Table, name: str) -> pa.ListArray:
    return _flat(facts, name)


def _row_bytes(facts: pa.Table, columns: Sequence[str]) -> npt.NDArray[np.float64]:
    """About how many bytes a decoded row of these columns takes, file by file."""
    codes, schemas = _schemas(facts)
    lists = _list(facts, "column_bytes")
    each, lengths = lists.flatten().to_numpy(), lists.value_lengths().to_numpy()
    begin = np.cumsum(lengths) - lengths
    total = np.zeros(len(codes))
    for code, schema in enumerate(schemas):
        files = np.flatnonzero(codes == code)
        for place in (schema.get_field_index(name) for name in columns):
            if place >= 0:
                total[files] += each[begin[files] + place]
    return total


def _left_out(found: Partitioned, facts: pa.Table, offsets: I64, conditions: Sequence[Condition]) -> Mask:
    """Row groups whose smallest and largest values say that no row can pass."""
    out = np.zeros(offsets[-1], np.bool_)
    for condition in conditions:
        if LOW + condition.column not in facts.column_names:
            continue
        low, high = (_list(facts, side + condition.column).flatten() for side in (LOW, HIGH))
        if pa.types.is_null(low.type):
            continue
        in_file = np.array([condition.column not in one.values for one in found.files])
        out |= ~condition.may_hold(low, high) & np.repeat(in_file, np.diff(offsets))
    return out
