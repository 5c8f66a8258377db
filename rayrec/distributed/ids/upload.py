"""What was prepared on the host, to the device: all tensors of a batch in one pinned copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
ALIGNMENT = 16  # bytes
_FILL = torch.zeros(ALIGNMENT, dtype=torch.uint8)


@dataclass(frozen=True)
class OnHost(Generic[T]):
    """Something that stays on the host."""

    item: T


@dataclass(frozen=True)
class TrainedWeights:
    """Weights that need gradients.

    Args:
        on_device: as the features have them.
        leaf: their copy on the host, from which routing takes its weights.
    """

    on_device: torch.Tensor
    leaf: torch.Tensor


class Upload(Generic[T]):
    """Something on the host, ready for a GPU: its tensors, found in dataclasses, tuples, lists and mappings, lie in one
    pinned buffer.

    Args:
        item: what is to be moved.
        trained: the weights from which those tensors were made that need gradients; None if there are none.
    """

    def __init__(self, item: T, trained: TrainedWeights | None = None) -> None:
        self._item, self._trained, self._tensors = item, trained, list[torch.Tensor]()
        _mapped(item, lambda tensor: self._tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
        # as strided: an expanded tensor of one element is contiguous, and `view` still checks its stride of 0
        flats = [tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)) for tensor in self._tensors]
        words = [flat.view(torch.uint8) for flat in flats]
        parts = [part for flat in words for part in (flat, _FILL[: -len(flat) % ALIGNMENT])]
        self._sizes = [len(part) for part in parts]
        self._pinned = torch.empty(sum(self._sizes), dtype=torch.uint8, pin_memory=True)
        self.on_device: torch.Tensor | None = None  # the one buffer there
        if parts:
            torch.cat(parts, out=self._pinned)

    def to(self, device: torch.device) -> T:
        """The same with its tensors on `device`. The copy runs on the current stream; nothing waits for it."""
        if not self._tensors:
            return self._item
        self.on_device = self._pinned.to(device, non_blocking=True)
        flat = self.on_device.split(self._sizes)[::2]
        moved = [part.view(of.dtype).view(of.shape) for part, of in zip(flat, self._tensors, strict=True)]
        places = [place for place, tensor in enumerate(self._tensors) if tensor.requires_grad]
        if places and self._trained is not None:
            on_host = [self._tensors[place] for place in places]
            found = _RoutedOnHost.apply(self._trained, on_host, self._trained.on_device, *(moved[n] for n in places))
            for place, tensor in zip(places, found, strict=True):
                moved[place] = tensor
        remaining = iter(moved)
        return _mapped(self._item, lambda _: next(remaining))


class _RoutedOnHost(torch.autograd.Function):
    """Weights that were routed on the host, as a function of those on the device.

    Backward calls the host's part itself. As nodes of the graph it would run in another thread than the device's, which
    would meanwhile begin other nodes' collectives: ranks could then begin them in different orders.
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
        return type(item)(_mapped(each, fn) for each in item)
    if isinstance(item, Mapping):
        return {key: _mapped(each, fn) for key, each in item.items()}
    return item
