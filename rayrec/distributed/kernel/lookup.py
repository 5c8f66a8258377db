"""Lookups in a `RowMatrix` as autograd sees them: backward hands each touched row's gradient to the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from rayrec.distributed.kernel.matrix import RowGroups, RowMatrix
from rayrec.distributed.kernel.tables import Kernel, Lookups


class MatrixKernel(Kernel, Protocol):
    """A kernel whose tables make a `RowMatrix`."""

    @property
    def matrix(self) -> RowMatrix:
        """The tables, one below the other."""

    @property
    def leaves(self) -> Sequence[nn.Parameter]:
        """Parameters that autograd gives gradients to; none where the kernel updates its rows itself."""

    def train(self, rows: torch.Tensor, grads: torch.Tensor) -> Sequence[torch.Tensor]:
        """Takes the mean gradients `[n, D]` of distinct `rows`; returns the gradient of each leaf."""


def make_anchor(device: torch.device) -> torch.Tensor:
    """Something to differentiate with respect to: backward must come by, whatever else needs gradients."""
    return torch.zeros(0, device=device, requires_grad=True)


def pooled(kernel: MatrixKernel, anchor: torch.Tensor, lookups: Lookups) -> torch.Tensor:
    """Sums of the bags' vectors, `[B, L * D]` float32."""
    num_lookups, num_bags = kernel.matrix.num_lookups, lookups.offsets.numel() - 1
    lengths_LB = (lookups.offsets[1:] - lookups.offsets[:-1]).view(num_lookups, num_bags // num_lookups)
    rows = kernel.matrix.rows_of(lookups.ids, lengths_LB)
    out: torch.Tensor = _Pooled.apply(
        anchor, kernel, rows, lookups.offsets.to(torch.int64), lookups.weights, *kernel.leaves
    )
    return out


def vectors(kernel: MatrixKernel, anchor: torch.Tensor, lookups: Lookups) -> torch.Tensor:
    """Every id's own vector, `[N, D]` float32."""
    lengths_LB = (lookups.offsets[1:] - lookups.offsets[:-1]).view(kernel.matrix.num_lookups, -1)
    out: torch.Tensor = _Vectors.apply(anchor, kernel, kernel.matrix.rows_of(lookups.ids, lengths_LB), *kernel.leaves)
    return out


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        kernel: MatrixKernel,
        rows: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        *leaves: nn.Parameter,
    ) -> torch.Tensor:
        ctx.kernel, ctx.lookups = kernel, Lookups(rows, offsets, weights)
        return kernel.matrix.bags(ctx.lookups)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        kernel: MatrixKernel = ctx.kernel
        lookups: Lookups = ctx.lookups
        weight_grad = kernel.matrix.weight_gradients(lookups, grad) if ctx.needs_input_grad[4] else None
        groups = RowGroups.of(lookups.ids)
        row_grads = kernel.matrix.row_gradients(groups, lookups.offsets, lookups.weights, grad)
        return None, None, None, None, weight_grad, *kernel.train(groups.distinct, row_grads)


class _Vectors(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, kernel: MatrixKernel, rows: torch.Tensor, *leaves: nn.Parameter
    ) -> torch.Tensor:
        ctx.kernel, ctx.rows = kernel, rows
        return kernel.matrix.vectors(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        groups = RowGroups.of(ctx.rows)
        return None, None, None, *ctx.kernel.train(groups.distinct, groups.sum(grads[0].contiguous()))
