"""Widths that fbgemm's CUDA kernels do not have: a table is held with up to three more columns, which stay zero and are
seen nowhere else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch


def padded(dim: int) -> int:
    """The width that fbgemm's CUDA kernels need."""
    return -(-dim // 4) * 4


class Padding:
    """Takes columns of zeros out of bags, and puts them into their gradients.

    Args:
        dims: the true width of each lookup.
        device: where bags lie.
        per_row: the optimizer has one number a row, the mean of g² over the padded width; gradients are made larger by
            `scale`, so that it is the mean over the true one. Then all lookups have one width.
    """

    def __init__(self, dims: Sequence[int], device: torch.device, per_row: bool) -> None:
        starts = accumulate(map(padded, dims), initial=0)
        self.width = sum(map(padded, dims))
        self.needed = sum(dims) < self.width
        self.scale = math.sqrt(padded(dims[0]) / dims[0]) if self.needed and per_row else 1.0
        kept = [start + col for start, dim in zip(starts, dims, strict=False) for col in range(dim)]
        self.kept = torch.tensor(kept if self.needed else [], dtype=torch.int64, device=device)

    def cut(self, bags: torch.Tensor) -> torch.Tensor:
        """`[B, true widths]` of `[B, padded widths]`."""
        out: torch.Tensor = _Cut.apply(bags, self)
        return out


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bags: torch.Tensor, padding: Padding) -> torch.Tensor:
        ctx.padding = padding
        return bags.index_select(1, padding.kept)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        padding: Padding = ctx.padding
        whole = grads[0].new_zeros(grads[0].shape[0], padding.width)
        return whole.index_copy_(1, padding.kept, grads[0] * padding.scale), None
