"""Bad rows on their way from read tasks: typed records in a column beside the mapped rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.errors import DataError, DataUnavailable, FileChanged

PROBLEM = "problem"

_NOTHING = "nothing"
_KINDS = {kind.__name__: kind for kind in (DataError, DataUnavailable, FileChanged)}
_TEXTS, _NUMBERS = ("kind", "problem", "file", "column", "value", "fix"), ("row_group", "row")
_KIND = pa.struct([*((name, pa.string()) for name in _TEXTS), *((name, pa.int64()) for name in _NUMBERS)])


def no_problems(num_rows: int) -> pa.Array:
    """The column of rows that are all good."""
    return pa.nulls(num_rows, _KIND)


def to_array(num_rows: int, bad: npt.NDArray[np.int64], errors: Sequence[DataError]) -> pa.Array:
    """Null for a good row; a record of the error for the first bad ones, one without a problem for further bad ones.

    Args:
        bad: places of the bad rows, the described ones first.
    """
    records: list[dict[str, object] | None] = [None] * num_rows
    for place in bad[len(errors) :]:
        records[place] = {"problem": None}
    for place, error in zip(bad, errors, strict=False):
        records[place] = {"kind": type(error).__name__, **error.to_dict()}
    return pa.array(records, _KIND)


def from_array(problems: pa.Array) -> list[DataError]:
    """The errors that are described, in the order of their rows."""
    return [_error(record) for record in problems.drop_null().to_pylist() if record["problem"] is not None]


def or_nothing(table: pa.Table) -> pa.Table:
    """The table, or one row that stands for no row at all: Ray Data hands on no empty tables, which would say that
    reading goes on."""
    if table.num_rows:
        return table
    columns = {field.name: pa.nulls(1, field.type) for field in table.schema}
    return pa.table(columns | {PROBLEM: pa.array([{"kind": _NOTHING}], _KIND)})


def without_nothing(table: pa.Table) -> pa.Table:
    """Without the rows of `or_nothing`."""
    problems = table[PROBLEM]
    if problems.null_count == len(problems):
        return table
    nothing = pc.equal(pc.struct_field(problems, "kind"), _NOTHING).fill_null(False)
    return table.filter(pc.invert(nothing))


def _error(record: dict[str, Any]) -> DataError:
    return _KINDS[record.pop("kind")](record.pop("problem"), **record)
