"""What was prepared on the host, to the device: all tensors of a batch in one pinned copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from rayrec.sparse import ops

T = TypeVar("T")
ALIGNMENT = 16  # bytes
_FILL = torch.zeros(ALIGNMENT, dtype=torch.uint8)


@dataclass(frozen=True)
class OnHost(Generic[T]):
    """Something that stays on the host."""

    item: T


class Upload(Generic[T]):
    """Something on the host, ready for a GPU: its tensors, found in dataclasses, tuples, lists and mappings, lie in one
    pinned buffer, except those that need gradients.

    Args:
        item: what is to be moved.
    """

    def __init__(self, item: T) -> None:
        self._item, self._tensors = item, list[torch.Tensor]()
        _mapped(item, lambda tensor: self._tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
        plain = [ops.as_words(tensor, torch.uint8) for tensor in self._tensors if not tensor.requires_grad]
        parts = [part for flat in plain for part in (flat, _FILL[: -len(flat) % ALIGNMENT])]
        self._sizes = [len(part) for part in parts]
        self._pinned = torch.empty(sum(self._sizes), dtype=torch.uint8, pin_memory=True)
        self.on_device: torch.Tensor | None = None  # the one buffer there
        if parts:
            torch.cat(parts, out=self._pinned)

    def to(self, device: torch.device) -> T:
        """The same with its tensors on `device`. The copy runs on the current stream; nothing waits for it."""
        self.on_device = self._pinned.to(device, non_blocking=True)
        arrived = iter(self.on_device.split(self._sizes)[::2])
        moved = (
            tensor.to(device) if tensor.requires_grad else next(arrived).view(tensor.dtype).view(tensor.shape)
            for tensor in self._tensors
        )
        return _mapped(self._item, lambda _: next(moved))


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
