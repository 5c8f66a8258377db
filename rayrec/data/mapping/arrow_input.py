"""Converts input of users and services (Arrow, pandas, Python values) to Arrow tables that a schema can map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import is_list, is_text, leaf_of, plain_type, type_of
from rayrec.data.mapping.null_types import wants_text
from rayrec.data.mapping.rows import FEW_ROWS
from rayrec.data.mapping.schema import Schema, SparseFeature
from rayrec.storage.errors import DataError, first_line
from rayrec.storage.struct_fields import columns_named, has_structs, leaf_columns

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

    Tabular: TypeAlias = (
        pa.Table | pa.RecordBatch | pd.DataFrame | Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]
    )


def inferred(data: Tabular, schema: Schema, columns: Sequence[str]) -> pa.Table:
    """The given columns of `data` as an Arrow table, without missing ones.

    They have the types of their values, or those that derived columns need.

    Args:
        data: an Arrow table or record batch, a pandas DataFrame, a dict of columns, or a list of rows (dicts; a
            missing key is null).

    Raises:
        DataError: values without a common type, columns of unequal lengths.
        TypeError: unsupported type of `data`.
    """
    arrays = _columns(data, columns, {name: type_of(plain) for name, plain in schema.column_types.items()})
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"the columns have unequal lengths: {lengths}", fix="give every column one value per row")
    return pa.table(arrays)


def as_expected(table: pa.Table, schema: Schema) -> pa.Table:
    """Columns of `inferred` with the types that the schema expects; another call changes nothing.

    Python values and pandas have fewer types than Parquet. An all-null column gets the type that the schema expects.
    Whole floats in an id column become integers: pandas converts integer columns with nulls to floats.

    Raises:
        DataError: fractional ids, or texts that are not times.
    """
    types = {name: type_of(plain) for name, plain in schema.column_types.items()}
    arrays = dict(zip(table.column_names, table.columns, strict=True))
    features = {feature.column: feature for feature in schema.sparse}
    numbers = {feature.column: feature.width > 1 for feature in schema.dense}
    numbers |= {feature.weight_column: True for feature in schema.sparse if feature.weight_column}
    times = {v.column_name for sequence in schema.sequences for v in sequence.values if v.kind == "time"}
    zone = _common_zone([array.type for name, array in arrays.items() if name in types])
    for name, array in arrays.items():
        kind = types.get(name)
        if kind is not None and pat.is_null(array.type):
            arrays[name] = array.cast(_of_zone(kind, zone))
        elif name in features:
            arrays[name] = _ids(name, array, features[name])
        elif name in numbers:
            arrays[name] = _nulls(array, pa.float64(), numbers[name]) if _leaf_is_null(array.type) else array
        elif name in times and is_text(leaf_of(array.type)):
            arrays[name] = _event_times(name, array)
    return pa.table(arrays)


def _columns(data: Any, names: Sequence[str], types: Mapping[str, pa.DataType | None]) -> dict[str, Any]:
    if isinstance(data, pa.Table | pa.RecordBatch):
        known = leaf_columns(data.schema).names if has_structs(data.schema) else data.schema.names
        present = [name for name in names if known.count(name) == 1]
        return dict(zip(present, columns_named(data, present).columns, strict=True))
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        if not all(isinstance(row, Mapping) for row in data):
            raise TypeError("a list of rows must contain dicts")
        given_names = {name for row in data for name in row}
        data = {name: [row.get(name) for row in data] for name in given_names.intersection(names)}
    elif hasattr(data, "columns") and hasattr(data, "iloc"):
        data = {name: data[name] for name in names if list(data.columns).count(name) == 1}
    if not isinstance(data, Mapping):
        raise TypeError(
            f"{type(data).__name__} is not an Arrow table, pandas DataFrame, dict of columns, or list of rows"
        )
    present = [name for name in names if name in data]
    numbers = _numbers(data, [name for name in present if types.get(name) is None])
    return {name: numbers[name] if name in numbers else _array(name, data[name], types.get(name)) for name in present}


def _numbers(data: Mapping[str, Any], names: Sequence[str]) -> dict[str, pa.Array]:
    """The columns that are short lists of integers or of floats alone, as slices of one array per type.

    pyarrow takes microseconds to convert a list, which is most of the time of a request with one row.
    """
    same_kind: dict[type, list[str]] = {int: [], float: []}
    for name in names:
        values = data[name]
        if type(values) is list and len(values) <= FEW_ROWS and len(kinds := set(map(type, values))) == 1:
            same_kind.get(kinds.pop(), []).append(name)
    arrays: dict[str, pa.Array] = {}
    for kind, of_kind in ((pa.int64(), same_kind[int]), (pa.float64(), same_kind[float])):
        try:
            matrix = np.array([data[name] for name in of_kind], kind.to_pandas_dtype())
        except (ValueError, OverflowError):  # of unequal lengths, or beyond int64
            continue
        count = matrix.shape[1] if of_kind else 0
        array = pa.Array.from_buffers(kind, matrix.size, [None, pa.py_buffer(matrix)])
        arrays |= {name: array.slice(number * count, count) for number, name in enumerate(of_kind)}
    return arrays


def _array(name: str, values: Any, kind: pa.DataType | None = None) -> pa.Array | pa.ChunkedArray:
    """Converts one column.

    Args:
        kind: the required type, for input columns of derived columns.
    """
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    from_pandas = hasattr(values, "iloc") or None
    try:
        return pa.array(values, from_pandas=from_pandas) if kind is None else _typed(values, kind, from_pandas)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        text = first_line(error)
        problem = f"the values have no common type: {text}"
        fix = "use values of one type"
        if kind is not None:
            problem, fix = f"cannot convert the values to {plain_type(kind)}: {text}", "use values as in training"
        raise DataError(problem, column=name, fix=fix) from error


def _typed(values: Any, kind: pa.DataType, from_pandas: bool | None) -> pa.Array:
    """Converts dicts to maps, texts to times (ISO 8601, UTC without a zone), and numbers to the required type."""
    if pat.is_map(kind):
        key = int if pat.is_integer(kind.key_type) else lambda text: text  # JSON has texts as keys
        values = [
            [(key(name), item) for name, item in value.items()] if isinstance(value, Mapping) else value
            for value in values
        ]
    leaf = leaf_of(kind)
    array = pa.array(values, from_pandas=from_pandas) if pat.is_timestamp(leaf) or pat.is_integer(leaf) else None
    if array is not None and pat.is_integer(leaf) and pat.is_floating(leaf_of(array.type)):
        if (inexact := _inexact(array)) is not None:
            raise ValueError(f"{inexact:.0f} may be another integer that was rounded to a float; use integers")
        return array.cast(kind)  # refuses 1.5, which pa.array(values, int64) would truncate
    if (
        array is None
        or pat.is_integer(leaf)
        or (not is_text(leaf_of(array.type)) and not pat.is_integer(leaf_of(array.type)))
    ):
        return pa.array(values, kind, from_pandas=from_pandas)
    if pat.is_integer(leaf_of(array.type)):
        raise TypeError("integers are not times; use ISO 8601 texts or timestamps")
    return _parsed_times(array, kind)


def _parsed_times(array: Any, kind: pa.DataType) -> Any:
    """Texts (ISO 8601, UTC without a zone) as times.

    Raises:
        pa.ArrowInvalid: a text is not a time.
    """
    try:
        return array.cast(kind)
    except pa.ArrowInvalid as error:
        try:
            return array.cast(_of_leaf(array.type, pa.timestamp("us", "UTC"))).cast(kind)
        except pa.ArrowInvalid:
            raise error from None


def _event_times(name: str, array: Any) -> Any:
    """The times of a sequence, given as texts."""
    try:
        return _parsed_times(array, _of_leaf(array.type, pa.timestamp("us")))
    except pa.ArrowInvalid as error:
        problem, fix = (
            f"cannot convert the texts to times: {first_line(error)}",
            "use ISO 8601, e.g. 2024-01-31T23:59:00",
        )
        raise DataError(problem, column=name, fix=fix) from error


def _ids(name: str, array: Any, feature: SparseFeature) -> Any:
    """Converts ids to integers or strings; `check_types` refuses other types later."""
    if _leaf_is_null(array.type):
        kind = pa.string() if wants_text(feature) else pa.int64()
        if feature.kind == "weighted_id_list" and feature.weight_column is None:
            kind = pa.struct([("id", kind), ("weight", pa.float64())])
        return _nulls(array, kind, feature.kind != "id")
    if not pat.is_floating(leaf_of(array.type)):
        return array
    if (inexact := _inexact(array)) is not None:
        raise DataError(
            f"feature {feature.name!r}: the id is a float too large to hold every integer, so it may be another id, "
            "rounded",
            column=name,
            value=f"{inexact:.0f}",
            fix="use integers or strings; for integers with nulls in pandas use Int64",
        )
    try:  # pandas converts integers to floats if there is a null, in lists too
        return _nan_to_null(array).cast(_of_leaf(array.type, pa.int64()), safe=True)
    except pa.ArrowInvalid as error:
        fix = "use integers or strings; for integers with nulls in pandas use Int64"
        raise DataError(
            f"feature {feature.name!r}: an id must be a whole number: {error}", column=name, fix=fix
        ) from error


def _inexact(array: Any) -> float | None:
    """The first float that may be another integer, rounded: from 2**53 on in float64, from 2**24 on in float32."""
    leaf = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    while is_list(leaf.type):
        leaf = leaf.flatten()
    numbers = leaf.to_numpy(zero_copy_only=False)
    large = np.flatnonzero(np.abs(numbers) >= 2.0 ** (np.finfo(numbers.dtype).nmant + 1))
    return float(numbers[large[0]]) if len(large) else None


def _nulls(array: Any, kind: pa.DataType, listed: bool) -> Any:
    return array.cast(pa.list_(kind) if listed and pat.is_null(array.type) else _of_leaf(array.type, kind))


def _nan_to_null(array: Any) -> Any:
    if is_list(array.type):
        return array
    return pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)


def _common_zone(kinds: Sequence[pa.DataType]) -> str | None:
    """The zone of the timestamps among these types; None if there is none, or if some lack a zone."""
    zones = [leaf_of(kind).tz for kind in kinds if pat.is_timestamp(leaf_of(kind))]
    return zones[0] if zones and None not in zones else None


def _of_zone(kind: pa.DataType, zone: str | None) -> pa.DataType:
    """The type with a zone, if it is one of times: nulls have times of the same kind as the other columns."""
    return _of_leaf(kind, pa.timestamp("us", zone)) if pat.is_timestamp(leaf_of(kind)) else kind


def _leaf_is_null(kind: pa.DataType) -> bool:
    return bool(pat.is_null(leaf_of(kind)))


def _of_leaf(kind: pa.DataType, leaf: pa.DataType) -> pa.DataType:
    return pa.list_(_of_leaf(kind.value_type, leaf)) if is_list(kind) else leaf
