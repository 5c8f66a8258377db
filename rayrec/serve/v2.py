"""KServe's open inference protocol, version 2: tensors of a request, and metadata of server and model.

Source: https://kserve.github.io/website/latest/modelserving/data_plane/v2_protocol/, for HTTP with the binary tensor
extension. Tensors have no rows of unequal length: the ids of a list are a tensor `[N]`, and the tensor `NAME.lengths`
`[rows]` has the number of ids of each row. Lists of equal length may also be `[rows, k]`. An input with one row, if
others have more, is the context of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa

from rayrec.data import Schema
from rayrec.inference.protocol_inputs import BYTES, IDS, LENGTHS, WEIGHTS, inputs_of
from rayrec.serve.errors import RequestError
from rayrec.serve.limits import Limits
from rayrec.serve.requests import Query
from rayrec.serve.versions import Loaded

DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input.

    Args:
        data: Flat numbers of the datatype's dtype, or a list of bytes.
    """

    name: str
    shape: tuple[int, ...]
    data: Any


def tensor_of(name: str, datatype: str, shape: Sequence[int], data: bytes | Sequence[Any] | memoryview) -> Tensor:
    """A tensor from raw bytes, or from values.

    Raises:
        RequestError: The datatype is unknown, or the data does not fit datatype and shape.
    """
    if datatype != BYTES and datatype not in DTYPES:
        raise RequestError(422, f"input {name!r}: datatype {datatype!r}; there are {', '.join((*DTYPES, BYTES))}")
    if not 1 <= len(shape) <= 2 or any(size < 0 for size in shape):
        raise RequestError(422, f"input {name!r} has shape {list(shape)}; it must be [rows] or [rows, numbers]")
    try:
        values = _values(datatype, data)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(422, f"input {name!r}: data is not {datatype}: {str(error)[:200]}") from None
    if len(values) != math.prod(shape):
        raise RequestError(
            422, f"input {name!r}: shape {list(shape)} needs {math.prod(shape)} values, got {len(values)}"
        )
    return Tensor(name, tuple(shape), values)


def _values(datatype: str, data: Any) -> Any:
    if isinstance(data, bytes | memoryview):
        return _strings(bytes(data)) if datatype == BYTES else np.frombuffer(data, DTYPES[datatype])
    if datatype == BYTES:
        if not all(isinstance(item, str | bytes) for item in data):
            raise ValueError("must be strings")
        return [item.encode() if isinstance(item, str) else item for item in data]
    types = (bool,) if datatype == "BOOL" else (int,) if "INT" in datatype else (int, float)
    if not all(type(item) in types for item in data):
        raise ValueError(f"must be {' or '.join(kind.__name__ for kind in types)}")
    return np.array(data, DTYPES[datatype])


def _strings(data: bytes) -> list[bytes]:
    """Strings, each after its length as a uint32."""
    strings, offset = [], 0
    while offset < len(data):
        size = int.from_bytes(data[offset : offset + 4], "little")
        offset += 4 + size
        if offset > len(data):
            raise ValueError("a string is longer than the data")
        strings.append(data[offset - size : offset])
    return strings


