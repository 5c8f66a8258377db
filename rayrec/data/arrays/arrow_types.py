"""Predicates and conversions of Arrow types and arrays that pyarrow does not offer as one call."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


_LISTS = (pat.is_list, pat.is_large_list, pat.is_fixed_size_list, pat.is_list_view, pat.is_large_list_view)
_TEXTS = (pat.is_string, pat.is_large_string, pat.is_string_view)
_BYTES = (pat.is_binary, pat.is_large_binary, pat.is_binary_view)


def is_list(kind: pa.DataType) -> bool:
    """True for every list layout of Arrow."""
    return any(test(kind) for test in _LISTS)


def leaf_of(kind: pa.DataType) -> pa.DataType:
    """The innermost value type of nested lists; the type itself if it is not a list."""
    while is_list(kind):
        kind = kind.value_type
    return kind


def is_text(kind: pa.DataType) -> bool:
    """True for strings and bytes of any layout, dictionary-encoded or not."""
    kind = kind.value_type if pat.is_dictionary(kind) else kind
    return any(test(kind) for test in (*_TEXTS, *_BYTES))


def without_views(kind: pa.DataType) -> pa.DataType:
    """The type with view layouts replaced, at any depth: Arrow's compute functions do not accept all of them."""
    if pat.is_string_view(kind):
        return pa.large_string()
    if pat.is_binary_view(kind):
        return pa.large_binary()
    if pat.is_struct(kind):
        return pa.struct([field.with_type(without_views(field.type)) for field in kind.fields])
    if not is_list(kind):
        return kind
    item = kind.value_field.with_type(without_views(kind.value_type))
    if pat.is_fixed_size_list(kind):
        return pa.list_(item, kind.list_size)
    large = pat.is_large_list(kind) or pat.is_large_list_view(kind)
    return pa.large_list(item) if large else pa.list_(item)


def plain_type(kind: pa.DataType) -> str:
    """The name of a type without width and layout, e.g. "integer", "text" or "list<number>"; `type_of` reads it."""
    if pat.is_dictionary(kind):
        kind = kind.value_type
    if pat.is_map(kind):
        return f"map<{plain_type(kind.key_type)}, {plain_type(kind.item_type)}>"
    if is_list(kind):
        return f"list<{plain_type(kind.value_type)}>"
    tests = {"text": is_text, "boolean": pat.is_boolean, "integer": pat.is_integer, "number": pat.is_floating}
    tests |= {"number ": pat.is_decimal, "time": pat.is_timestamp, "time ": pat.is_date}
    return next((name.strip() for name, test in tests.items() if test(kind)), str(kind))


_PLAIN = {
    "text": pa.large_string(),
    "boolean": pa.bool_(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "time": pa.timestamp("us"),
}


def type_of(plain: str) -> pa.DataType | None:
    """The widest type with the name that `plain_type` gives; None for an unknown name."""
    if plain in _PLAIN:
        return _PLAIN[plain]
    outer, _, inner = plain.removesuffix(">").partition("<")
    names = inner.split(", ", 1) if outer == "map" else [inner] if outer == "list" else []
    types = [type_of(name) for name in names]
    if not types or None in types:
        return None
    return pa.map_(*types) if len(types) == 2 else pa.large_list(types[0])


def from_list_view(array: pa.ListViewArray | pa.LargeListViewArray) -> pa.Array:
    """A list view as a list array. pyarrow's cast loses values of views that overlap or are out of order."""
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    ends = pc.cumulative_sum(lengths.cast(pa.int64()))
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends])
    mask = array.is_null() if array.null_count else None
    return pa.LargeListArray.from_arrays(offsets, array.flatten(), mask=mask)


def nulls_of(array: pa.Array) -> npt.NDArray[np.bool_] | None:
    """The null mask; None if no value is null."""
    return array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None


def decoded(array: pa.Array) -> pa.Array:
    """The array without dictionary encoding."""
    return array.dictionary_decode() if pat.is_dictionary(array.type) else array


def plain_numbers(array: pa.Array) -> pa.Array:
    """Numbers, booleans and decimals as an array of integers or floats."""
    array = decoded(array)
    if pat.is_boolean(array.type):
        return pc.cast(array, pa.uint8())
    return pc.cast(array, pa.float64(), safe=False) if pat.is_decimal(array.type) else array


def floats_of(array: pa.Array) -> npt.NDArray[np.float64]:
    """Numbers and booleans as float64; NaN for a null."""
    numbers: npt.NDArray[np.float64] = pc.cast(plain_numbers(array), pa.float64(), safe=False).to_numpy(
        zero_copy_only=False
    )
    return numbers


def seconds_of(times: pa.Array, unit: str) -> npt.NDArray[np.int64]:
    """Seconds since 1970, rounded down, of timestamps, dates, or integers in `unit`; -1 for a null."""
    times = decoded(times)
    if pat.is_date(times.type):
        times = times.cast(pa.timestamp("s" if pat.is_date32(times.type) else "ms"))
    unit = times.type.unit if pat.is_timestamp(times.type) else unit
    numbers = pc.cast(times, pa.int64(), safe=False).fill_null(-1).to_numpy(zero_copy_only=False)
    seconds: npt.NDArray[np.int64] = np.floor_divide(numbers, UNITS[unit])
    return seconds
