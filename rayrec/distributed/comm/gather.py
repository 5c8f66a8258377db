"""A differentiable gather of rows."""

from typing import Any

import torch

from rayrec.distributed.comm.collectives import Group, all_gather, all_to_all, alone


def gather_rows(rows: torch.Tensor, counts: list[int], group: Group) -> torch.Tensor:
    """Concatenates every rank's rows in rank order: `[sum of counts, D]`. Backward sums the gradients of each rank's
    rows.

    Every rank calls it and its backward, even without rows.

    Args:
        rows: `[N, D]`; N may differ between ranks.
        counts: N of each rank.
        group: Process group of the ranks.
    """
    if alone(group):
        return rows
    gathered: torch.Tensor = _Gather.apply(rows, counts, group)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: list[int], group: Group) -> torch.Tensor:
        ctx.counts, ctx.group = counts, group
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        return torch.cat(
            [padded_rows[:count] for padded_rows, count in zip(all_gather(padded, group), counts, strict=True)]
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        num_rows, world = ctx.counts[ctx.group.rank()], len(ctx.counts)
        grad = grads[0].contiguous()
        received = grad.new_empty(world * num_rows, *grad.shape[1:])
        all_to_all(received, grad, [num_rows] * world, ctx.counts, ctx.group)()
        return received.view(world, num_rows, *grad.shape[1:]).sum(0), None, None
