"""Derived columns of numbers, times and your own functions. `lists.py` has derived columns of lists, maps and texts.

Every function takes a spec, its input arrays and the table's problems, and returns an array of as many rows. The value
of a row depends on that row only.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import (
    decoded,
    floats_of,
    impossible_times,
    is_list,
    is_text,
    leaf_of,
    nulls_of,
    plain_numbers,
    shown,
)
from rayrec.data.arrays.buffers import I64
from rayrec.data.arrays.lists import row_of, unnest
from rayrec.data.mapping.derived.expressions import compute
from rayrec.data.mapping.derived.lists import relisted
from rayrec.data.mapping.derived.specs import (
    Age,
    Buckets,
    Custom,
    Entity,
    Events,
    Expression,
    Missing,
    TimePart,
)
from rayrec.data.mapping.problems import Problems
from rayrec.storage.errors import DataError


class FunctionFailed(DataError):
    """A user's function raised an exception, for all rows or for some."""


_DAY_US = 86_400_000_000
# Functions of microseconds since 1970, local time.
_TIME_PARTS: dict[str, Callable[[I64], I64]] = {
    "minute": lambda us: us // 60_000_000 % 60,
    "hour": lambda us: us // 3_600_000_000 % 24,
    "weekday": lambda us: (us // _DAY_US + 3) % 7,  # 1970-01-01 was a Thursday
    "day": lambda us: pc.day(pa.array(us, pa.timestamp("us"))).to_numpy(),
    "month": lambda us: pc.month(pa.array(us, pa.timestamp("us"))).to_numpy(),
}
CLEAN = "clean the column, or make the value null: the feature's `on_null` or `default` handles nulls"
_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400}


def _elements(array: pa.Array, function: Callable[[pa.Array, Callable[[I64], I64]], pa.Array]) -> pa.Array:
    """Applies `function` to an array, or to the elements of a list array.

    The second argument of `function` maps positions in its array to rows.
    """
    if not is_list(array.type):
        return function(array, lambda positions: positions)
    lists = unnest(array)
    return relisted(lists, function(lists.leaf, lambda positions: row_of(lists.offsets, positions)))


def buckets(spec: Buckets, arrays: list[pa.Array], problems: Problems) -> pa.Array:
    if spec.edges is None:
        raise unfitted(f"derived column {spec.name!r}", "its quantiles", spec.column)
    edges = np.asarray(spec.edges)

    def bucket_numbers(array: pa.Array, rows: Callable[[I64], I64]) -> pa.Array:
        numbers, nulls = floats_of(array), nulls_of(array)
        nan = np.isnan(numbers)
        bad = np.flatnonzero(nan if nulls is None else nan & ~nulls)
        problems.add(
            rows(bad), spec.column, f"derived column {spec.name!r}: NaN is in no bucket", CLEAN, lambda _: "nan"
        )
        return pa.array(np.searchsorted(edges, numbers, side="right"), mask=nan if nan.any() else None)

    return _elements(arrays[0], bucket_numbers)


def missing(_: Missing, arrays: list[pa.Array], __: Problems) -> pa.Array:
    (array,) = arrays
    nan = pat.is_floating(array.type)
    return pc.cast(pc.is_null(array, nan_is_null=nan), pa.int8())


def instants(
    spec: TimePart | Age | Entity | Events, column: str, array: pa.Array, problems: Problems, rows: Callable[[I64], I64]
) -> pa.Array:
    """Times as microseconds since 1970 (UTC). Integers out of range for the unit become null."""
    array = decoded(array)
    if pat.is_null(array.type) or pat.is_integer(array.type):
        outside = impossible_times(array, spec.unit)
        problem = f"derived column {spec.name!r}: the time must be between 1970 and 2200 in {spec.unit}"
        fix = f"correct the column, or the `unit` of derived column {spec.name!r} (now {spec.unit})"
        given = array
        problems.add(rows(outside), column, problem, fix, lambda k: shown(given, int(outside[k])))
        if len(outside):
            mask = np.zeros(len(array), np.bool_)
            mask[outside] = True
            array = pc.if_else(pa.array(mask), None, array)
        array = array.cast(pa.int64()).cast(pa.timestamp(spec.unit))
    elif not (pat.is_timestamp(array.type) or pat.is_date(array.type)):
        raise TypeError("a time must be a timestamp, a date or an integer")
    return array.cast(pa.timestamp("us"), safe=False)


