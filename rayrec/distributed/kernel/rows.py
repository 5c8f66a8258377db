"""Row updates inside backward, in plain tensor operations.

For what fbgemm's kernels cannot do: optimizers that they do not train on a CPU, and replicated tables, whose gradient
rows must meet between backward and update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rayrec.distributed.kernel import optimizer_rules as rules
from rayrec.distributed.kernel.matrix import RowGroups, RowMatrix, make_anchor
from rayrec.distributed.kernel.tables import LocalTable, Lookups


class RowKernel:
    """Tables of one width, dtype and optimizer as one matrix, updated row by row.

    Args:
        tables: the rectangles.
        table_of_lookup: for each lookup, the place of its table in `tables`.
        device: where they lie.
    """

    leaves: tuple[nn.Parameter, ...] = ()

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        self.tables = list(tables)
        self.spec = self.tables[0].update
        self.learning_rate = self.spec.learning_rate
        self.iteration = 0
        self.matrix = RowMatrix(tables, table_of_lookup, device)
        rows, dim = self.matrix.weight_RD.shape
        self.state = rules.make_state(self.spec, rows, dim, device)
        self._anchor = make_anchor(device)

    def __repr__(self) -> str:
        return f"RowKernel({[table.config.name for table in self.tables]}, {self.spec})"

    def pooled(self, lookups: Lookups) -> torch.Tensor:
        of_rows = self.matrix.row_lookups(lookups)
        out: torch.Tensor = _Pooled.apply(self._anchor, self, of_rows.ids, of_rows.offsets, of_rows.weights)
        return out

    def vectors(self, lookups: Lookups) -> torch.Tensor:
        out: torch.Tensor = _Vectors.apply(self._anchor, self, self.matrix.row_lookups(lookups).ids)
        return out

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.learning_rate

    def train(self, rows: torch.Tensor, grads: torch.Tensor, rate: float | None) -> tuple[torch.Tensor, ...]:
        """Applies the optimizer to distinct `rows` of the matrix, at the rate of their lookup, as fbgemm does."""
        assert rate is not None
        if self.spec.replicas is not None and self.spec.replicas.every_step:
            rows, grads = self.spec.replicas.mean(rows, grads)
        self.iteration += 1
        weight_RD = self.matrix.weight_RD
        weight_nD = weight_RD[rows].float()
        step = rules.Step(rows, weight_nD, grads.float(), self.state, self.spec, rate, self.iteration)
        rules.apply(weight_RD, step)
        return ()

    def write_back(self) -> None:
        """Nothing to do: there is no cache."""

    def weights(self) -> list[torch.Tensor]:
        return self.matrix.split(self.matrix.weight_RD)

    def states(self) -> list[dict[str, torch.Tensor]]:
        parts = {name: self.matrix.split(whole) for name, whole in self.state.items()}
        return [{name: pieces[place] for name, pieces in parts.items()} for place in range(len(self.tables))]


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        kernel: RowKernel,
        rows: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.kernel, ctx.lookups, ctx.rate = kernel, Lookups(rows, offsets, weights), kernel.rate
        return kernel.matrix.bags(ctx.lookups)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        kernel: RowKernel = ctx.kernel
        lookups: Lookups = ctx.lookups
        weight_grad = kernel.matrix.weight_gradients(lookups, grad) if ctx.needs_input_grad[4] else None
        groups = RowGroups.of(lookups.ids)
        sums = kernel.matrix.row_gradients(groups, lookups.offsets, lookups.weights, grad)
        kernel.train(groups.distinct, sums, ctx.rate)
        return None, None, None, None, weight_grad


class _Vectors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, kernel: RowKernel, rows: torch.Tensor) -> torch.Tensor:
        ctx.kernel, ctx.rows, ctx.rate = kernel, rows, kernel.rate
        return kernel.matrix.vectors(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        groups = RowGroups.of(ctx.rows)
        ctx.kernel.train(groups.distinct, groups.sum(grads[0].contiguous()), ctx.rate)
        return None, None, None
