"""What was prepared on the host, to the device: all tensors of a batch in one pinned copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class OnHost(Generic[T]):
    """Something that stays on the host."""

    item: T


def upload(item: T, device: torch.device) -> T:
    """The same with its tensors on `device`, looked for in dataclasses, tuples, lists and mappings.

    On a GPU the copy runs on the current stream, and nobody waits for it. Tensors that need gradients go one by one.
    """
    if device.type == "cpu":
        return item
    found: list[torch.Tensor] = []
    _mapped(item, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    moved = iter(_moved(found, device))
    return _mapped(item, lambda _: next(moved))


def _mapped(item: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        return fn(item)
    if isinstance(item, OnHost):
        return item
    if is_dataclass(item) and not isinstance(item, type):
        return replace(item, **{field.name: _mapped(getattr(item, field.name), fn) for field in fields(item)})
    if isinstance(item, list | tuple):
        return type(item)(_mapped(each, fn) for each in item)
    if isinstance(item, Mapping):
        return {key: _mapped(each, fn) for key, each in item.items()}
    return item


def _moved(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        if not tensor.requires_grad:
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    for tensor, start in zip(tensors, starts, strict=True):
        if not tensor.requires_grad:
            pinned[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    arrived = pinned.to(device, non_blocking=True)
    return [
        tensor.to(device)
        if tensor.requires_grad
        else arrived[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(tensors, starts, strict=True)
    ]
