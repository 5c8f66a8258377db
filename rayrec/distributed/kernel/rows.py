"""Row updates inside backward, in plain tensor operations.

For what fbgemm's kernels cannot do: optimizers that they do not train on a CPU, and replicated tables, whose gradient
rows must meet between backward and update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rayrec.distributed.kernel import lookup, updates
from rayrec.distributed.kernel.matrix import RowMatrix
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
        self.state = updates.make_state(self.spec, rows, dim, device)
        self._anchor = lookup.make_anchor(device)

    def __repr__(self) -> str:
        return f"RowKernel({[table.config.name for table in self.tables]}, {self.spec})"

    def pooled(self, lookups: Lookups) -> torch.Tensor:
        return lookup.pooled(self, self._anchor, lookups)

    def vectors(self, lookups: Lookups) -> torch.Tensor:
        return lookup.vectors(self, self._anchor, lookups)

    def train(self, rows: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Applies the optimizer to distinct `rows` of the matrix."""
        self.iteration += 1
        weight_RD = self.matrix.weight_RD
        weight_nD = weight_RD[rows].float()
        step = updates.Step(rows, weight_nD, grads.float(), self.state, self.spec, self.learning_rate, self.iteration)
        updates.apply(weight_RD, step)
        return ()

    def weights(self) -> list[torch.Tensor]:
        return self.matrix.split(self.matrix.weight_RD)

    def states(self) -> list[dict[str, torch.Tensor]]:
        parts = {name: self.matrix.split(whole) for name, whole in self.state.items()}
        return [{name: pieces[place] for name, pieces in parts.items()} for place in range(len(self.tables))]
