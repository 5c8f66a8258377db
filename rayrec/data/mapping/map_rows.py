"""Maps the columns of an Arrow table to rows of NumPy arrays, column by column.

Checks values and collects bad rows; `column_types.py` has checked the types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import as_named, from_list_view, without_views
from rayrec.data.arrays.buffers import I64
from rayrec.data.arrays.widening import has_null_type, widened
from rayrec.data.mapping.dense import map_dense
from rayrec.data.mapping.derived.derive import derive
from rayrec.data.mapping.null_types import read_types
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.rows import Ids, Rows
from rayrec.data.mapping.rules import Vocabulary
from rayrec.data.mapping.schema import Schema
from rayrec.data.mapping.sequences import check_lengths, in_order, map_values
from rayrec.data.mapping.sparse import map_few, map_sparse
from rayrec.data.mapping.targets import map_targets, unknown_targets
from rayrec.data.mapping.vocabulary import load_vocabulary
from rayrec.storage.errors import DataError

_VIEWS = frozenset((pa.string_view().id, pa.binary_view().id))


def map_rows(
    table: pa.RecordBatch | pa.Table,
    schema: Schema,
    rows_of: Mapping[str, int],
    problems: Problems,
    order: I64 | None = None,
    *,
    labelled: bool = True,
    max_pairs: int | None = None,
    columns: Sequence[str] | None = None,
) -> Rows:
    """Maps all rows of `table`. Adds bad rows to `problems`; their values are meaningless but valid.

    Args:
        order: permutation of the mapped rows; `problems` refers to rows of the table. Each feature is reordered right
            after it is mapped, while it is in the CPU cache.
        labelled: if False, read only the features' columns, and return NaN as labels.
        max_pairs: as in `derive`.
        columns: names of the columns to read, if already known.
    """
    names = columns or (schema.columns if labelled else schema.feature_columns)
    arrays = source_columns(table, schema, names)
    if schema.derived:
        derived = derive(schema.derived_needed, arrays, problems, max_pairs)
        arrays = {name: one_array(array) for name, array in derived.items()}
        arrays = _as_read(arrays, schema)
    targets = map_targets(arrays, schema, problems) if labelled else unknown_targets(schema, table.num_rows)
    dense = map_dense(schema.dense, arrays, table.num_rows, problems)
    if order is not None:
        dense, targets = np.take(dense, order, axis=0), targets.take(order)
    of_feature = {name: sequence for sequence in schema.sequences for name in sequence.ids}
    ids, offsets = list[Ids](), dict[str, I64]()
    few = map_few(schema.sparse, arrays, rows_of, table.num_rows)
    for feature in schema.sparse:
        bags = few.get(feature.name) or map_sparse(feature, arrays, rows_of[feature.name], problems)
        if (sequence := of_feature.get(feature.name)) is not None and bags.offsets is not None:
            offsets[feature.name] = bags.offsets
            bags = in_order(bags, sequence)
        ids.append(bags.take(order))
    column_of = {feature.name: feature.column for feature in schema.sparse}
    for sequence in schema.sequences:
        check_lengths(sequence, arrays, column_of, offsets, problems)
        ids += [bags.take(order) for bags in map_values(sequence, arrays, problems)]
    return Rows(dense, targets, tuple(ids))


def source_columns(table: pa.RecordBatch | pa.Table, schema: Schema, names: Sequence[str]) -> dict[str, pa.Array]:
    """Columns as single arrays, with the numbers of derived columns in the width that they had in training."""
    columns = _as_read({name: one_array(table.column(name)) for name in names}, schema)
    for name, plain in schema.column_types.items():
        if name in columns:
            columns[name] = as_named(columns[name], plain)
    return columns


def check_rows_of(schema: Schema, rows_of: Mapping[str, int]) -> None:
    """Checks that every sparse feature has a table large enough.

    Raises:
        DataError: a feature without a table, a table without rows or smaller than its vocabulary, or a default id
            outside the table.
    """
    for feature in schema.sparse:
        name = feature.name
        if name not in rows_of:
            raise DataError(f"feature {name!r} is in no table", fix=f"add {name!r} to a table's features")
        if rows_of[name] < 1:
            raise DataError(f"feature {name!r}: its table has {rows_of[name]} rows", fix="set rows to at least 1")
        if isinstance(feature.mapping, Vocabulary):
            needed = feature.mapping.oov_rows + load_vocabulary(feature.mapping.path).size
            if rows_of[name] < (spread := feature.mapping.spread_over or 0):
                raise DataError(
                    f"feature {name!r}: its table has {rows_of[name]} rows, but its ids are spread over {spread}",
                    fix=f"raise the table's rows to {spread}, or correct mapping.spread_over",
                )
            if rows_of[name] < needed:
                raise DataError(
                    f"feature {name!r}: its table has {rows_of[name]} rows, its vocabulary needs {needed}",
                    file=feature.mapping.path,
                    fix=f"raise the table's rows to {needed}, or shorten the vocabulary",
                )
        default = feature.default
        if feature.mapping.kind == "identity" and isinstance(default, int) and not 0 <= default < rows_of[name]:
            raise DataError(
                f"feature {name!r}: default={default} is outside its table's rows [0, {rows_of[name]})",
                fix="give a default inside the table, or raise the table's rows",
            )


def _as_read(columns: dict[str, pa.Array], schema: Schema) -> dict[str, pa.Array]:
    """The columns in the types of `read_types`."""
    if not schema.column_types and not any(has_null_type(array.type) for array in columns.values()):
        return columns
    types = {name: array.type for name, array in columns.items()}
    wanted = read_types(schema, types)
    if wanted == types:
        return columns
    return {name: one_array(widened(array, wanted[name])) for name, array in columns.items()}


def one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column as one array, in a layout that Arrow's compute functions accept."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if not pat.is_nested(column.type) and column.type.id not in _VIEWS:
        return column
    if pat.is_list_view(column.type) or pat.is_large_list_view(column.type):
        column = from_list_view(column)
    plain = without_views(column.type)
    return column if plain == column.type else column.cast(plain)
