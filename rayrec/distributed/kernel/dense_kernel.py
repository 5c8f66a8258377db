"""Tables that the user's optimizer trains: their shards are parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rayrec.distributed.kernel.local_table import LocalTable, Lookups
from rayrec.distributed.kernel.row_kernel import make_anchor
from rayrec.distributed.kernel.rows import DistinctRows, RowMatrix, TouchedRows


class DenseKernel:
    """Tables of one width and data type, each a leaf parameter that has a dense gradient after backward.

    fbgemm's dense kernel keeps all tables in one flat parameter. Here each rectangle is a parameter over the memory of
    one matrix, so a lookup is still one operator.

    Args:
        tables: The rectangles.
        table_of_lookup: Index in `tables` of each lookup's table.
        device: Device of the tables.
        pooled: Whether a lookup returns bags, or the vector of each id.
    """

    def __init__(
        self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device, pooled: bool = True
    ) -> None:
        self.tables = list(tables)
        self.matrix = RowMatrix(tables, table_of_lookup, device)
        # The user's optimizer keeps the learning rate and the count.
        self.learning_rate, self.iteration = 0.0, 0
        self.touched: TouchedRows | None = None
        self.changed: TouchedRows | None = None
        self.table_of_lookup = list(table_of_lookup)
        self.leaves = [nn.Parameter(weight) for weight in self.matrix.split(self.matrix.weight_RD)]
        self._anchor = make_anchor(device)
        self._pooled = pooled

    def __repr__(self) -> str:
        return f"DenseKernel({[table.config.name for table in self.tables]})"

    def lookup(self, lookups: Lookups) -> torch.Tensor:
        by_row = self.matrix.row_lookups(lookups)
        if self._pooled:
            return self.matrix.look_up(by_row.ids, by_row.offsets, by_row.weights, self._joined())
        return self.matrix.look_up(by_row.ids, weight_RD=self._joined())

    def _joined(self) -> torch.Tensor:
        """The matrix in float32, the type in which bags and gradients are summed."""
        joined: torch.Tensor = _Joined.apply(self._anchor, self.matrix, *self.leaves)
        return joined.float()

    def train(self, rows: torch.Tensor, grads: torch.Tensor, rate: float = 0.0) -> list[torch.Tensor]:
        """The dense gradient of each table, from the gradients of distinct `rows` of the matrix."""
        grad_RD = torch.zeros_like(self.matrix.weight_RD)
        return self.matrix.split(grad_RD.index_copy_(0, rows, grads.to(grad_RD.dtype)))

    def train_all(
        self, rows: torch.Tensor, grads: torch.Tensor, rate: float = 0.0, distinct: bool = False
    ) -> list[torch.Tensor]:
        """As `train`, for rows that may repeat unless `distinct`."""
        if distinct:
            return self.train(rows, grads)
        groups = DistinctRows.of(rows, self.matrix.num_rows)
        return self.train(groups.distinct, groups.sum(grads))

    def write_back(self) -> None:
        """Does nothing: there is no cache."""

    def weights(self) -> list[torch.Tensor]:
        """The parameters themselves."""
        return list(self.leaves)

    def states(self) -> list[dict[str, torch.Tensor]]:
        """Empty dicts: the user's optimizer keeps its state."""
        return [{} for _ in self.tables]


class _Joined(torch.autograd.Function):
    """Forward returns the matrix, which shares its memory with the leaves; backward the gradient of each leaf."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, matrix: RowMatrix, *leaves: nn.Parameter) -> torch.Tensor:
        ctx.matrix = matrix
        return matrix.weight_RD.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.matrix.split(grads[0])
