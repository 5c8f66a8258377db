"""Computes the derived columns of a schema; `specs.py` describes them, `scalars.py` and `lists.py` implement them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from rayrec.data.mapping.derived.lists import cross, lookup, overlap, pairs, tokens
from rayrec.data.mapping.derived.scalars import age, buckets, custom, expression, missing, time_part
from rayrec.data.mapping.derived.specs import (
    Age,
    Buckets,
    Cross,
    Custom,
    Derived,
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

_MAKERS: dict[type, Callable[[Any, list[pa.Array], Problems], pa.Array]] = {
    Buckets: buckets,
    Missing: missing,
    Cross: cross,
    TimePart: time_part,
    Age: age,
    Lookup: lookup,
    Expression: expression,
    Tokens: tokens,
    Overlap: overlap,
    Pairs: pairs,
    Custom: custom,
}


def derive(specs: Sequence[Derived], columns: Mapping[str, pa.Array], problems: Problems) -> dict[str, pa.Array]:
    """The columns and the derived columns. Bad rows become null and are added to `problems`.

    Raises:
        DataError: an unsupported column type, statistics that are not fitted, a function that fails.
    """
    out = dict(columns)
    for spec in specs:
        try:
            out[spec.name] = _MAKERS[type(spec)](spec, [out[name] for name in spec.inputs], problems)
        except (pa.ArrowException, TypeError, AttributeError) as error:
            types = ", ".join(f"{name}: {out[name].type}" for name in spec.inputs)
            raise DataError(
                f"cannot compute derived column {spec.name!r} ({spec.kind}) from {types}: {first_line(error)}",
                column=spec.inputs[0],
                fix="correct its columns in schema.derived, or convert the data",
            ) from error
    return out


def derived_types(specs: Sequence[Derived], types: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """The types of the columns and the derived columns, from a computation of zero rows. Raises as `derive`."""
    empty = {name: pa.nulls(0, kind) for name, kind in types.items()}
    return {name: array.type for name, array in derive(specs, empty, Problems()).items()}
