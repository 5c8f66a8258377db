"""Makes the derived columns that `derived.py` describes, whole columns at a time; lists are in `list_columns.py`.

Every function takes a spec, its input arrays and a place for problems, and gives an array of as many rows. It is pure:
a row's value depends on that row alone, so it does not matter how rows are put together.
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

from rayrec.data.arrays.arrow_types import decoded, floats_of, is_list, is_text, nulls_of, plain_numbers
from rayrec.data.arrays.buffers import I64
from rayrec.data.arrays.lists import row_of, unnest
from rayrec.data.mapping.derived.expressions import compute
from rayrec.data.mapping.derived.lists import relisted
from rayrec.data.mapping.derived.specs import (
    Age,
    Buckets,
    Custom,
    Expression,
    Missing,
    TimePart,
)
from rayrec.data.mapping.problems import Problems
from rayrec.storage.errors import DataError

_DAY_US = 86_400_000_000
_PARTS: dict[str, Callable[[I64], I64]] = {  # of microseconds of local time since 1970
    "minute": lambda us: us // 60_000_000 % 60,
    "hour": lambda us: us // 3_600_000_000 % 24,
    "weekday": lambda us: (us // _DAY_US + 3) % 7,  # 1970 began on a Thursday
    "day": lambda us: pc.day(pa.array(us, pa.timestamp("us"))).to_numpy(),
    "month": lambda us: pc.month(pa.array(us, pa.timestamp("us"))).to_numpy(),
}
_CLEAN = "clean the column: a null is taken as the feature says"
_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400}


def _elements(array: pa.Array, function: Callable[[pa.Array, Callable[[I64], I64]], pa.Array]) -> pa.Array:
    """The function of an array, or of a list array's elements; it also gets a function from elements to rows."""
    if not is_list(array.type):
        return function(array, lambda positions: positions)
    lists = unnest(array)
    return relisted(lists, function(lists.leaf, lambda positions: row_of(lists.offsets, positions)))


def buckets(spec: Buckets, arrays: list[pa.Array], problems: Problems) -> pa.Array:
    if spec.edges is None:
        raise unfitted(f"derived column {spec.name!r}", "quantiles", spec.column)
    edges = np.asarray(spec.edges)

    def made(array: pa.Array, rows: Callable[[I64], I64]) -> pa.Array:
        numbers, nulls = floats_of(array), nulls_of(array)
        none = np.isnan(numbers)
        bad = np.flatnonzero(none if nulls is None else none & ~nulls)
        problems.add(
            rows(bad), spec.column, f"derived column {spec.name!r}: NaN is in no bucket", _CLEAN, lambda _: "nan"
        )
        return pa.array(np.searchsorted(edges, numbers, side="right"), mask=none if none.any() else None)

    return _elements(arrays[0], made)


def missing(_: Missing, arrays: list[pa.Array], __: Problems) -> pa.Array:
    (array,) = arrays
    nan = pat.is_floating(array.type)
    return pc.cast(pc.is_null(array, nan_is_null=nan), pa.int8())


def _instants(array: pa.Array, unit: str) -> pa.Array:
    """Times as microseconds since 1970 (UTC)."""
    array = decoded(array)
    if pat.is_null(array.type) or pat.is_integer(array.type):
        array = array.cast(pa.int64()).cast(pa.timestamp(unit))
    elif not (pat.is_timestamp(array.type) or pat.is_date(array.type)):
        raise TypeError("a time must be a timestamp, a date or an integer")
    return array.cast(pa.timestamp("us"), safe=False)


def time_part(spec: TimePart, arrays: list[pa.Array], _: Problems) -> pa.Array:
    def made(array: pa.Array, _: Callable[[I64], I64]) -> pa.Array:
        times = _instants(array, spec.unit)
        if spec.zone != "UTC":
            times = pc.local_timestamp(times.cast(pa.timestamp("us", spec.zone)))
        numbers = _PARTS[spec.part](times.cast(pa.int64()).fill_null(0).to_numpy())
        return pa.array(numbers.astype(np.int64, copy=False), mask=nulls_of(array))

    return _elements(arrays[0], made)


def age(spec: Age, arrays: list[pa.Array], problems: Problems) -> pa.Array:
    at = _instants(arrays[1], spec.unit)
    each = 1e6 * _SECONDS[spec.per]

    def made(array: pa.Array, rows: Callable[[I64], I64]) -> pa.Array:
        events = _instants(array, spec.unit)
        now = at if not is_list(arrays[0].type) else at.take(pa.array(rows(np.arange(len(array)))))
        age = pc.subtract(now.cast(pa.int64()), events.cast(pa.int64()))
        future = pc.less(age, 0)
        if spec.on_future == "zero":
            age = pc.if_else(future, 0, age)
        elif pc.any(future).as_py():
            bad = np.flatnonzero(future.fill_null(False).to_numpy(zero_copy_only=False))
            if spec.on_future == "error":
                problem = f"derived column {spec.name!r}: the event lies after the row's time"
                problems.add(rows(bad), spec.column, problem, _CLEAN, lambda k: str(events[int(bad[k])]))
            age = pc.if_else(future, None, age)
        return pc.divide(age.cast(pa.float64(), safe=False), each)

    return _elements(arrays[0], made)


def expression(spec: Expression, arrays: list[pa.Array], _: Problems) -> pa.Array:
    rows = len(arrays[0])
    words = [is_text(array.type) or pat.is_boolean(array.type) for array in arrays]
    numbers = (
        array if word else pc.cast(plain_numbers(array), pa.float64(), safe=False)
        for array, word in zip(arrays, words, strict=True)
    )
    found = compute(spec.expression, dict(zip(spec.inputs, numbers, strict=True)))
    return found if len(found) == rows else pa.array([], found.type)


def custom(spec: Custom, arrays: list[pa.Array], _: Problems) -> pa.Array:
    name = f"derived column {spec.name!r}: {spec.function}"
    function = _imported(spec.function)
    try:
        found = function(*arrays)
    except Exception as error:
        raise DataError(
            f"{name} failed: {type(error).__name__}: {error}", column=spec.inputs[0], fix="correct the function"
        ) from error
    if isinstance(found, np.ndarray) and found.ndim == 1:
        found = pa.array(found)
    if not isinstance(found, pa.Array) or len(found) != len(arrays[0]):
        got = f"{len(found)} rows" if isinstance(found, pa.Array) else type(found).__name__
        raise DataError(
            f"{name} must give one Arrow array of {len(arrays[0])} rows, as it got; it gave {got}",
            column=spec.inputs[0],
            fix="return a pyarrow.Array (or a one-dimensional numpy array) with one value a row",
        )
    return found


@cache
def _imported(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        fix = f"install the module on every node that maps rows, or put it in the working folder {os.getcwd()}"
        raise DataError(f"the function {path} of a derived column cannot be imported: {error}", fix=fix) from error
    if not callable(function):
        raise DataError(f"{path} of a derived column is no function", fix="name a function: module:function")
    found: Callable[..., Any] = function
    return found


def unfitted(what: str, which: str, column: str) -> DataError:
    """The error of statistics that are not there yet."""
    fix = "compute them from the training data: rayrec data fit CONFIG --out FITTED, and train with FITTED"
    return DataError(f"{what} has no fitted {which} yet", column=column, fix=fix)
