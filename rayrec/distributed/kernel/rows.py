"""Lookups and row updates in plain tensor operations.

For what fbgemm's kernels cannot do: optimizers that they do not train on a CPU, and replicated tables, whose gradient
rows must meet between backward and update. One group holds tables of one width, in one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from rayrec.distributed.kernel import updates
from rayrec.distributed.kernel.tables import LocalTable, Lookups


def sum_duplicates(
    rows: torch.Tensor,
    source: torch.Tensor,
    grads: torch.Tensor,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds up the gradients of equal rows, always in the same order.

    Args:
        rows: int64 `[N]`.
        source: int64 `[N]`, which row of `grads` belongs to each.
        grads: `[M, D]`.
        weights: `[N]` factors, or None.

    Returns:
        The distinct rows ascending `[n]`, and their summed gradients `[n, D]`.
    """
    ordered, order = torch.sort(rows, stable=True)
    distinct, counts = torch.unique_consecutive(ordered, return_counts=True)
    if distinct.numel() == 0:
        return distinct, grads.new_zeros(0, grads.shape[1])
    starts = counts.cumsum(0) - counts
    factors = None if weights is None else weights[order]
    return distinct, F.embedding_bag(source[order], grads, starts, mode="sum", per_sample_weights=factors)


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
        self.count = 0
        self._starts = [0, *accumulate(table.rows.size for table in self.tables)]
        self._first_row = torch.tensor([self._starts[t] for t in table_of_lookup], device=device)
        self.weight_RD = torch.zeros(self._starts[-1], self.dim, dtype=first.config.data_type.dtype, device=device)
        self.state = updates.make_state(self.spec, self._starts[-1], self.dim, device)
        # autograd needs something to differentiate with respect to; the update is the real product of backward
        self._anchor = torch.zeros(0, device=device, requires_grad=True)

    @property
    def num_lookups(self) -> int:
        return self._first_row.numel()

    def pooled(self, lookups: Lookups) -> torch.Tensor:
        return _Pooled.apply(self._anchor, self, lookups.ids, lookups.offsets, lookups.weights)

    def bags(self, lookups: Lookups) -> tuple[torch.Tensor, torch.Tensor]:
        """(`[B, L * D]` sums, int64 `[N]` rows of the matrix that were read)."""
        offsets = lookups.offsets.to(torch.int64)
        num_bags = offsets.numel() - 1
        per_lookup = num_bags // self.num_lookups
        bounds = offsets[torch.arange(0, num_bags + 1, max(per_lookup, 1), device=offsets.device)]
        counts = bounds[1:] - bounds[:-1] if per_lookup else offsets.new_zeros(self.num_lookups)
        rows = lookups.ids.to(torch.int64) + self._first_row.repeat_interleave(counts, output_size=lookups.ids.numel())
        weights = None if lookups.weights is None else lookups.weights.to(self.weight_RD.dtype)
        out = F.embedding_bag(
            rows, self.weight_RD, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )
        width = self.num_lookups * self.dim
        return out.float().view(self.num_lookups, per_lookup, self.dim).transpose(0, 1).reshape(per_lookup, width), rows

    def row_gradients(
        self, rows: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The distinct rows that were read and the gradient of each, from the gradient of the bags `[B, L * D]`."""
        bag_of_id = _bag_of_id(offsets, rows.numel())
        return sum_duplicates(rows, bag_of_id, self._by_bag(grad), weights)

    def weight_gradients(self, rows: torch.Tensor, offsets: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of each id's weight `[N]`."""
        bags = self._by_bag(grad)[_bag_of_id(offsets, rows.numel())]
        return (bags * self.weight_RD[rows].float()).sum(1)

    def _by_bag(self, grad: torch.Tensor) -> torch.Tensor:
        batch = grad.shape[0]
        return grad.view(batch, self.num_lookups, self.dim).transpose(0, 1).reshape(-1, self.dim)

    def update(self, rows: torch.Tensor, grads: torch.Tensor) -> None:
        """Applies the optimizer to distinct `rows` of the matrix."""
        self.count += 1
        weight = self.weight_RD[rows].float()
        step = updates.Step(rows, weight, grads.float(), self.state, self.spec, self.learning_rate, self.count)
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
        ids: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        out, rows = kernel.bags(Lookups(ids, offsets, weights))
        ctx.kernel, ctx.weighted = kernel, weights is not None
        ctx.save_for_backward(rows, offsets, *([weights] if weights is not None else []))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        rows, offsets, *rest = ctx.saved_tensors
        weights = rest[0] if ctx.weighted else None
        kernel: RowKernel = ctx.kernel
        weight_grad = kernel.weight_gradients(rows, offsets, grad) if ctx.needs_input_grad[4] else None
        kernel.update(*kernel.row_gradients(rows, offsets, weights, grad))
        return None, None, None, None, weight_grad
