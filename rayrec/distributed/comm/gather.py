"""Rows of all ranks, with their gradient."""

from typing import Any

import torch

from rayrec.distributed.comm.collectives import Group, all_gather, all_to_all, alone


def gather_rows(rows: torch.Tensor, counts: list[int], group: Group) -> torch.Tensor:
    """`[sum of counts, D]`: every rank's rows, in rank order. Backward gives each rank the sum of its rows' gradients.

    Every rank calls it, and its backward, also a rank without rows.

    Args:
        rows: `[N, D]`, N may differ between ranks.
        counts: N of each rank.
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
        return torch.cat([part[:count] for part, count in zip(all_gather(padded, group), counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        own, world = ctx.counts[ctx.group.rank()], len(ctx.counts)
        grad = grads[0].contiguous()
        arrived = grad.new_empty(world * own, *grad.shape[1:])
        all_to_all(arrived, grad, [own] * world, ctx.counts, ctx.group)()
        return arrived.view(world, own, *grad.shape[1:]).sum(0), None, None
