"""Gradients of ids' weights, back to the ranks that sent them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rayrec.distributed import comm
from rayrec.distributed.ids.batch import Ids


def with_gradients(
    sent: torch.Tensor, arrived: Ids, sent_counts: Sequence[int], arrived_counts: Sequence[int], group: comm.Group
) -> torch.Tensor:
    """The received weights; backward sends their gradients to the ranks they came from, in one more exchange.

    Args:
        sent: this rank's weights `[N]` in the order sent; needs gradients.
        arrived: ids of all ranks, rank after rank.
        sent_counts, arrived_counts: ids sent to, and received from, each rank.
        group: the ranks; all of them must run backward.
    """
    if len(sent_counts) == 1:
        return sent.to(arrived.values.device)
    return _Weights.apply(sent, arrived.weights, list(sent_counts), list(arrived_counts), group)


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, arrived: torch.Tensor, *sizes: Any) -> torch.Tensor:
        ctx.sizes, ctx.like = sizes, (sent.device, sent.dtype)
        return arrived.view_as(arrived)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sent_counts, arrived_counts, group = ctx.sizes
        (grad,) = grads
        out = grad.new_empty(sum(sent_counts))
        comm.all_to_all(out, grad.contiguous(), sent_counts, arrived_counts, group)()
        # the vectors' gradients were divided by the number of ranks, which averages the tables' updates; the dense
        # parameters behind the weights are averaged by DistributedDataParallel
        return out.mul_(len(sent_counts)).to(*ctx.like), None, None, None, None
