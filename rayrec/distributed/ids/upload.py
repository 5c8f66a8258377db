"""Copies data that was prepared on the host to the device: all tensors of a batch in one pinned buffer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
ALIGNMENT = 16  # bytes
_PADDING = torch.zeros(ALIGNMENT, dtype=torch.uint8)


@dataclass(frozen=True)
class OnHost(Generic[T]):
    """An item that is not copied."""

    item: T


@dataclass(frozen=True)
class TrainedWeights:
    """Weights that need gradients.

    Args:
        on_device: the features' weights.
        leaf: their copy on the host, which routing reads.
    """

    on_device: torch.Tensor
    leaf: torch.Tensor


class Upload(Generic[T]):
    """An item on the host, ready for a GPU: its tensors, inside dataclasses, tuples, lists and mappings, are packed in
    one pinned buffer.

    Args:
        item: the item to copy.
        trained: weights that need gradients, if some of the tensors depend on them; else None.
    """

    def __init__(self, item: T, trained: TrainedWeights | None = None) -> None:
        self._item, self._trained, self._tensors = item, trained, list[torch.Tensor]()
        _mapped(item, lambda tensor: self._tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
        # `as_strided` because an expanded tensor of one element is contiguous, but `view` still checks its stride of 0.
        flats = [tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)) for tensor in self._tensors]
        arrays = [flat.view(torch.uint8) for flat in flats]
        padded = [array for data in arrays for array in (data, _PADDING[: -len(data) % ALIGNMENT])]
        self._sizes = [len(array) for array in padded]
        self.on_device: torch.Tensor | None = None  # the buffer's copy
        if padded:
            self._pinned = _pinned(sum(self._sizes))
            torch.cat(padded, out=self._pinned)

    def to(self, device: torch.device) -> T:
        """The item with its tensors on `device`. The copy runs on the current stream; nothing waits for it."""
        if not self._tensors:
            return self._item
        self.on_device = self._pinned.to(device, non_blocking=True)
        arrays = self.on_device.split(self._sizes)[::2]
        moved = [data.view(like.dtype).view(like.shape) for data, like in zip(arrays, self._tensors, strict=True)]
        trained = [index for index, tensor in enumerate(self._tensors) if tensor.requires_grad]
        if trained and self._trained is not None:
            on_host = [self._tensors[index] for index in trained]
            on_device = (moved[index] for index in trained)
            linked = _RoutedOnHost.apply(self._trained, on_host, self._trained.on_device, *on_device)
            for index, tensor in zip(trained, linked, strict=True):
                moved[index] = tensor
        remaining = iter(moved)
        return _mapped(self._item, lambda _: next(remaining))


def _pinned(num_bytes: int) -> torch.Tensor:
    """A pinned buffer; a pageable one if there is no pinned memory left, because other ranks wait for this batch."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        warnings.warn(f"batches are copied to the device from pageable memory, which is slower: {error}", stacklevel=2)
        return torch.empty(num_bytes, dtype=torch.uint8)


class _RoutedOnHost(torch.autograd.Function):
    """Weights that were routed on the host, as a function of the weights on the device.

    Backward calls autograd for the host's operators itself. As nodes of the graph they would run in another thread than
    the device's, which would start other nodes' collectives meanwhile: ranks could then start them in different orders.
    """

    @staticmethod
    def forward(
        ctx: Any, trained: TrainedWeights, on_host: list[torch.Tensor], weights: torch.Tensor, *routed: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.trained, ctx.on_host, ctx.device = trained, on_host, weights.device
        return tuple(tensor.view_as(tensor) for tensor in routed)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        on_host = [grad.to("cpu") for grad in grads]
        (grad,) = torch.autograd.grad(ctx.on_host, ctx.trained.leaf, on_host, retain_graph=True)
        return None, None, grad.to(ctx.device), *(None for _ in grads)


def _mapped(item: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        return fn(item)
    if isinstance(item, OnHost):
        return item
    if is_dataclass(item) and not isinstance(item, type):
        return replace(item, **{field.name: _mapped(getattr(item, field.name), fn) for field in fields(item)})
    if isinstance(item, list | tuple):
        return type(item)(_mapped(element, fn) for element in item)
    if isinstance(item, Mapping):
        return {key: _mapped(value, fn) for key, value in item.items()}
    return item
