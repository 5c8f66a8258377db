"""Tables whose gradients go to an optimizer of the user's: their shards are parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rayrec.distributed.kernel.interface import LocalTable, Lookups
from rayrec.distributed.kernel.row_kernel import RowMatrix, make_anchor


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
        self.learning_rate = None  # the optimizer has it
        self.leaves = [nn.Parameter(part) for part in self.matrix.split(self.matrix.weight_RD)]
        self._anchor = make_anchor(device)

    def __repr__(self) -> str:
        return f"DenseKernel({[table.config.name for table in self.tables]})"

    def pooled(self, lookups: Lookups) -> torch.Tensor:
        of_rows = self.matrix.row_lookups(lookups)
        return self.matrix.look_up(of_rows.ids, of_rows.offsets, of_rows.weights, self._joined())

    def vectors(self, lookups: Lookups) -> torch.Tensor:
        return self.matrix.look_up(self.matrix.row_lookups(lookups).ids, weight_RD=self._joined())

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
