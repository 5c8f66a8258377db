"""Tables mapped to rows with everything that is wrong with them, and schemas as a run keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from rayrec.data import DataError, Schema
from rayrec.data.mapping.column_types import fill_id_types
from rayrec.data.mapping.map_rows import map_rows
from rayrec.data.mapping.problems import Problems


def mapped(
    table: pa.Table, schema: Schema, rows_of: Mapping[str, int], order: Any = None, *, labelled: bool = False
) -> tuple[Any, dict[int, DataError]]:
    """The rows of a table, and for each bad one its first error.

    Args:
        order: permutation of the mapped rows; errors are those of rows of the table.
    """
    problems = Problems()
    rows = map_rows(table, schema, rows_of, problems, order, labelled=labelled)
    return rows, {int(row): problems.error(int(row)) for row in problems.rows()}


def kept(schema: Schema, types: Mapping[str, pa.DataType]) -> Schema:
    """The schema that a run keeps after it has seen the types of the columns."""
    return fill_id_types(schema, dict(types))
