"""The way back of the gradients of per-id weights, from the ranks that look ids up to the ranks that brought them.

The weights themselves travel with the ids; see `id_exchange`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rayrec.distributed import comm


def with_way_back(
    sent: torch.Tensor,
    arrived: torch.Tensor,
    sent_counts: Sequence[int],
    arrived_counts: Sequence[int],
    group: comm.Group,
) -> torch.Tensor:
    """The arrived weights, whose gradients backward sends to the ranks they came from: one more exchange.

    Args:
        sent: this rank's weights `[N]` in the order sent; needs gradients.
        arrived: weights `[M]` of all ranks, rank after rank.
        sent_counts, arrived_counts: how many went to, and came from, each rank.
        group: the ranks; all of them must run backward.
    """
    return _WayBack.apply(sent, arrived, list(sent_counts), list(arrived_counts), group)


class _WayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, arrived: torch.Tensor, *way: Any) -> torch.Tensor:
        ctx.way, ctx.like = way, (sent.device, sent.dtype)
        return arrived.view_as(arrived)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sent_counts, arrived_counts, group = ctx.way
        (grad,) = grads
        out = grad.new_empty(sum(sent_counts))
        comm.all_to_all(out, grad.contiguous(), sent_counts, arrived_counts, group)()
        # the vectors' gradients came divided by the number of ranks, which averages the tables' updates; the dense
        # parameters behind the weights are averaged by their own means
        return out.mul_(len(sent_counts)).to(*ctx.like), None, None, None, None
