"""Kernels of torch's operators, for what fbgemm cannot do: optimizers that it does not have on a CPU, replicated
tables (gradients are exchanged between backward and update), and gradients for an optimizer of the user's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rayrec.distributed.kernel import optimizer_formulas as formulas
from rayrec.distributed.kernel.interface import LocalTable, Lookups
from rayrec.distributed.kernel.row_matrix import RowGroups, RowMatrix, make_anchor


class RowKernel:
    """Tables of one width, dtype and optimizer as one matrix; backward updates the touched rows.

    Args:
        tables: the rectangles.
        table_of_lookup: for each lookup, the index of its table in `tables`.
        device: of the tables.
    """

    leaves: tuple[nn.Parameter, ...] = ()

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        self.tables = list(tables)
        self.spec = self.tables[0].update
        self.learning_rate = self.spec.learning_rate
        self.iteration = 0
        self.matrix = RowMatrix(tables, table_of_lookup, device)
        rows, dim = self.matrix.weight_RD.shape
        self.state = formulas.make_state(self.spec, rows, dim, device)
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
        """Applies the optimizer to distinct `rows` of the matrix, at the learning rate of their lookup."""
        assert rate is not None
        if self.spec.replicas is not None and self.spec.replicas.every_step:
            rows, grads = self.spec.replicas.mean(rows, grads)
        self.iteration += 1
        weight_RD = self.matrix.weight_RD
        weight_nD = weight_RD[rows].float()
        step = formulas.Step(rows, weight_nD, grads.float(), self.state, self.spec, rate, self.iteration)
        formulas.apply(weight_RD, step)
        return ()

    def write_back(self) -> None:
        """Nothing to do: there is no cache."""

    def weights(self) -> list[torch.Tensor]:
        return self.matrix.split(self.matrix.weight_RD)

    def states(self) -> list[dict[str, torch.Tensor]]:
        parts = {name: self.matrix.split(whole) for name, whole in self.state.items()}
        return [{name: pieces[number] for name, pieces in parts.items()} for number in range(len(self.tables))]


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


class DenseKernel:
    """Tables of one width and dtype, each a leaf parameter that has a dense gradient after backward.

    fbgemm's dense kernel keeps all tables in one flat parameter. Here each rectangle is a parameter, over the memory of
    one matrix, so a lookup is still one operator.

    Args:
        tables: the rectangles.
        table_of_lookup: for each lookup, the index of its table in `tables`.
        device: of the tables.
    """

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        self.tables = list(tables)
        self.matrix = RowMatrix(tables, table_of_lookup, device)
        self.rate = None  # the optimizer has it
        self.leaves = [nn.Parameter(part) for part in self.matrix.split(self.matrix.weight_RD)]
        self._anchor = make_anchor(device)

    def __repr__(self) -> str:
        return f"DenseKernel({[table.config.name for table in self.tables]})"

    def pooled(self, lookups: Lookups) -> torch.Tensor:
        return self.matrix.bags(self.matrix.row_lookups(lookups), self._joined())

    def vectors(self, lookups: Lookups) -> torch.Tensor:
        return self.matrix.vectors(self.matrix.row_lookups(lookups).ids, self._joined())

    def _joined(self) -> torch.Tensor:
        """The matrix in float32, in which bags and gradients are summed."""
        joined: torch.Tensor = _Joined.apply(self._anchor, self.matrix, *self.leaves)
        return joined.float()

    def train(self, rows: torch.Tensor, grads: torch.Tensor, rate: float | None = None) -> list[torch.Tensor]:
        """The gradient of every table from the gradients of distinct `rows` of the matrix; zero elsewhere."""
        grad_RD = torch.zeros_like(self.matrix.weight_RD)
        return self.matrix.split(grad_RD.index_copy_(0, rows, grads.to(grad_RD.dtype)))

    def write_back(self) -> None:
        """Nothing to do: there is no cache."""

    def weights(self) -> list[torch.Tensor]:
        """The parameters themselves."""
        return list(self.leaves)

    def states(self) -> list[dict[str, torch.Tensor]]:
        """Empty: the optimizer of the parameters keeps its state."""
        return [{} for _ in self.tables]


class _Joined(torch.autograd.Function):
    """Forward: the matrix, which shares its memory with the leaves. Backward: the gradient of each leaf."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, matrix: RowMatrix, *leaves: nn.Parameter) -> torch.Tensor:
        ctx.matrix = matrix
        return matrix.weight_RD.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.matrix.split(grads[0])
