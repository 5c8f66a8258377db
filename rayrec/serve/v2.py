"""KServe's open inference protocol, version 2: tensors of a request, and what a model says of itself.

Source: https://kserve.github.io/website/latest/modelserving/data_plane/v2_protocol/, for HTTP with the extension of
binary tensors. Tensors have no rows of unequal length: the ids of a list are one tensor `[N]`, and how many each row
has is another, `NAME.lengths` `[n]`; lists of equal length may also be `[n, k]`. An input of one row, while others have
more, belongs to every row: the context of the candidates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa

from rayrec.data import Schema
from rayrec.serve.errors import RequestError
from rayrec.serve.limits import Limits
from rayrec.serve.requests import Query
from rayrec.serve.versions import Loaded

BYTES = "BYTES"
DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
}
LENGTHS, IDS, WEIGHTS = ".lengths", ".id", ".weight"


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input.

    Args:
        data: flat; numbers of the datatype's dtype, or a list of bytes.
    """

    name: str
    shape: tuple[int, ...]
    data: Any


def tensor_of(name: str, datatype: str, shape: Sequence[int], data: bytes | Sequence[Any] | memoryview) -> Tensor:
    """From raw bytes, or from values.

    Raises:
        RequestError: another datatype, or not as many numbers as the shape says.
    """
    if datatype != BYTES and datatype not in DTYPES:
        raise RequestError(422, f"input {name!r}: datatype {datatype!r}; there are {', '.join((*DTYPES, BYTES))}")
    if not 1 <= len(shape) <= 2 or any(size < 0 for size in shape):
        raise RequestError(422, f"input {name!r} has shape {list(shape)}; it must be [rows] or [rows, numbers]")
    try:
        found = _values(datatype, data)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(422, f"input {name!r}: its data are no {datatype}: {str(error)[:200]}") from None
    if len(found) != math.prod(shape):
        raise RequestError(
            422, f"input {name!r}: shape {list(shape)} needs {math.prod(shape)} values, got {len(found)}"
        )
    return Tensor(name, tuple(shape), found)


def _values(datatype: str, data: Any) -> Any:
    if isinstance(data, bytes | memoryview):
        return _strings(bytes(data)) if datatype == BYTES else np.frombuffer(data, DTYPES[datatype])
    if datatype == BYTES:
        if not all(isinstance(one, str | bytes) for one in data):
            raise ValueError("strings are needed")
        return [one.encode() if isinstance(one, str) else one for one in data]
    kinds = (bool,) if datatype == "BOOL" else (int,) if "INT" in datatype else (int, float)
    if not all(type(one) in kinds for one in data):
        raise ValueError(f"{' or '.join(kind.__name__ for kind in kinds)} is needed")
    return np.array(data, DTYPES[datatype])


def _strings(data: bytes) -> list[bytes]:
    """Each behind its length, four bytes."""
    found, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        at += 4 + size
        if at > len(data):
            raise ValueError("a string is longer than its bytes")
        found.append(data[at - size : at])
    return found


def query_of(tensors: Sequence[Tensor], schema: Schema, limits: Limits) -> Query:
    """
    Raises:
        RequestError: names that the model does not have, or rows of unequal number.
    """
    given = {tensor.name: tensor for tensor in tensors}
    if len(given) < len(tensors):
        raise RequestError(422, "an input is there twice; give it once")
    names = {entry["name"] for entry in inputs_of(schema)}
    if unknown := sorted(set(given) - names):
        raise RequestError(422, f"the model has no input {unknown[0]!r}; it has {', '.join(sorted(names))}")
    columns = _columns(given, schema, limits)
    size = max((len(column) for column in columns.values()), default=0)
    limits.check_rows(size)
    uneven = [name for name, column in columns.items() if len(column) not in (1, size)]
    if uneven:
        raise RequestError(422, f"input {uneven[0]!r} has {len(columns[uneven[0]])} rows, others have {size}")
    shared = frozenset(name for name, column in columns.items() if len(column) < size)
    table = pa.table({name: column for name, column in columns.items() if name not in shared})
    context = {name: columns[name][0].as_py() for name in shared}
    return Query(context, table, size, (table.schema.to_string(), shared))


def _columns(given: dict[str, Tensor], schema: Schema, limits: Limits) -> dict[str, pa.Array]:
    lists = _list_columns(schema)
    found: dict[str, pa.Array] = {}
    for name, tensor in given.items():
        column, _, part = name.rpartition(".")
        if name.endswith(LENGTHS) or (f".{part}" in (IDS, WEIGHTS) and column in lists and name not in lists):
            continue
        found[name] = _column(tensor, given.get(name + LENGTHS), name in lists, limits)
    for column in lists:
        if column + IDS in given and column + WEIGHTS in given:
            parts = [
                _column(given[column + part], given.get(column + LENGTHS), True, limits) for part in (IDS, WEIGHTS)
            ]
            pairs = pa.StructArray.from_arrays([part.values for part in parts], ["id", "weight"])
            found[column] = pa.ListArray.from_arrays(parts[0].offsets, pairs)
    return found


