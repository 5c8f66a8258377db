"""The second half of a step: pooled vectors back to the examples' ranks, and their gradients the same way in reverse.

One collective forward and one backward. Row partials of one bag are added up where they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rayrec.distributed import comm
from rayrec.distributed.awaitable import Deferred, LazyAwaitable
from rayrec.distributed.sharding.buffers import BufferPool
from rayrec.distributed.sharding.column_order import ColumnOrder
from rayrec.distributed.sharding.columns import ColumnMap


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
    factors_BE: torch.Tensor | None
    wait: comm.Wait | None = None
    arrived: torch.Tensor | None = None
    grads_wait: comm.Wait | None = None
    grads: torch.Tensor | None = None


class VectorExchange:
    """Sends each rank its examples' pooled vectors, and puts what arrives in the order of the outputs.

    Args:
        columns: which of the result's columns each rank has.
        group: joins the ranks.
        rank: of this process, among them.
        codec: number formats on the wire.
        device: where vectors lie.
    """

    def __init__(self, columns: ColumnMap, group: comm.Group, rank: int, codec: Codec, device: torch.device) -> None:
        self._group, self._rank, self._codec = group, rank, codec
        self.widths = columns.widths
        self.world = len(self.widths)
        self._buffers = BufferPool(device)
        self._order = ColumnOrder(columns, self._buffers, device)

    def start(
        self, pooled: torch.Tensor, batch_sizes: list[int], factors_BE: torch.Tensor | None
    ) -> LazyAwaitable[torch.Tensor]:
        """Begins to send `pooled [global B, own width]`; waits for `[own B, total width]`.

        Args:
            pooled: sums of this rank's lookups over the global batch, rank after rank.
            batch_sizes: examples of each rank.
            factors_BE: a factor for each of this rank's own examples and outputs, or None.
        """
        transfer = _Transfer(self, batch_sizes, factors_BE)
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
        transfer.arrived = self._buffers.empty(sum(come), message.dtype)
        transfer.wait = comm.all_to_all(transfer.arrived, message, come, leave, self._group)

    def receive(self, transfer: _Transfer) -> torch.Tensor:
        if transfer.wait is not None:
            transfer.wait()
        arrived, transfer.arrived = transfer.arrived, None
        assert arrived is not None
        return self._order.assemble(arrived.float(), transfer.batch_sizes[self._rank], transfer.factors_BE)

    def send_grads(self, grad: torch.Tensor, transfer: _Transfer) -> None:
        """Begins the way back: each rank gets the gradients of its lookups' vectors, averaged over ranks."""
        come, leave = self._elements(transfer.batch_sizes)
        message = self._order.take_apart(grad, transfer.factors_BE, 1 / self.world).to(self._codec.backward)
        if self.world == 1:
            transfer.grads = message
            return
        transfer.grads = self._buffers.empty(sum(come), message.dtype)
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
