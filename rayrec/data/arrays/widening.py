"""The one law by which the types of a column in different files become one type, for files of every format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import is_list, is_text
from rayrec.storage.errors import DataError, first_line

_INTEGERS = (pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64())
# Holds every integer, also of 64 bits without a sign.
_DIGITS = pa.decimal128(20, 0)
_LARGE = (pat.is_large_list, pat.is_large_list_view)
_UTF8 = (pat.is_string, pat.is_large_string, pat.is_string_view)


def wider(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """The type that values of both types are read as; None without one, as for a text and a number.

    It is the law of `pa.unify_schemas(promote_options="permissive")`: null widens to anything, integers to wider ones
    and to floats, decimals to more digits, times to the finer unit, lists, maps and structs by their parts. Whether a
    column may have the type is up to its role: a dense feature may be a float, an id may not.
    """
    # Differs from Arrow's rule if that loses values or refuses columns with the same values:
    # - Texts, dictionaries and views of any layout are one kind here; Arrow does not unify views or dictionaries with
    #   plain texts. Parts of lists, maps and structs go through this function for the same reason.
    # - uint64 with a signed integer is decimal128(20, 0), which is a number and no id; Arrow makes int64, which does
    #   not hold ids from 2**63 on.
    # - Whole numbers or decimals with floats are double; Arrow makes float16 of int8 with float16, or decimals.
    # - Integers with decimals keep 20 digits before the point, so that the order of files does not matter; Arrow counts
    #   one too few for int64 and decimal(5, 2).
    # - A date with a timestamp without a zone is a timestamp: CSV has dates where all times of a file are midnight.
    if left == right:
        return left
    if pat.is_null(left) or pat.is_null(right):
        return right if pat.is_null(left) else left
    if _is_binary(left) and _is_binary(right):
        return pa.large_string() if _is_utf8(left) and _is_utf8(right) else pa.large_binary()
    left, right = (kind.value_type if pat.is_dictionary(kind) else kind for kind in (left, right))
    if is_list(left) and is_list(right):
        item = wider(left.value_type, right.value_type)
        large = any(test(kind) for test in _LARGE for kind in (left, right))
        return None if item is None else pa.large_list(item) if large else pa.list_(item)
    if pat.is_map(left) and pat.is_map(right):
        key, item = wider(left.key_type, right.key_type), wider(left.item_type, right.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    if pat.is_struct(left) and pat.is_struct(right):
        return _wider_struct(left, right)
    if pat.is_integer(left) and pat.is_integer(right):
        return next((kind for kind in _INTEGERS if all(map(partial(_fits, kind), (left, right)))), _DIGITS)
    if any(pat.is_floating(kind) for kind in (left, right)) and _are_numbers(left, right):
        both = pat.is_floating(left) and pat.is_floating(right)
        return max(left, right, key=lambda kind: kind.bit_width) if both else pa.float64()
    if _are_numbers(left, right):
        return _by_arrow(*(_DIGITS if pat.is_integer(k) else k for k in (left, right)))
    for date, time in ((left, right), (right, left)):
        if pat.is_date(date) and pat.is_timestamp(time) and time.tz is None:
            return time
    return _by_arrow(left, right)


def common_types(schemas: Iterable[tuple[str, pa.Schema]], fix: str = "") -> pa.Schema:
    """The columns of all files, each with its widest type.

    Args:
        schemas: URI and schema of each file.
        fix: what the user can do about the column `COLUMN` if it has no common type.

    Raises:
        DataError: a column without a common type (names both files), or with a name that is not unique.
    """
    types: dict[str, pa.DataType] = {}
    seen: dict[str, tuple[str, pa.DataType]] = {}
    for uri, schema in schemas:
        for field in schema:
            if schema.names.count(field.name) > 1:
                raise DataError("the name is not unique", file=uri, column=field.name, fix="rename one of the columns")
            types[field.name] = merged(types, seen, field.name, field.type, uri, fix)
    return pa.schema(list(types.items()))


def merged(
    types: Mapping[str, pa.DataType],
    seen: dict[str, tuple[str, pa.DataType]],
    column: str,
    kind: pa.DataType,
    uri: str,
    fix: str = "",
) -> pa.DataType:
    """The widest type of a column after another file.

    Args:
        types: the widest type so far, by column.
        seen: by column the first file with a type that is not null, which an error names; it is updated.

    Raises:
        DataError: there is none.
    """
    wide = wider(types.get(column, kind), kind)
    if wide is None:
        first_uri, first_type = seen[column]
        raise differing(column, kind, uri, first_type, first_uri, fix)
    if column not in seen or pat.is_null(seen[column][1]):
        seen[column] = (uri, kind)
    return wide


def differing(
    column: str, kind: pa.DataType, uri: str, first_type: pa.DataType, first_uri: str, fix: str = ""
) -> DataError:
    """The error for a column without a common type."""
    return DataError(
        f"the column's type differs between files: {kind} here, {first_type} in {first_uri}",
        file=uri,
        column=column,
        fix=fix.replace("COLUMN", column) or "write this column with the same type in all files",
    )


def widened(array: pa.Array | pa.ChunkedArray, kind: pa.DataType, *, rounded: bool = True) -> pa.Array:
    """The array as a wider type.

    Args:
        rounded: if False, refuse integers above 2**53 that become floats.

    Raises:
        pa.ArrowInvalid: a value that the type does not hold.
    """
    if array.type == kind:
        return array
    return pc.cast(array, options=pc.CastOptions(kind, allow_float_truncate=rounded))


def concatenated(tables: Sequence[pa.Table], uris: Sequence[str], *, rounded: bool = False) -> pa.Table:
    """The rows of all files; a column that a file lacks is null there.

    Args:
        uris: the file of each table.
        rounded: as in `widened`; without a schema a column may hold ids, which are not rounded.

    Raises:
        DataError: as `common_types`, or a value that the widest type does not hold.
    """
    schema = common_types(zip(uris, (table.schema for table in tables), strict=True))
    return pa.concat_tables(
        widened_table(table, schema, uri, rounded=rounded) for uri, table in zip(uris, tables, strict=True)
    )


def widened_table(table: pa.Table, schema: pa.Schema, uri: str, *, rounded: bool = False) -> pa.Table:
    """The rows of a file with the columns of `common_types`; a column that it lacks is null.

    Raises:
        DataError: a value that the widest type does not hold.
    """
    columns = []
    for name, kind in zip(schema.names, schema.types, strict=True):
        try:
            has_column = name in table.column_names
            column = widened(table[name], kind, rounded=rounded) if has_column else pa.nulls(len(table), kind)
        except pa.ArrowInvalid as error:
            problem = f"a value does not fit {kind}, the common type of all files: {first_line(error)}"
            fix = "write this column with the same type in all files"
            raise DataError(problem, file=uri, column=name, fix=fix) from error
        columns.append(column)
    return pa.table(columns, schema=schema)


def filled(kind: pa.DataType, expected: pa.DataType) -> pa.DataType:
    """The type with null, at any depth of lists and structs, replaced by the expected type."""
    if pat.is_null(kind):
        return expected
    if is_list(kind) and is_list(expected):
        item = filled(kind.value_type, expected.value_type)
        return kind if item == kind.value_type else pa.large_list(item)
    if pat.is_struct(kind) and pat.is_struct(expected):
        known = {field.name: field.type for field in expected}
        return pa.struct([f.with_type(filled(f.type, known[f.name])) if f.name in known else f for f in kind])
    return kind


def has_null_type(kind: pa.DataType) -> bool:
    """True if all values are null, or all elements of lists, or a field of all structs."""
    if not pat.is_nested(kind):
        return bool(pat.is_null(kind))
    if is_list(kind):
        return has_null_type(kind.value_type)
    if pat.is_struct(kind):
        return any(has_null_type(field.type) for field in kind)
    return False


def _by_arrow(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    try:
        schemas = [pa.schema([("column", kind)]) for kind in (left, right)]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return None


def _wider_struct(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """All fields of both; a field that one lacks is null there."""
    types = {field.name: field.type for field in left}
    for field in right:
        wide = wider(types.get(field.name, field.type), field.type)
        if wide is None:
            return None
        types[field.name] = wide
    return pa.struct(list(types.items()))


def _are_numbers(*kinds: pa.DataType) -> bool:
    return all(pat.is_integer(kind) or pat.is_floating(kind) or pat.is_decimal(kind) for kind in kinds)


def _fits(wide: pa.DataType, narrow: pa.DataType) -> bool:
    """True if the integer type `wide` holds all values of `narrow`."""
    if pat.is_signed_integer(narrow) and not pat.is_signed_integer(wide):
        return False
    extra = pat.is_signed_integer(wide) and not pat.is_signed_integer(narrow)
    return bool(wide.bit_width - extra >= narrow.bit_width)


def _is_binary(kind: pa.DataType) -> bool:
    return is_text(kind) or bool(pat.is_fixed_size_binary(kind))


def _is_utf8(kind: pa.DataType) -> bool:
    kind = kind.value_type if pat.is_dictionary(kind) else kind
    return any(test(kind) for test in _UTF8)
