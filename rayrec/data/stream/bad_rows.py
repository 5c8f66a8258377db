"""Bad rows on their way from read tasks: typed records in a column beside the mapped rows."""

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

_NOTHING = "nothing"
_KINDS = {kind.__name__: kind for kind in (DataError, DataUnavailable, FileChanged)}


def no_problems(num_rows: int) -> pa.Array:
    """The column of rows that are all good."""
    return pa.nulls(num_rows, pa.string())


def to_array(num_rows: int, bad: npt.NDArray[np.int64], errors: Sequence[DataError]) -> pa.Array:
    """Null for a good row; the error as JSON for the first bad ones, an empty text for further bad ones.

    Args:
        bad: places of the bad rows, the described ones first.
    """
    texts: list[str | None] = [None] * num_rows
    for place, error in zip_longest(bad.tolist(), errors):
        texts[place] = "" if error is None else json.dumps({"kind": type(error).__name__, **error.to_dict()})
    return pa.array(texts, pa.string())


def from_array(problems: pa.Array) -> list[DataError]:
    """The errors that are described, in the order of their rows."""
    found = [json.loads(text) for text in problems.drop_null().to_pylist() if text]
    return [_KINDS[one.pop("kind")](**one) for one in found]


def or_nothing(table: pa.Table) -> pa.Table:
    """The table, or one row that stands for no row at all: Ray Data hands on no empty tables, which would say that
    reading goes on."""
    if table.num_rows:
        return table
    columns = {field.name: pa.nulls(1, field.type) for field in table.schema}
    return pa.table(columns | {PROBLEM: pa.array([_NOTHING])})


def without_nothing(table: pa.Table) -> pa.Table:
    """Without the rows of `or_nothing`."""
    problems = table[PROBLEM]
    if problems.null_count == len(problems):
        return table
    return table.filter(pc.not_equal(problems, _NOTHING).fill_null(True))
