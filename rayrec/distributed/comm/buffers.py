"""Large CPU buffers that are used again, step after step.

A fresh buffer of a few megabytes costs a page fault for every 4 KiB, which on a CPU takes longer than the exchange
that it is for. A buffer is free again when nothing but the pool refers to its memory, whoever held it: a view, a user,
autograd. GPUs have torch's caching allocator for this.
"""

from __future__ import annotations

import torch

SMALL_BYTES = 1 << 18  # below, malloc keeps memory by itself
MOST_BUFFERS = 16

_use_count = getattr(torch._C, "_storage_Use_Count", None)


def _references(buffer: torch.Tensor) -> int:
    assert _use_count is not None
    return _use_count(buffer.untyped_storage()._cdata)


class BufferPool:
    """Hands out uninitialised memory on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._keeps = device.type == "cpu" and _use_count is not None
        self._device = device
        self._buffers: list[torch.Tensor] = []
        self._alone = _references(torch.empty(1)) if self._keeps else 0

    def empty(self, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A flat tensor of `size` elements."""
        num_bytes = size * dtype.itemsize
        if not self._keeps or num_bytes < SMALL_BYTES:
            return torch.empty(size, dtype=dtype, device=self._device)
        for buffer in self._buffers:
            if num_bytes <= buffer.numel() <= 2 * num_bytes and _references(buffer) == self._alone:
                return buffer[:num_bytes].view(dtype)
        if len(self._buffers) >= MOST_BUFFERS:
            self._buffers.pop(0)
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._buffers.append(buffer)
        return buffer[:num_bytes].view(dtype)

    def picked(self, numbers: torch.Tensor, places: torch.Tensor, unit: int) -> torch.Tensor:
        """Of `numbers`, seen as rows of `unit`, those of `places` in their order, flat."""
        out = self.empty(places.numel() * unit, numbers.dtype)
        torch.index_select(numbers.view(-1, unit), 0, places, out=out.view(-1, unit))
        return out
