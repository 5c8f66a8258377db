"""The inputs of a model in KServe's open inference protocol, by its schema.

An export has the list in `mapping.json`, which the C++ library reads: so both servers have the same inputs.
"""

from __future__ import annotations

import re
from typing import Any

from rayrec.data import Schema

BYTES = "BYTES"
LENGTHS, IDS, WEIGHTS = ".lengths", ".id", ".weight"
_DATATYPES = {"map<": None, "time": None, "text": BYTES, "string": BYTES, "bool": "BOOL", "int": "INT64"}


def inputs_of(schema: Schema) -> list[dict[str, Any]]:
    """Name, datatype and shape of each input; -1: any size."""
    inputs: dict[str, tuple[str, list[int]]] = {}
    derived = {spec.name for spec in schema.derived}
    for name, kind in schema.column_types.items():
        datatype = _datatype(kind)
        if datatype is not None:
            inputs[name] = (datatype, [-1])
            inputs |= {name + LENGTHS: ("INT64", [-1])} if "list" in kind else {}
    for dense in schema.dense:
        if dense.column in derived:
            continue
        inputs[dense.column] = ("FP64", [-1] if dense.width == 1 else [-1, dense.width])
    for feature in schema.sparse:
        kind, column = (BYTES if feature.id_type == "text" else "INT64"), feature.column
        if column in derived:
            continue
        if feature.kind == "id":
            inputs[column] = (kind, [-1])
            continue
        pairs = feature.kind == "weighted_id_list" and feature.weight_column is None
        inputs[column + (IDS if pairs else "")] = (kind, [-1])
        inputs[column + LENGTHS] = ("INT64", [-1])
        if pairs:
            inputs[column + WEIGHTS] = ("FP32", [-1])
        elif feature.weight_column is not None:
            inputs[feature.weight_column] = ("FP32", [-1])
            inputs[feature.weight_column + LENGTHS] = ("INT64", [-1])
    for value in schema.stored_values:
        inputs[value.column_name] = ("INT64" if value.kind == "time" else "FP64", [-1])
        inputs[value.column_name + LENGTHS] = ("INT64", [-1])
    return [{"name": name, "datatype": kind, "shape": shape} for name, (kind, shape) in inputs.items()]


def _datatype(kind: str) -> str | None:
    """The datatype of a type in `column_types`; None if the protocol has none, as for times and maps.

    Numbers of every width are FP64: the mapping rounds them to the width of the training data. Early runs named Arrow's
    types ("double", "string").
    """
    match = re.search(r"map<|time|text|string|bool|int|number|decimal|float|double", kind)
    return None if match is None else _DATATYPES.get(match[0], "FP64")
