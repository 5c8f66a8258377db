"""Transports bad rows from read tasks: a column of JSON errors next to the mapped rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.storage.errors import DataError, DataUnavailable, FileChanged

PROBLEM = "problem"

_PLACEHOLDER = "nothing"
_KINDS = {kind.__name__: kind for kind in (DataError, DataUnavailable, FileChanged)}


def no_problems(num_rows: int) -> pa.Array:
    """The column for a table without bad rows."""
    return pa.nulls(num_rows, pa.string())


def to_array(num_rows: int, bad: npt.NDArray[np.int64], errors: Sequence[DataError]) -> pa.Array:
    """The column: null for good rows; for bad rows the error as JSON, or an empty text without a description.

    Args:
        bad: positions of the bad rows.
        errors: errors of the first rows in `bad`.
    """
    texts: list[str | None] = [None] * num_rows
    for position, error in zip_longest(bad.tolist(), errors):
        texts[position] = "" if error is None else json.dumps({"kind": type(error).__name__, **error.to_dict()})
    return pa.array(texts, pa.string())


def from_array(problems: pa.Array) -> list[DataError]:
    """The errors in the column, in row order."""
    errors = [json.loads(text) for text in problems.drop_null().to_pylist() if text]
    return [_KINDS[error.pop("kind")](**error) for error in errors]


def with_placeholder(table: pa.Table) -> pa.Table:
    """Adds a placeholder row to an empty table.

    Ray Data drops empty tables, but the consumer needs each one as a sign that reading advances.
    """
    if table.num_rows:
        return table
    columns = {field.name: pa.nulls(1, field.type) for field in table.schema}
    return pa.table(columns | {PROBLEM: pa.array([_PLACEHOLDER])})


def without_placeholder(table: pa.Table) -> pa.Table:
    """Removes the row that `with_placeholder` added."""
    problems = table[PROBLEM]
    if problems.null_count == len(problems):
        return table
    return table.filter(pc.not_equal(problems, _PLACEHOLDER).fill_null(True))