def time_part(spec: TimePart, arrays: list[pa.Array], problems: Problems) -> pa.Array:
    def component(array: pa.Array, rows: Callable[[I64], I64]) -> pa.Array:
        times = instants(spec, spec.column, array, problems, rows)
        nulls = nulls_of(times)
        if spec.zone != "UTC":
            times = pc.local_timestamp(times.cast(pa.timestamp("us", spec.zone)))
        micros = times.cast(pa.int64())
        numbers = _TIME_PARTS[spec.part]((micros if nulls is None else micros.fill_null(0)).to_numpy())
        return pa.array(numbers.astype(np.int64, copy=False), mask=nulls)

    return _elements(arrays[0], component)


def age(spec: Age, arrays: list[pa.Array], problems: Problems) -> pa.Array:
    kinds = [array.type.value_type if pat.is_dictionary(array.type) else leaf_of(array.type) for array in arrays]
    zones = [kind.tz for kind in kinds if pat.is_timestamp(kind)]
    if len(zones) == 2 and None in zones and zones != [None, None]:
        with_zone, without = (spec.column, spec.at) if zones[0] else (spec.at, spec.column)
        raise DataError(
            f"derived column {spec.name!r}: times of {with_zone!r} have a time zone, times of {without!r} have none, "
            "so their difference could be wrong by hours",
            column=without,
            fix=f"write {without!r} with its time zone, or both columns without one",
        )
    row_times = instants(spec, spec.at, arrays[1], problems, lambda positions: positions)
    unit_us = 1e6 * _SECONDS[spec.per]

    def ages_of(array: pa.Array, rows: Callable[[I64], I64]) -> pa.Array:
        events = instants(spec, spec.column, array, problems, rows)
        now = row_times if not is_list(arrays[0].type) else row_times.take(pa.array(rows(np.arange(len(array)))))
        age_us = pc.subtract(now.cast(pa.int64()), events.cast(pa.int64()))
        future = pc.less(age_us, 0)
        if spec.on_future == "zero":
            age_us = pc.if_else(future, 0, age_us)
        elif pc.any(future).as_py():
            bad = np.flatnonzero(future.fill_null(False).to_numpy(zero_copy_only=False))
            if spec.on_future == "error":
                problem = f"derived column {spec.name!r}: the event is later than the row's time"
                problems.add(rows(bad), spec.column, problem, CLEAN, lambda k: shown(events, int(bad[k])))
            age_us = pc.if_else(future, None, age_us)
        return pc.divide(age_us.cast(pa.float64(), safe=False), unit_us)

    return _elements(arrays[0], ages_of)


def expression(spec: Expression, arrays: list[pa.Array], _: Problems) -> pa.Array:
    rows = len(arrays[0])
    plain = [is_text(array.type) or pat.is_boolean(array.type) for array in arrays]
    numbers = (
        array if is_plain else pc.cast(plain_numbers(array), pa.float64(), safe=False)
        for array, is_plain in zip(arrays, plain, strict=True)
    )
    values = compute(spec.expression, dict(zip(spec.inputs, numbers, strict=True)))
    return values if len(values) == rows else pa.array([], values.type)


def custom(spec: Custom, arrays: list[pa.Array], _: Problems) -> pa.Array:
    name = f"derived column {spec.name!r}: {spec.function}"
    function = _imported(spec.function)
    try:
        result = function(*arrays)
    except Exception as error:
        raise FunctionFailed(
            f"{name} failed: {type(error).__name__}: {error}", column=spec.inputs[0], fix="correct the function"
        ) from error
    if isinstance(result, np.ndarray) and result.ndim == 1:
        result = pa.array(result)
    if not isinstance(result, pa.Array) or len(result) != len(arrays[0]):
        got = f"{len(result)} rows" if isinstance(result, pa.Array) else type(result).__name__
        raise DataError(
            f"{name} must return one Arrow array of {len(arrays[0])} rows, as many as its arguments have; "
            f"it returned {got}",
            column=spec.inputs[0],
            fix="return a pyarrow.Array (or a one-dimensional NumPy array) with one value per row",
        )
    return result


@cache
def _imported(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        fix = f"install the module on every node that maps rows, or put it in the working folder {os.getcwd()}"
        raise DataError(f"cannot import the function {path} of a derived column: {error}", fix=fix) from error
    if not callable(function):
        raise DataError(f"{path} of a derived column is not a function", fix="name a function: module:function")
    custom_function: Callable[..., Any] = function
    return custom_function


def unfitted(owner: str, statistics: str, column: str) -> DataError:
    """The error for statistics that are not fitted yet."""
    fix = "fit them to the training data: rayrec data fit CONFIG --out FITTED, and train with FITTED"
    return DataError(f"{owner}: {statistics} are not fitted", column=column, fix=fix)
