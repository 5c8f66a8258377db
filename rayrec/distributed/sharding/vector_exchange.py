"""The second half of a step: pooled vectors back to the examples' ranks, and their gradients the same way in reverse.

One collective forward and one backward. Row partials of one bag are added up where they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from rayrec.distributed import comm
from rayrec.distributed.awaitable import Deferred, LazyAwaitable
from rayrec.distributed.sharding.pooling import BagScale
from rayrec.distributed.sharding.routing import Routes


@dataclass(frozen=True)
class Codec:
    """The number formats in which vectors and gradients travel."""

    forward: torch.dtype = torch.float32
    backward: torch.dtype = torch.float32


@dataclass
class _Transfer:
    """One exchange under way, shared by its two autograd nodes."""

    exchange: VectorExchange
    batch_sizes: list[int]
    wait: comm.Wait | None = None
    arrived: torch.Tensor | None = None
    scale: BagScale | None = None
    grads_wait: comm.Wait | None = None
    grads: torch.Tensor | None = field(default=None)


class VectorExchange:
    """Sends each rank its examples' pooled vectors, and assembles what arrives in the order of the outputs.

    Args:
        routes: of the collection.
        group: joins the ranks.
        rank: of this process.
        codec: number formats on the wire.
    """

    def __init__(self, routes: Routes, group: comm.Group, rank: int, codec: Codec) -> None:
        self._group, self._rank, self._codec = group, rank, codec
        self.world = len(routes.ranks)
        self.total_width = routes.width
        self.widths = [route.width for route in routes.ranks]
        self._runs = [route.runs for route in routes.ranks]
        pieces = [(run, rank) for rank, runs in enumerate(self._runs) for run in runs]
        places = range(len(pieces))
        self._first = sorted((p for p in places if not pieces[p][0].adds), key=lambda p: pieces[p][0].dst_col)
        self._adders = [(p, pieces[p][0]) for p in places if pieces[p][0].adds]

    def start(
        self, pooled: torch.Tensor, batch_sizes: list[int], scale: BagScale | None
    ) -> LazyAwaitable[torch.Tensor]:
        """Begins to send `pooled [global B, own width]`; waits for `[own B, total width]`.

        Args:
            pooled: sums of this rank's lookups over the global batch, rank after rank.
            batch_sizes: examples of each rank.
            scale: factors for this rank's own bags, or None.
        """
        transfer = _Transfer(self, batch_sizes, scale=scale)
        token = _Send.apply(pooled, transfer)
        return Deferred(lambda: _Receive.apply(token, transfer))

    def _elements(self, batch_sizes: Sequence[int]) -> tuple[list[int], list[int]]:
        """(elements that leave to each rank, elements that come from each rank) on the way forward."""
        mine = batch_sizes[self._rank]
        return [b * self.widths[self._rank] for b in batch_sizes], [mine * width for width in self.widths]

    def send(self, pooled: torch.Tensor, transfer: _Transfer) -> None:
        leave, come = self._elements(transfer.batch_sizes)
        message = pooled.to(self._codec.forward).reshape(-1)
        if self.world == 1:
            transfer.arrived = message
            return
        transfer.arrived = message.new_empty(sum(come))
        transfer.wait = comm.all_to_all(transfer.arrived, message, come, leave, self._group)

    def receive(self, transfer: _Transfer) -> torch.Tensor:
        if transfer.wait is not None:
            transfer.wait()
        arrived, transfer.arrived = transfer.arrived, None
        assert arrived is not None
        out = self._assemble(arrived.float(), transfer.batch_sizes[self._rank])
        return out if transfer.scale is None else transfer.scale.times(out)

    def _assemble(self, arrived: torch.Tensor, batch: int) -> torch.Tensor:
        starts = [0, *accumulate(batch * width for width in self.widths)]
        pieces: list[torch.Tensor] = []
        for runs, width, a, b in zip(self._runs, self.widths, starts, starts[1:], strict=False):
            if runs:
                pieces += arrived[a:b].view(batch, width).split([run.width for run in runs], dim=1)
        out = torch.cat([pieces[place] for place in self._first], dim=1)
        for place, run in self._adders:
            out[:, run.dst_col : run.dst_col + run.width] += pieces[place]
        return out

    def send_grads(self, grad: torch.Tensor, transfer: _Transfer) -> None:
        """Begins the way back: each rank gets the gradients of its lookups' vectors, averaged over ranks."""
        come, leave = self._elements(transfer.batch_sizes)
        batch = transfer.batch_sizes[self._rank]
        if transfer.scale is not None:
            grad = transfer.scale.times(grad.contiguous(), 1 / self.world)
        message = grad.new_empty(sum(leave))
        starts = [0, *accumulate(leave)]
        for runs, width, a, b in zip(self._runs, self.widths, starts, starts[1:], strict=False):
            if runs:
                slices = [grad[:, run.dst_col : run.dst_col + run.width] for run in runs]
                torch.cat(slices, dim=1, out=message[a:b].view(batch, width))
        if transfer.scale is None and self.world > 1:
            message.mul_(1 / self.world)
        message = message.to(self._codec.backward)
        if self.world == 1:
            transfer.grads = message
            return
        transfer.grads = message.new_empty(sum(come))
        transfer.grads_wait = comm.all_to_all(transfer.grads, message, come, leave, self._group)

    def receive_grads(self, transfer: _Transfer) -> torch.Tensor:
        if transfer.grads_wait is not None:
            transfer.grads_wait()
        grads, transfer.grads = transfer.grads, None
        assert grads is not None
        return grads.float().view(sum(transfer.batch_sizes), self.widths[self._rank])


class _Send(torch.autograd.Function):
    """Forward starts the exchange of vectors; backward ends the exchange of gradients."""

    @staticmethod
    def forward(ctx: Any, pooled: torch.Tensor, transfer: _Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        transfer.exchange.send(pooled, transfer)
        return pooled.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.transfer.exchange.receive_grads(ctx.transfer), None


class _Receive(torch.autograd.Function):
    """Forward ends the exchange of vectors; backward starts the exchange of gradients."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, transfer: _Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        return transfer.exchange.receive(transfer)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.transfer.exchange.send_grads(grads[0], ctx.transfer)
        return grads[0].new_zeros(0), None
