"""Computes the derived columns of a schema. `specs.py` describes them; the other modules implement them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import decoded, is_list, leaf_of, shown
from rayrec.data.mapping.derived.joins import entity, events
from rayrec.data.mapping.derived.lists import cross, lookup, overlap, pairs, tokens
from rayrec.data.mapping.derived.scalars import (
    CLEAN,
    FunctionFailed,
    age,
    buckets,
    custom,
    expression,
    missing,
    time_part,
)
from rayrec.data.mapping.derived.specs import (
    Age,
    Buckets,
    Cross,
    Custom,
    Derived,
    Entity,
    Events,
    Expression,
    Lookup,
    Missing,
    Overlap,
    Pairs,
    TimePart,
    Tokens,
)
from rayrec.data.mapping.problems import Problems
from rayrec.storage.errors import DataError, first_line

_FAILURES = (pa.ArrowException, TypeError, AttributeError, FunctionFailed)
_MAKERS: dict[type, Callable[[Any, list[pa.Array], Problems], pa.Array]] = {
    Buckets: buckets,
    Missing: missing,
    TimePart: time_part,
    Age: age,
    Lookup: lookup,
    Expression: expression,
    Tokens: tokens,
    Overlap: overlap,
    Pairs: pairs,
    Entity: entity,
    Events: events,
    Custom: custom,
}


def derive(
    specs: Sequence[Derived], columns: Mapping[str, pa.Array], problems: Problems, max_pairs: int | None = None
) -> dict[str, pa.Array]:
    """The columns and the derived columns. Bad rows become null and are added to `problems`.

    Lists of events that are among the columns are kept; rows in which they are null have those of the table.

    Args:
        max_pairs: of a cross of lists, in all rows; rows after that many are bad rows. Default: no limit.

    Raises:
        DataError: an unsupported column type, statistics that are not fitted, a function that fails for any rows.
    """
    out = dict(columns)
    for spec in specs:
        column = _computed(spec, [out[name] for name in spec.inputs], problems, max_pairs)
        if isinstance(spec, Events) and spec.name in columns:
            column = _given_or_joined(spec, columns[spec.name], column)
        out[spec.name] = column
    return out


def _given_or_joined(spec: Events, given: pa.Array, joined: pa.Array) -> pa.Array:
    """The given lists of events; the joined ones in rows without."""
    kind = leaf_of(joined.type)
    kind = pa.int64() if pat.is_integer(kind) else kind  # those of a store are narrow
    try:
        if pat.is_timestamp(kind) and is_list(given.type) and pat.is_integer(given.type.value_type):
            given = given.cast(pa.large_list(pa.timestamp(spec.unit)))
        return pc.coalesce(given.cast(pa.large_list(kind)), joined.cast(pa.large_list(kind)))
    except pa.ArrowException as error:
        problem = (
            f"the lists of {spec.name!r} are {given.type}, those of {spec.path} {joined.type}: {first_line(error)}"
        )
        raise DataError(problem, column=spec.name, fix="give lists of the same type, or null") from error


def _computed(spec: Derived, arrays: list[pa.Array], problems: Problems, max_pairs: int | None) -> pa.Array:
    """One derived column. Rows on which it fails, e.g. for a text that is not UTF-8, are bad rows."""
    column, error = _attempt(spec, arrays, problems, max_pairs)
    if error is None:
        return column
    if any(pat.is_dictionary(array.type) for array in arrays):
        # The wrong value may be in the dictionary only: a slice of a dictionary array has the dictionary of all rows.
        arrays = [decoded(array) for array in arrays]
        column, error = _attempt(spec, arrays, problems, max_pairs)
        if error is None:
            return column
    failed = _failing_rows(spec, arrays, max_pairs)
    if failed is not None:
        good = np.ones(len(arrays[0]), np.bool_)
        good[list(failed)] = False
        index = pa.array(np.arange(len(good)), mask=~good)
        column, error = _attempt(spec, [array.take(index) for array in arrays], problems, max_pairs)
        if error is None:
            rows, errors = list(failed), list(failed.values())
            problem = f"derived column {spec.name!r} ({spec.kind}) cannot be computed from this row"
            problems.add(
                np.array(rows, np.int64),
                spec.inputs[0],
                problem,
                CLEAN,
                lambda k: _shown(spec, arrays, rows[k], errors[k]),
            )
            return column
    if isinstance(error, DataError):
        raise error
    types = ", ".join(f"{name}: {array.type}" for name, array in zip(spec.inputs, arrays, strict=True))
    raise DataError(
        f"cannot compute derived column {spec.name!r} ({spec.kind}) from {types}: {first_line(error)}",
        column=spec.inputs[0],
        fix="correct its columns in schema.derived, or convert the data",
    ) from error


def _attempt(
    spec: Derived, arrays: list[pa.Array], problems: Problems, max_pairs: int | None = None
) -> tuple[pa.Array, None] | tuple[None, Exception]:
    """The column, or the error. Only an attempt that succeeds adds to `problems`."""
    found = Problems()
    try:
        if isinstance(spec, Cross):
            column = cross(spec, arrays, found, max_pairs)
        else:
            column = _MAKERS[type(spec)](spec, arrays, found)
    except _FAILURES as error:
        return None, error
    problems.extend(found)
    return column, None


def _failing_rows(spec: Derived, arrays: list[pa.Array], max_pairs: int | None) -> dict[int, Exception] | None:
    """The rows on which the column cannot be computed, with the errors, by bisection; None if no row is at fault."""
    failed: dict[int, Exception] = {}
    ranges = [(0, len(arrays[0])), (0, 0)]
    while ranges:
        start, stop = ranges.pop()
        _, error = _attempt(spec, [array.slice(start, stop - start) for array in arrays], Problems(), max_pairs)
        if error is not None and start == stop:  # without any rows: the types do not fit, or the function is wrong
            return None
        if error is not None and stop - start == 1:
            failed[start] = error
        elif error is not None:
            middle = (start + stop) // 2
            ranges += [(middle, stop), (start, middle)]
    return failed or None


def _shown(spec: Derived, arrays: list[pa.Array], row: int, error: Exception) -> str:
    """The values of a row, and why the column cannot be computed from them."""
    values = ", ".join(f"{name}={shown(array, row)}" for name, array in zip(spec.inputs, arrays, strict=True))
    return f"{values}: {first_line(error)}"


def derived_types(specs: Sequence[Derived], types: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """The types of the columns and the derived columns, from a computation of zero rows. Raises as `derive`."""
    empty = {name: pa.nulls(0, kind) for name, kind in types.items()}
    return {name: array.type for name, array in derive(specs, empty, Problems()).items()}
