"""The open inference protocol, version 2, over HTTP: paths, and JSON bodies with or without binary tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec.serve.errors import RequestError, parse_json
from rayrec.serve.routing import Answer
from rayrec.serve.v2 import Tensor, select_outputs, tensor_of

JSON_BYTES = "Inference-Header-Content-Length"
_PATH = re.compile(r"/v2/models/(?P<model>[^/]+)(/versions/(?P<version>[^/]+))?(/(?P<verb>ready|infer))?")
_BINARY = "binary_data_size"


@dataclass(frozen=True, slots=True)
class ModelPath:
    """A path below `/v2/models`; the verb is "" for the model's metadata."""

    model: str
    version: str | None
    verb: str

    @classmethod
    def of(cls, path: str) -> ModelPath | None:
        match = _PATH.fullmatch(path)
        return None if match is None else cls(match["model"], match["version"], match["verb"] or "")


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A parsed body.

    Args:
        outputs: (name, whether as bytes) of the requested outputs; empty: all outputs, as bytes if `binary`.
    """

    id: str | None
    tensors: tuple[Tensor, ...]
    outputs: tuple[tuple[str, bool], ...]
    binary: bool


def read_request(body: bytes, json_bytes: str | None) -> InferRequest:
    """
    Args:
        json_bytes: The header `JSON_BYTES`: the size of the JSON part, after which the binary tensors start.

    Raises:
        RequestError: The body does not follow the protocol.
    """
    if json_bytes is not None and (not (json_bytes.isascii() and json_bytes.isdigit()) or int(json_bytes) > len(body)):
        raise RequestError(400, f"{JSON_BYTES} must be the number of JSON bytes in the body")
    end = len(body) if json_bytes is None else int(json_bytes)
    raw = parse_json(body[:end])
    try:
        return _request(raw, memoryview(body)[end:])
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        text = f"not a request of the open inference protocol: {type(error).__name__}: {error}"
        raise RequestError(400, text[:300]) from None


def _request(raw: dict[str, Any], binary_data: memoryview) -> InferRequest:
    tensors = []
    for entry in raw["inputs"]:
        shape = entry["shape"]
        if not isinstance(shape, list) or not all(type(size) is int for size in shape):
            raise RequestError(400, "a shape must be a list of integers")
        size = (entry.get("parameters") or {}).get(_BINARY)
        if size is None:
            data: Any = _flat(str(entry["name"]), entry["data"], shape)
        elif type(size) is int and 0 <= size <= len(binary_data):
            data, binary_data = binary_data[:size], binary_data[size:]
        else:
            raise RequestError(400, f"input {str(entry['name'])[:100]!r}: {_BINARY} exceeds the body")
        tensors.append(tensor_of(str(entry["name"]), str(entry["datatype"]), shape, data))
    if len(binary_data):
        raise RequestError(400, f"{len(binary_data)} bytes of the body belong to no input")
    binary = bool((raw.get("parameters") or {}).get("binary_data_output", False))
    outputs = tuple(
        (str(entry["name"]), bool((entry.get("parameters") or {}).get("binary_data", binary)))
        for entry in raw.get("outputs") or ()
    )
    name = raw.get("id")
    return InferRequest(None if name is None else str(name), tuple(tensors), outputs, binary)


def _flat(name: str, data: Any, shape: Sequence[int]) -> list[Any]:
    """Flattens nested lists; the protocol allows both forms.

    Raises:
        RequestError: Not a list, or the nested lists do not have the shape.
    """
    if not isinstance(data, list):
        raise RequestError(400, "data must be a list")
    if not any(isinstance(row, list) for row in data):
        return data
    if len(shape) != 2 or len(data) != shape[0] or not all(isinstance(r, list) and len(r) == shape[1] for r in data):
        raise RequestError(422, f"input {name[:100]!r}: the lists in data do not have the shape {list(shape)}")
    return [value for row in data for value in row]


def encode(answer: Answer, request: InferRequest, request_id: str) -> tuple[bytes, int | None]:
    """The body of an answer, and the size of its JSON part; None if all of it is JSON.

    Raises:
        RequestError: An output is unknown.
    """
    scores = select_outputs(answer.scores, [name for name, _ in request.outputs])
    as_bytes = dict(request.outputs)
    blocks, outputs = list[bytes](), list[str]()
    for name, values in scores.items():
        output: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": list(values.shape)}
        if as_bytes.get(name, request.binary):
            blocks.append(np.ascontiguousarray(values, "<f4").tobytes())
            outputs.append(json.dumps({**output, "parameters": {_BINARY: len(blocks[-1])}}))
        else:
            outputs.append(with_field(output, "data", numbers_text(values)))
    head = {"model_name": answer.model, "model_version": answer.version, "id": request_id}
    text = with_field(head, "outputs", f"[{', '.join(outputs)}]").encode()
    return text + b"".join(blocks), len(text) if blocks else None


def with_field(head: dict[str, Any], name: str, text: str) -> str:
    """The JSON of an object, with one more field that is JSON already."""
    return f"{json.dumps(head)[:-1]}, {json.dumps(name)}: {text}}}"


def numbers_text(values: npt.NDArray[np.float32]) -> str:
    """A JSON array of the numbers, with the fewest digits that identify each float32.

    Arrow formats them in a tenth of the time of Python, which matters in an event loop.
    """
    return f"[{', '.join(pa.array(values.reshape(-1)).cast(pa.string()).to_pylist())}]"
