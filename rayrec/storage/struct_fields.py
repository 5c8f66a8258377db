"""The columns of a file: the fields of structs are columns of their own, named `user.id` or `user.address.city`.

A column that is itself named `user.id` hides the field `id` of a struct `user`. UUIDs are texts and
decimals without a fraction are integers (see `id_types.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from rayrec.storage.id_types import column_as_read, type_as_read

_STRUCT = pa.struct([]).id


def leaf_columns(arrow: pa.Schema) -> pa.Schema:
    """The columns of a file, with the fields of structs in place of the structs.

    Fields of structs in lists and maps are not columns.
    """
    if has_structs(arrow):
        arrow = pa.schema([_at(arrow, path).with_name(name) for name, path in _paths(arrow)])
    for number, of_file in enumerate(arrow.types):
        if (kind := type_as_read(of_file)) is not of_file:
            arrow = arrow.set(number, arrow.field(number).with_type(kind))
    return arrow


def leaf_table(rows: pa.Table | pa.RecordBatch) -> pa.Table:
    """Rows with the columns of `leaf_columns`. The fields of a null struct are null."""
    rows = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    paths = _paths(rows.schema)
    return _as_read(pa.table([_values(rows, path) for _, path in paths], names=[name for name, _ in paths]))


def columns_named(rows: pa.Table | pa.RecordBatch, names: Sequence[str]) -> pa.Table:
    """The columns of these names: columns, fields of structs, or whole structs; names that it lacks are left out."""
    rows = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    if not has_structs(rows.schema):
        known = set(rows.schema.names)
        return _as_read(rows.select([name for name in names if name in known]))
    paths = {name: (number,) for number, name in enumerate(rows.schema.names)} | dict(_paths(rows.schema))
    present = [name for name in names if name in paths]
    if not present:
        return rows.select([])  # keeps the number of rows
    return _as_read(pa.table([_values(rows, paths[name]) for name in present], names=present))


def with_types(arrow: pa.Schema, types: Mapping[str, pa.DataType]) -> pa.Schema:
    """The schema with other types of some columns or fields of structs; ignores names that it does not have."""
    for name, path in _paths(arrow):
        if name in types:
            arrow = arrow.set(path[0], _with_type(arrow.field(path[0]), path[1:], types[name]))
    return arrow


def has_structs(arrow: pa.Schema) -> bool:
    """Whether a column is a struct."""
    return any(kind.id == _STRUCT for kind in arrow.types)


def _paths(arrow: pa.Schema) -> list[tuple[str, tuple[int, ...]]]:
    """The name of each leaf, and its path: the position of the column, and of each field in its struct."""
    paths: list[tuple[str, tuple[int, ...]]] = []
    columns = {field.name for field in arrow if not pa.types.is_struct(field.type)}

    def add(name: str, kind: pa.DataType, path: tuple[int, ...]) -> None:
        if pa.types.is_struct(kind):
            for number, field in enumerate(kind.fields):
                add(f"{name}.{field.name}", field.type, (*path, number))
        elif len(path) == 1 or name not in columns:
            paths.append((name, path))

    for number, field in enumerate(arrow):
        add(field.name, field.type, (number,))
    return paths


def _at(arrow: pa.Schema, path: Sequence[int]) -> pa.Field:
    field = arrow.field(path[0])
    for number in path[1:]:
        field = field.type.field(number)
    return field.with_nullable(True) if len(path) > 1 else field


def _values(rows: pa.Table | pa.RecordBatch, path: Sequence[int]) -> pa.Array | pa.ChunkedArray:
    column = rows.column(path[0])
    return pc.struct_field(column, list(path[1:])) if len(path) > 1 else column


def _as_read(rows: pa.Table) -> pa.Table:
    for number, kind in enumerate(rows.schema.types):
        if type_as_read(kind) is not kind:
            rows = rows.set_column(number, rows.schema.names[number], column_as_read(rows.column(number)))
    return rows


def _with_type(field: pa.Field, path: Sequence[int], kind: pa.DataType) -> pa.Field:
    if not path:
        return field.with_type(kind)
    fields = list(field.type.fields)
    fields[path[0]] = _with_type(fields[path[0]], path[1:], kind)
    return field.with_type(pa.struct(fields))
