"""Predicates and conversions of Arrow types and arrays that pyarrow does not offer as one call."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
LATEST_S = 7_258_118_400  # 2200-01-01
# From here on, float64 does not hold every integer.
EXACT_INTEGERS = 2**53


def _type_ids(*kinds: pa.DataType) -> frozenset[int]:
    return frozenset(kind.id for kind in kinds)


# By type id, which costs a tenth of a test by each predicate of pyarrow: requests test each of their columns.
_ITEM = pa.null()
_LISTS = _type_ids(
    pa.list_(_ITEM), pa.large_list(_ITEM), pa.list_(_ITEM, 1), pa.list_view(_ITEM), pa.large_list_view(_ITEM)
)
_TEXTS = _type_ids(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view())


def is_list(kind: pa.DataType) -> bool:
    """True for every list layout of Arrow."""
    return kind.id in _LISTS


def leaf_of(kind: pa.DataType) -> pa.DataType:
    """The innermost value type of nested lists; the type itself if it is not a list."""
    while is_list(kind):
        kind = kind.value_type
    return kind


def is_text(kind: pa.DataType) -> bool:
    """True for strings and bytes of any layout, dictionary-encoded or not."""
    kind = kind.value_type if pat.is_dictionary(kind) else kind
    return kind.id in _TEXTS


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
    """The name of a type without layout, e.g. "integer", "text" or "list<number>"; `type_of` reads it.

    A number is a float64. Narrower floats and decimals have names of their own, because a value like 0.99 is another
    number in each; `as_named` converts to them.
    """
    if pat.is_dictionary(kind):
        kind = kind.value_type
    if pat.is_map(kind):
        return f"map<{plain_type(kind.key_type)}, {plain_type(kind.item_type)}>"
    if is_list(kind):
        return f"list<{plain_type(kind.value_type)}>"
    tests = {"text": is_text, "boolean": pat.is_boolean, "integer": pat.is_integer, "number": pat.is_float64}
    tests |= {"float32": pat.is_float32, "float16": pat.is_float16, "decimal": pat.is_decimal}
    tests |= {"time": pat.is_timestamp, "time ": pat.is_date}
    return next((name.strip() for name, test in tests.items() if test(kind)), str(kind))


_PLAIN = {
    "text": pa.large_string(),
    "boolean": pa.bool_(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "float32": pa.float64(),
    "float16": pa.float64(),
    "decimal": pa.float64(),
    "time": pa.timestamp("us"),
}
_NARROW = {"float32": pa.float32(), "float16": pa.float16()}


def type_of(plain: str) -> pa.DataType | None:
    """The widest type for values of the type that `plain_type` names; None for an unknown name."""
    if plain in _PLAIN:
        return _PLAIN[plain]
    outer, _, inner = plain.removesuffix(">").partition("<")
    names = inner.split(", ", 1) if outer == "map" else [inner] if outer == "list" else []
    types = [type_of(name) for name in names]
    if not types or None in types:
        return None
    return pa.map_(*types) if len(types) == 2 else pa.large_list(types[0])


def same_kind(plain: str, other: str) -> bool:
    """True if two names of `plain_type` differ at most in the width of numbers, which earlier runs did not store."""
    first, second = (re.sub(r"\b(float32|float16|decimal)\b", "number", name) for name in (plain, other))
    return first == second


def as_named(array: pa.Array, plain: str) -> pa.Array:
    """The numbers of an array rounded to the width that `plain` names, including numbers in lists and maps.

    So a number in a request equals the same number in the training data: 0.99 is 0.9900000095 in a float32 column.
    """
    kind = _of_width(array.type, plain)
    if kind == array.type:
        return array
    array = decoded(array)
    if pat.is_decimal(array.type) and plain != "number":
        array = plain_numbers(array)
    return pc.cast(array, kind, safe=False)


def _of_width(kind: pa.DataType, plain: str) -> pa.DataType:
    """The type with the width that `plain` names, for floats and decimals."""
    value_kind = kind.value_type if pat.is_dictionary(kind) else kind
    if plain in _NARROW:
        return _NARROW[plain] if pat.is_floating(value_kind) or pat.is_decimal(value_kind) else kind
    if plain == "number":  # decimals of earlier runs, which converted them this way
        return pa.float64() if pat.is_decimal(value_kind) else kind
    outer, _, inner = plain.removesuffix(">").partition("<")
    if outer == "list" and is_list(kind):
        item = _of_width(kind.value_type, inner)
        return kind if item == kind.value_type else pa.large_list(item)
    if outer == "map" and pat.is_map(kind) and ", " in inner:
        key, value = (
            _of_width(*pair) for pair in zip((kind.key_type, kind.item_type), inner.split(", ", 1), strict=True)
        )
        return kind if (key, value) == (kind.key_type, kind.item_type) else pa.map_(key, value)
    return kind


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


def shown(array: pa.Array, position: int, form: Callable[[Any], str] = str) -> str:
    """A value as text for an error message. Texts that are not UTF-8 are shown as bytes."""
    try:
        return form(array[position].as_py())
    except (ValueError, OverflowError):  # a text that is not UTF-8; a time beyond the year 9999
        value = decoded(array.slice(position, 1))
        return repr(value.cast(pa.large_binary())[0].as_py()) if is_text(value.type) else f"not a valid {value.type}"


def plain_numbers(array: pa.Array) -> pa.Array:
    """Numbers, booleans and decimals as an array of integers or floats."""
    array = decoded(array)
    if pat.is_boolean(array.type):
        return pc.cast(array, pa.uint8())
    return _floats_of_decimals(array) if pat.is_decimal(array.type) else array


def _floats_of_decimals(array: pa.Array) -> pa.Array:
    """The nearest float64 of each decimal, as Python reads 0.07. Arrow's cast misses it for one value in eight."""
    kind = array.type
    if pat.is_decimal128(kind) and 0 <= kind.scale <= 22 and len(array):  # 10**22 is the last power that is exact
        words = np.frombuffer(array.buffers()[1], np.int64)[2 * array.offset : 2 * (array.offset + len(array))]
        low, high = words[::2], words[1::2]
        nulls = nulls_of(array)
        exact = (high == low >> 63) & (low < EXACT_INTEGERS) & (low > -EXACT_INTEGERS)
        if (exact if nulls is None else exact | nulls).all():
            return pa.array(low / 10.0**kind.scale, mask=nulls)
    return pc.cast(pc.cast(array, pa.string()), pa.float64())