def _column(tensor: Tensor, lengths: Tensor | None, listed: bool, limits: Limits) -> pa.Array:
    values = _arrow(tensor)
    if lengths is not None:
        return pa.ListArray.from_arrays(_offsets(tensor, lengths, limits), values)
    if len(tensor.shape) == 1 or (tensor.shape[1] == 1 and not listed):
        return values
    rows, width = tensor.shape
    limits.check_rows(rows)
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1) * width, pa.int32()), values)


def _offsets(tensor: Tensor, lengths: Tensor, limits: Limits) -> pa.Array:
    name, counts = tensor.name, lengths.data
    limits.check_rows(len(counts))
    if len(lengths.shape) != 1 or isinstance(counts, list) or counts.dtype.kind not in "iu":
        raise RequestError(422, f"input {lengths.name!r} must be integers [rows]: how many values each row has")
    exact = [int(one) for one in counts]
    if min(exact) < 0 or sum(exact) != len(tensor.data):
        text = f"input {lengths.name!r}: lengths must be 0 or more and add up to the {len(tensor.data)} of {name!r}"
        raise RequestError(422, text)
    return pa.array(np.cumsum([0, *exact]), pa.int32())


def _arrow(tensor: Tensor) -> pa.Array:
    if not isinstance(tensor.data, list):
        data = tensor.data.astype(np.float32) if tensor.data.dtype == np.float16 else tensor.data
        return pa.array(data)
    try:
        return pa.array([one.decode() for one in tensor.data], pa.string())
    except UnicodeDecodeError:
        raise RequestError(422, f"input {tensor.name!r} holds bytes that are no UTF-8") from None


def _list_columns(schema: Schema) -> set[str]:
    """Those that have lengths, or several numbers."""
    entries = inputs_of(schema)
    wide = {entry["name"] for entry in entries if len(entry["shape"]) > 1}
    return wide | {entry["name"].removesuffix(LENGTHS) for entry in entries if entry["name"].endswith(LENGTHS)}


def inputs_of(schema: Schema) -> list[dict[str, Any]]:
    """Name, datatype and shape of each input; -1 is any number."""
    found: dict[str, tuple[str, list[int]]] = {}
    made = {spec.name for spec in schema.derived}
    for name, kind in schema.column_types.items():
        datatype = _datatype(kind)
        if datatype is not None:
            found[name] = (datatype, [-1])
            found |= {name + LENGTHS: ("INT64", [-1])} if "list" in kind else {}
    for dense in schema.dense:
        if dense.column in made:
            continue
        found[dense.column] = ("FP64", [-1] if dense.width == 1 else [-1, dense.width])
    for feature in schema.sparse:
        kind, column = (BYTES if feature.id_type == "text" else "INT64"), feature.column
        if column in made:
            continue
        if feature.kind == "id":
            found[column] = (kind, [-1])
            continue
        pairs = feature.kind == "weighted_id_list" and feature.weight_column is None
        found[column + (IDS if pairs else "")] = (kind, [-1])
        found[column + LENGTHS] = ("INT64", [-1])
        if pairs:
            found[column + WEIGHTS] = ("FP32", [-1])
        elif feature.weight_column is not None:
            found[feature.weight_column] = ("FP32", [-1])
            found[feature.weight_column + LENGTHS] = ("INT64", [-1])
    for value in (one for sequence in schema.sequences for one in sequence.values):
        found[value.column_name] = ("FP64", [-1])
        found[value.column_name + LENGTHS] = ("INT64", [-1])
    return [{"name": name, "datatype": kind, "shape": shape} for name, (kind, shape) in found.items()]


def _datatype(kind: str) -> str | None:
    """Of a column of some Arrow type; None: the protocol has none for it, as for times."""
    of = None if "timestamp" in kind else re.search(r"string|int|float|double", kind)
    return None if of is None else {"string": BYTES, "int": "INT64"}.get(of[0], "FP64")


def server_metadata() -> dict[str, Any]:
    """Of the server, as the protocol says it."""
    return {"name": "rayrec", "version": version("rayrec"), "extensions": ["binary_tensor_data"]}


def metadata(name: str, loaded: Loaded) -> dict[str, Any]:
    """Of a model, as the protocol says it."""
    outputs = [{"name": label, "datatype": "FP32", "shape": [-1]} for label in loaded.model.labels]
    inputs = inputs_of(loaded.reader.schema)
    return {"name": name, "versions": [loaded.version], "platform": "rayrec", "inputs": inputs, "outputs": outputs}


def chosen_outputs(scores: dict[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """
    Raises:
        RequestError: an output that the model does not have.
    """
    for name in wanted:
        if name not in scores:
            raise RequestError(422, f"the model has no output {name!r}; it has {', '.join(scores)}")
    return {name: scores[name] for name in wanted} if wanted else scores
