"""Types of columns that are null throughout, which have Arrow's type null.

Such a column is read with the type that the schema expects, so that `on_null` and `default` of its feature apply to
each row.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from rayrec.data.arrays.arrow_types import plain_type, type_of
from rayrec.data.arrays.widening import filled, has_null_type, wider
from rayrec.data.mapping.rules import Vocabulary
from rayrec.data.mapping.schema import Schema, SparseFeature
from rayrec.data.mapping.vocabulary import load_vocabulary


def read_types(schema: Schema, types: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """The types as which columns of these types are mapped.

    Null becomes what the schema expects. Inputs of derived columns have the type of the training data
    (`column_types`): an integer is a number where that was one, and widens to a number where the data has them now.
    """
    out = dict(types)
    for name, plain in schema.column_types.items():
        recorded = type_of(plain)
        if recorded is not None and name in out:
            kind = filled(out[name], recorded)
            differs = plain_type(kind) != plain
            out[name] = (wider(kind, recorded) or kind) if differs else kind
    if any(has_null_type(kind) for kind in out.values()):
        expected = expected_types(schema)
        out = {name: filled(kind, expected[name]) if name in expected else kind for name, kind in out.items()}
    return out


def wants_text(feature: SparseFeature) -> bool:
    """True if the feature's ids are texts, as far as the schema tells."""
    if feature.id_type is not None:
        return feature.id_type == "text"
    if isinstance(feature.mapping, Vocabulary):
        return load_vocabulary(feature.mapping.path).text
    return isinstance(feature.default, str)


def expected_types(schema: Schema) -> dict[str, pa.DataType]:
    """By column, a type that the schema accepts. Inputs of derived columns only are left out."""
    types: dict[str, pa.DataType] = {}
    for task in schema.tasks:
        kinds = {str: pa.string(), int: pa.int64()}
        types.setdefault(task.column, kinds.get(type(task.positive), pa.float64()))
    for section, kind in (
        (schema.sample_weight, pa.float64()),
        (schema.group, pa.int64()),
        (schema.timestamp, pa.timestamp("us")),
    ):
        if section is not None:
            types.setdefault(section.column, kind)
    for dense in schema.dense:
        types.setdefault(dense.column, pa.float64() if dense.width == 1 else pa.list_(pa.float64()))
    for sparse in schema.sparse:
        ids = pa.string() if wants_text(sparse) else pa.int64()
        if sparse.kind == "weighted_id_list" and sparse.weight_column is None:
            ids = pa.struct([("id", ids), ("weight", pa.float64())])
        types.setdefault(sparse.column, ids if sparse.kind == "id" else pa.list_(ids))
        if sparse.weight_column is not None:
            types.setdefault(sparse.weight_column, pa.list_(pa.float64()))
    for sequence in schema.sequences:
        for values in sequence.values:
            item = pa.timestamp("us") if values.kind == "time" else pa.float64()
            types.setdefault(values.column_name, pa.list_(item))
    return types
