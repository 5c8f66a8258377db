"""Version 2 of the open inference protocol over HTTP: paths, and bodies of JSON with or without binary tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayrec.serve.errors import RequestError, parse_json
from rayrec.serve.routing import Answer
from rayrec.serve.v2 import Tensor, chosen_outputs, tensor_of

JSON_BYTES = "Inference-Header-Content-Length"
_PATH = re.compile(r"/v2/models/(?P<model>[^/]+)(/versions/(?P<version>[^/]+))?(/(?P<verb>ready|infer))?")
_BINARY = "binary_data_size"


@dataclass(frozen=True, slots=True)
class ModelPath:
    """What a path below `/v2/models` names; the verb is "" for the model's metadata."""

    model: str
    version: str | None
    verb: str

    @classmethod
    def of(cls, path: str) -> ModelPath | None:
        found = _PATH.fullmatch(path)
        return None if found is None else cls(found["model"], found["version"], found["verb"] or "")


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A body.

    Args:
        outputs: names that are wanted, and whether as bytes; none: all, as `binary` says.
    """

    id: str | None
    tensors: tuple[Tensor, ...]
    outputs: tuple[tuple[str, bool], ...]
    binary: bool


def read_request(body: bytes, json_bytes: str | None) -> InferRequest:
    """
    Args:
        json_bytes: the header `JSON_BYTES`: where the binary tensors begin.

    Raises:
        RequestError: the body is not what the protocol says.
    """
    if json_bytes is not None and (not (json_bytes.isascii() and json_bytes.isdigit()) or int(json_bytes) > len(body)):
        raise RequestError(400, f"{JSON_BYTES} must be a number of bytes of the body")
    end = len(body) if json_bytes is None else int(json_bytes)
    raw = parse_json(body[:end])
    try:
        return _request(raw, memoryview(body)[end:])
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        text = f"the body is no inference request of the open inference protocol: {type(error).__name__}: {error}"
        raise RequestError(400, text[:300]) from None


def _request(raw: dict[str, Any], rest: memoryview) -> InferRequest:
    tensors = []
    for one in raw["inputs"]:
        size = (one.get("parameters") or {}).get(_BINARY)
        if size is None:
            data: Any = _flat(one["data"])
        elif type(size) is int and 0 <= size <= len(rest):
            data, rest = rest[:size], rest[size:]
        else:
            raise RequestError(400, f"input {str(one['name'])[:100]!r}: {_BINARY} is more than the body holds")
        shape = one["shape"]
        if not isinstance(shape, list) or not all(type(size) is int for size in shape):
            raise RequestError(400, "a shape is a list of whole numbers")
        tensors.append(tensor_of(str(one["name"]), str(one["datatype"]), shape, data))
    if len(rest):
        raise RequestError(400, f"{len(rest)} bytes of the body belong to no input")
    binary = bool((raw.get("parameters") or {}).get("binary_data_output", False))
    outputs = tuple(
        (str(one["name"]), bool((one.get("parameters") or {}).get("binary_data", binary)))
        for one in raw.get("outputs") or ()
    )
    name = raw.get("id")
    return InferRequest(None if name is None else str(name), tuple(tensors), outputs, binary)


def _flat(data: Any) -> list[Any]:
    """Values of nested lists; the protocol allows both."""
    if not isinstance(data, list):
        raise RequestError(400, "data must be a list")
    if data and isinstance(data[0], list):
        return [value for row in data for value in (row if isinstance(row, list) else [row])]
    return data


def written(answer: Answer, request: InferRequest, request_id: str) -> tuple[bytes, int | None]:
    """The body of an answer, and how many bytes of it are JSON; None: all.

    Raises:
        RequestError: an output that the model does not have.
    """
    scores = chosen_outputs(answer.scores, [name for name, _ in request.outputs])
    as_bytes = dict(request.outputs)
    parts: list[bytes] = []
    outputs: list[dict[str, Any]] = []
    for name, values in scores.items():
        output: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": list(values.shape)}
        if as_bytes.get(name, request.binary):
            parts.append(np.ascontiguousarray(values, "<f4").tobytes())
            output["parameters"] = {_BINARY: len(parts[-1])}
        else:
            output["data"] = numbers(values.reshape(-1).tolist())
        outputs.append(output)
    head = {"model_name": answer.model, "model_version": answer.version, "id": request_id, "outputs": outputs}
    text = json.dumps(head).encode()
    return text + b"".join(parts), len(text) if parts else None


def numbers(values: Sequence[float]) -> list[float]:
    """The shortest numbers that give the float32 back: nine digits name one, however small."""
    return [float(f"{one:.9g}") for one in values]