def query_of(tensors: Sequence[Tensor], schema: Schema, limits: Limits) -> Query:
    """
    Raises:
        RequestError: An input is unknown or appears twice, or inputs have different numbers of rows.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    if len(by_name) < len(tensors):
        raise RequestError(422, "an input appears twice; send it once")
    names = {entry["name"] for entry in inputs_of(schema)}
    if unknown := sorted(set(by_name) - names):
        raise RequestError(422, f"the model has no input {unknown[0]!r}; it has {', '.join(sorted(names))}")
    columns = _columns(by_name, schema, limits)
    size = max((len(column) for column in columns.values()), default=0)
    limits.check_rows(size)
    for name, column in columns.items():
        if len(column) not in (1, size):
            raise RequestError(422, f"input {name!r} has {len(column)} rows, others have {size}")
    context_columns = frozenset(name for name, column in columns.items() if len(column) < size)
    table = pa.table({name: column for name, column in columns.items() if name not in context_columns})
    context = {name: columns[name][0].as_py() for name in context_columns}
    return Query(context, table, size, (table.schema.to_string(), context_columns))


def _columns(tensors: dict[str, Tensor], schema: Schema, limits: Limits) -> dict[str, pa.Array]:
    lists = _list_columns(schema)
    columns: dict[str, pa.Array] = {}
    for name, tensor in tensors.items():
        column, _, suffix = name.rpartition(".")
        if name.endswith(LENGTHS) or (f".{suffix}" in (IDS, WEIGHTS) and column in lists and name not in lists):
            continue
        columns[name] = _column(tensor, tensors.get(name + LENGTHS), name in lists, limits)
    for column in lists:
        if column + IDS in tensors and column + WEIGHTS in tensors:
            ids, weights = (
                _column(tensors[column + suffix], tensors.get(column + LENGTHS), True, limits)
                for suffix in (IDS, WEIGHTS)
            )
            pairs = pa.StructArray.from_arrays([ids.values, weights.values], ["id", "weight"])
            columns[column] = pa.ListArray.from_arrays(ids.offsets, pairs)
    return columns


def _column(tensor: Tensor, lengths: Tensor | None, is_list: bool, limits: Limits) -> pa.Array:
    values = _arrow(tensor)
    if lengths is not None:
        return pa.ListArray.from_arrays(_offsets(tensor, lengths, limits), values)
    if len(tensor.shape) == 1 or (tensor.shape[1] == 1 and not is_list):
        return values
    rows, width = tensor.shape
    limits.check_rows(rows)
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1) * width, pa.int32()), values)


def _offsets(tensor: Tensor, lengths: Tensor, limits: Limits) -> pa.Array:
    name, counts = tensor.name, lengths.data
    limits.check_rows(len(counts))
    if len(lengths.shape) != 1 or isinstance(counts, list) or counts.dtype.kind not in "iu":
        raise RequestError(422, f"input {lengths.name!r} must be integers [rows]: the number of values of each row")
    exact = [int(count) for count in counts]  # sums of int64 could overflow
    if min(exact) < 0 or sum(exact) != len(tensor.data):
        text = f"input {lengths.name!r}: must be lengths of 0 or more that add up to the {len(tensor.data)} of {name!r}"
        raise RequestError(422, text)
    return pa.array(np.cumsum([0, *exact]), pa.int32())


def _arrow(tensor: Tensor) -> pa.Array:
    if not isinstance(tensor.data, list):
        data = tensor.data.astype(np.float32) if tensor.data.dtype == np.float16 else tensor.data
        return pa.array(data)
    try:
        return pa.array([item.decode() for item in tensor.data], pa.string())
    except UnicodeDecodeError:
        raise RequestError(422, f"input {tensor.name!r} has strings that are not UTF-8") from None


def _list_columns(schema: Schema) -> set[str]:
    """Columns with lists, or with several numbers per row."""
    entries = inputs_of(schema)
    wide = {entry["name"] for entry in entries if len(entry["shape"]) > 1}
    return wide | {entry["name"].removesuffix(LENGTHS) for entry in entries if entry["name"].endswith(LENGTHS)}


def server_metadata() -> dict[str, Any]:
    """Server metadata."""
    return {"name": "rayrec", "version": version("rayrec"), "extensions": ["binary_tensor_data"]}


def metadata(name: str, loaded: Loaded) -> dict[str, Any]:
    """Model metadata."""
    outputs = [{"name": label, "datatype": "FP32", "shape": [-1]} for label in loaded.model.labels]
    inputs = inputs_of(loaded.reader.schema)
    return {"name": name, "versions": [loaded.version], "platform": "rayrec", "inputs": inputs, "outputs": outputs}


def select_outputs(scores: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """
    Args:
        names: Requested outputs; none: all.

    Raises:
        RequestError: An output is unknown.
    """
    for name in names:
        if name not in scores:
            raise RequestError(422, f"the model has no output {name!r}; it has {', '.join(scores)}")
    return {name: scores[name] for name in names} if names else scores