def floats_of(array: pa.Array) -> npt.NDArray[np.float64]:
    """Numbers and booleans as float64; NaN for a null."""
    numbers: npt.NDArray[np.float64] = pc.cast(plain_numbers(array), pa.float64(), safe=False).to_numpy(
        zero_copy_only=False
    )
    return numbers


def int64_of(array: pa.Array) -> npt.NDArray[np.int64]:
    """Integers without nulls as int64, uint64 by their bits."""
    numbers = array.to_numpy(zero_copy_only=False)
    return numbers.view(np.int64) if numbers.dtype == np.uint64 else numbers.astype(np.int64, copy=False)


def seconds_of(times: pa.Array, unit: str) -> npt.NDArray[np.int64]:
    """Seconds since 1970, rounded down, of timestamps, dates, or integers in `unit`; -1 for a null."""
    times = decoded(times)
    if pat.is_date(times.type):
        times = times.cast(pa.timestamp("s" if pat.is_date32(times.type) else "ms"))
    unit = times.type.unit if pat.is_timestamp(times.type) else unit
    numbers = pc.cast(times, pa.int64(), safe=False).fill_null(-1).to_numpy(zero_copy_only=False)
    seconds: npt.NDArray[np.int64] = np.floor_divide(numbers, UNITS[unit])
    return seconds


def micros_of(times: pa.Array, unit: str) -> npt.NDArray[np.int64]:
    """Microseconds since 1970, rounded down, of timestamps, dates, or integers in `unit`; floats are rounded to the
    nearest; texts are in ISO 8601, in UTC where they name no zone. Without nulls.

    Raises:
        ArrowInvalid: a text is not a time, or a float is not a number of `unit` since 1970.
    """
    times = decoded(times)
    if pat.is_floating(times.type):
        rounded = np.rint(times.to_numpy(zero_copy_only=False).astype(np.float64) * (1e6 / UNITS[unit]))
        if not (np.abs(rounded) < 1e17).all():
            raise pa.ArrowInvalid(f"a time is not a number of {unit} since 1970")
        return rounded.astype(np.int64)
    if is_text(times.type):
        times = _times_of_texts(times)
    if pat.is_integer(times.type):
        times = times.cast(pa.int64()).cast(pa.timestamp(unit))
    micros: npt.NDArray[np.int64] = times.cast(pa.timestamp("us"), safe=False).cast(pa.int64()).to_numpy()
    return micros


def _times_of_texts(texts: pa.Array) -> pa.Array:
    texts = texts.cast(pa.string())
    texts = pc.if_else(
        pc.match_substring_regex(texts, r"^\d+-\d+-\d+$"), pc.binary_join_element_wise(texts, "00:00", " "), texts
    )
    zoned = pc.match_substring_regex(texts, r"(Z|[+-]\d\d(:?\d\d)?)$")
    texts = pc.if_else(zoned, texts, pc.binary_join_element_wise(texts, "Z", ""))
    # Arrow refuses digits that its type does not hold.
    texts = pc.replace_substring_regex(texts, r"(\.\d{6})\d+", r"\1")
    return texts.cast(pa.timestamp("us", "UTC"))


def impossible_times(times: pa.Array, unit: str) -> npt.NDArray[np.int64]:
    """Positions of integers outside 1970 to 2200 in `unit`, which probably have another unit.

    Nulls, timestamps and dates are never among them: they have a unit of their own.
    """
    times = decoded(times)
    if not pat.is_integer(times.type):
        return np.empty(0, np.int64)
    seconds, nulls = seconds_of(times, unit), nulls_of(times)
    outside = (seconds < 0) | (seconds >= LATEST_S)
    return np.flatnonzero(outside if nulls is None else outside & ~nulls)
