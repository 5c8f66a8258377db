"""Lookups and row updates in plain tensor operations.

For what fbgemm's kernels cannot do: optimizers that they do not train on a CPU, and replicated tables, whose gradient
rows must meet between backward and update. One group holds tables of one width, in one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from rayrec.distributed.kernel import updates
from rayrec.distributed.kernel.tables import LocalTable, Lookups


@dataclass(frozen=True)
class RowGroups:
    """Which of N row numbers are the same row; `distinct [n]` ascending."""

    distinct: torch.Tensor
    order: torch.Tensor  # [N], equal rows side by side
    starts: torch.Tensor  # [n], where each row's run begins in `order`

    @classmethod
    def of(cls, rows: torch.Tensor) -> RowGroups:
        """From int64 `[N]`."""
        ordered, order = torch.sort(rows, stable=True)
        distinct, counts = torch.unique_consecutive(ordered, return_counts=True)
        return cls(distinct, order, counts.cumsum(0) - counts)

    def sum(
        self, grads: torch.Tensor, source: torch.Tensor | None = None, factors: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`[n, D]`: the gradients of equal rows added up, always in the same order.

        Args:
            grads: `[M, D]`.
            source: int64 `[N]`, the row of `grads` that belongs to each; by default one after the other.
            factors: `[N]`, or None.
        """
        if self.distinct.numel() == 0:
            return grads.new_zeros(0, grads.shape[1])
        picked = self.order if source is None else source[self.order]
        weights = None if factors is None else factors[self.order]
        return F.embedding_bag(picked, grads, self.starts, mode="sum", per_sample_weights=weights)


class RowKernel:
    """Tables of one width, dtype and optimizer as one matrix, updated row by row.

    Args:
        tables: the rectangles.
        table_of_lookup: for each lookup, the place of its table in `tables`.
        device: where they lie.
    """

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        self.tables = list(tables)
        first = self.tables[0]
        self.spec = first.optimizer
        self.learning_rate = self.spec.learning_rate
        self.dim = first.cols.size
        self.iteration = 0
        self._starts = [0, *accumulate(table.rows.size for table in self.tables)]
        self._first_row = torch.tensor([self._starts[t] for t in table_of_lookup], device=device)
        self.weight_RD = torch.zeros(self._starts[-1], self.dim, dtype=first.config.data_type.dtype, device=device)
        self.state = updates.make_state(self.spec, self._starts[-1], self.dim, device)
        # autograd needs something to differentiate with respect to; the update is the real product of backward
        self._anchor = torch.zeros(0, device=device, requires_grad=True)

    @property
    def num_lookups(self) -> int:
        return self._first_row.numel()

    def __repr__(self) -> str:
        return f"RowKernel({[table.config.name for table in self.tables]}, {self.tables[0].optimizer})"

    def pooled(self, lookups: Lookups) -> torch.Tensor:
        num_bags = lookups.offsets.numel() - 1
        lengths_LB = (lookups.offsets[1:] - lookups.offsets[:-1]).view(self.num_lookups, num_bags // self.num_lookups)
        rows = self.matrix_rows(lookups.ids, lengths_LB)
        return _Pooled.apply(self._anchor, self, rows, lookups.offsets.to(torch.int64), lookups.weights)

    def vectors(self, lookups: Lookups) -> torch.Tensor:
        lengths_LB = (lookups.offsets[1:] - lookups.offsets[:-1]).view(self.num_lookups, -1)
        return _Vectors.apply(self._anchor, self, self.matrix_rows(lookups.ids, lengths_LB))

    def matrix_rows(self, ids: torch.Tensor, lengths_LB: torch.Tensor) -> torch.Tensor:
        """int64 `[N]`: each id's row of the matrix that holds all tables."""
        counts = lengths_LB.sum(1, dtype=torch.int64)
        return ids.to(torch.int64) + self._first_row.repeat_interleave(counts, output_size=ids.numel())

    def bags(self, lookups: Lookups) -> torch.Tensor:
        """`[B, L * D]` sums; ids are rows of the matrix."""
        weights = None if lookups.weights is None else lookups.weights.to(self.weight_RD.dtype)
        out = F.embedding_bag(
            lookups.ids,
            self.weight_RD,
            lookups.offsets,
            mode="sum",
            per_sample_weights=weights,
            include_last_offset=True,
        )
        batch = out.shape[0] // self.num_lookups
        by_example = out.float().view(self.num_lookups, batch, self.dim).transpose(0, 1)
        return by_example.reshape(batch, self.num_lookups * self.dim)

    def row_gradients(
        self, groups: RowGroups, offsets: torch.Tensor, weights: torch.Tensor | None, grad: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of each distinct row, from the gradient of the bags `[B, L * D]`."""
        return groups.sum(self._by_bag(grad), _bag_of_id(offsets, groups.order.numel()), weights)

    def weight_gradients(self, lookups: Lookups, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of each id's weight `[N]`; ids are rows of the matrix."""
        bags = self._by_bag(grad)[_bag_of_id(lookups.offsets, lookups.ids.numel())]
        return (bags * self.weight_RD[lookups.ids].float()).sum(1)

    def _by_bag(self, grad: torch.Tensor) -> torch.Tensor:
        batch = grad.shape[0]
        return grad.view(batch, self.num_lookups, self.dim).transpose(0, 1).reshape(-1, self.dim)

    def update(self, rows: torch.Tensor, grads: torch.Tensor) -> None:
        """Applies the optimizer to distinct `rows` of the matrix."""
        self.iteration += 1
        weight = self.weight_RD[rows].float()
        step = updates.Step(rows, weight, grads.float(), self.state, self.spec, self.learning_rate, self.iteration)
        updates.apply(self.weight_RD, step)

    def weights(self) -> list[torch.Tensor]:
        return list(self.weight_RD.split([table.rows.size for table in self.tables]))

    def states(self) -> list[dict[str, torch.Tensor]]:
        spans = list(zip(self._starts, self._starts[1:], strict=False))
        return [{name: whole[a:b] for name, whole in self.state.items()} for a, b in spans]


def _bag_of_id(offsets: torch.Tensor, num_ids: int) -> torch.Tensor:
    lengths = offsets[1:] - offsets[:-1]
    return torch.arange(lengths.numel(), device=offsets.device).repeat_interleave(lengths, output_size=num_ids)


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
        ctx.kernel, ctx.lookups = kernel, Lookups(rows, offsets, weights)
        return kernel.bags(ctx.lookups)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        kernel: RowKernel = ctx.kernel
        lookups: Lookups = ctx.lookups
        weight_grad = kernel.weight_gradients(lookups, grad) if ctx.needs_input_grad[4] else None
        groups = RowGroups.of(lookups.ids)
        kernel.update(groups.distinct, kernel.row_gradients(groups, lookups.offsets, lookups.weights, grad))
        return None, None, None, None, weight_grad


class _Vectors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, kernel: RowKernel, rows: torch.Tensor) -> torch.Tensor:
        ctx.kernel, ctx.rows = kernel, rows
        return F.embedding(rows, kernel.weight_RD).float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        groups = RowGroups.of(ctx.rows)
        ctx.kernel.update(groups.distinct, groups.sum(grads[0].contiguous()))
        return None, None, None
