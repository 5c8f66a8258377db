"""A package by its name, so that one piece of code runs on rayrec and on TorchRec; and results as plain data."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch

RAISES = "raises"


class Package:
    """`Package(NAME)("sparse.jagged_tensor")` is the module `NAME.sparse.jagged_tensor`; `.X` its top level's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, path: str) -> Any:
        return importlib.import_module(f"{self.name}.{path}")

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.name), name)


def attempt(call: Callable[[], Any]) -> Any:
    """Its result, or that it raises; of which class the error is makes no difference."""
    try:
        return call()
    except Exception:
        return RAISES


def plain(value: Any, package: str) -> Any:
    """A result as what JSON can hold: tensors with their type and shape, the sparse types with their parts."""
    kind = type(value).__name__
    if isinstance(value, torch.nn.Parameter):
        value = value.detach()
    if hasattr(value, "wait") and callable(value.wait):
        return plain(value.wait(), package)
    if kind == "ShardedTensor":
        return {"sharded": [plain(shard.tensor, package) for shard in value.local_shards()], "size": list(value.size())}
    if isinstance(value, torch.Tensor):
        return {
            "tensor": str(value.dtype),
            "shape": list(value.shape),
            "data": value.detach().double().flatten().tolist(),
        }
    if kind == "JaggedTensor":
        parts = (value.values(), value.weights_or_none(), value.lengths())
        return {"JaggedTensor": [plain(part, package) for part in parts]}
    if kind == "KeyedJaggedTensor":
        parts = (value.keys(), value.values(), value.weights_or_none(), value.lengths(), value.stride_per_key())
        return {"KeyedJaggedTensor": [plain(part, package) for part in parts]}
    if kind == "KeyedTensor":
        return {"KeyedTensor": [plain(p, package) for p in (value.keys(), value.length_per_key(), value.values())]}
    if isinstance(value, Mapping):
        return {str(key.value if isinstance(key, Enum) else key): plain(item, package) for key, item in value.items()}
    if isinstance(value, list | tuple | torch.Size):
        return [plain(item, package) for item in value]
    if isinstance(value, Enum):
        return plain(value.value, package)
    if isinstance(value, str):
        return value.replace(package, "rayrec")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    return f"<{kind}>"


def difference(one: Any, other: Any, tolerance: float = 1e-5, path: str = "") -> str | None:
    """Where two plain results first differ, floats beyond a tolerance; None where they do not."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{path}: {sorted(one)} and {sorted(other)}"[:600]
        parts = [(f"{path}.{key}", one[key], other[key]) for key in one]
    elif isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return f"{path}: {one} and {other}"[:600]
        parts = [(f"{path}[{place}]", a, b) for place, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return None if _equal(one, other, tolerance) else f"{path}: {one!r} and {other!r}"[:600]
    return next((found for name, a, b in parts if (found := difference(a, b, tolerance, name))), None)


def _equal(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        if math.isnan(one) and math.isnan(other):
            return True
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    return bool(one == other)
