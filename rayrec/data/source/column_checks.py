"""What footers say of one data set: that its columns fit, how large its rows are, which row groups filters rule out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec.data.arrays.arrow_types import wider
from rayrec.data.arrays.buffers import I64, Mask
from rayrec.data.mapping.column_types import check_types
from rayrec.data.mapping.schema import Schema
from rayrec.data.source.file_table import COLUMNS, FileTable, folders_of
from rayrec.data.source.filters import Condition
from rayrec.data.source.footer_index import HIGH, LOW
from rayrec.data.source.partitions import Partitioned, PartitionedFile, Types, with_partitions
from rayrec.storage.errors import DataError, suggestion

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
    schemas = [_renamed(arrow, _names_in(arrow, columns, found)) for arrow in schemas]
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


def _names_in(arrow: pa.Schema, columns: Sequence[str], found: Partitioned) -> dict[str, str | None]:
    """What a file calls those columns that have another name there; None of one that it lacks, though it has the name.

    Raises:
        DataError: the table has no such column.
    """
    if not found.field_ids:
        return {name: found.physical[name] for name in columns if name in found.physical}
    for name in columns:
        if name not in found.field_ids:
            fix, uri = f"correct its name; the table has {', '.join(found.field_ids)}", found.files[0].file.uri
            raise DataError(f"the table has no column {name!r} at this version", file=uri, column=name, fix=fix)
    ids = {int(one.metadata[_FIELD_ID]): one.name for one in arrow if _FIELD_ID in (one.metadata or {})}
    there = {name: ids.get(found.field_ids[name]) for name in columns} if ids else {}
    return {name: own for name, own in there.items() if own != name and (own is not None or name in arrow.names)}


def _renamed(arrow: pa.Schema, names: Mapping[str, str | None]) -> pa.Schema:
    """A file's columns as the table calls them."""
    own = {there: name for name, there in names.items()}
    kept = [one for one in arrow if one.name in own or one.name not in names]
    return pa.schema([one.with_name(own.get(one.name, one.name)) for one in kept])


def file_table(
    found: Partitioned, facts: pa.Table, columns: Sequence[str], conditions: Sequence[Condition]
) -> FileTable:
    """The files of a data set in columns.

    Args:
        columns: what is read.
        conditions: filters of rows.
    """
    which, names, folders = folders_of((one.file.uri for one in found.files), (one.values for one in found.files))
    codes, schemas = _schemas(facts)
    renames = [_names_in(schema, columns, found) for schema in schemas]
    texts = [json.dumps(own) if own else None for own in renames]
    lists = _list(facts, "group_rows")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lists.value_lengths().to_numpy(), dtype=np.int64)])
    arrays = [pa.array(which, pa.int32()), pa.array(names, pa.string())]
    arrays += [_flat(facts, name) for name in ("size_bytes", "changed_ns", "footer", "etag")]
    arrays.append(pa.array(_row_bytes(facts, columns), pa.float32()))
    arrays.append(pa.array([one.file.deleted for one in found.files], pa.binary()))
    arrays.append(pa.array([texts[code] for code in codes.tolist()], pa.string()))
    group_rows = lists.flatten().to_numpy().astype(np.int64)
    left_out = _left_out(found, facts, offsets, conditions, [renames[code] for code in codes.tolist()])
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


def _left_out(
    found: Partitioned,
    facts: pa.Table,
    offsets: I64,
    conditions: Sequence[Condition],
    renames: Sequence[Mapping[str, str | None]],
) -> Mask:
    """Row groups whose smallest and largest values say that no row can pass; not by columns of another name."""
    out = np.zeros(offsets[-1], np.bool_)
    for condition in conditions:
        if LOW + condition.column not in facts.column_names:
            continue
        low, high = (_list(facts, side + condition.column).flatten() for side in (LOW, HIGH))
        if pa.types.is_null(low.type):
            continue
        name = condition.column
        in_file = np.array([name not in {**one.values, **own} for one, own in zip(found.files, renames, strict=True)])
        out |= ~condition.may_hold(low, high) & np.repeat(in_file, np.diff(offsets))
    return out
