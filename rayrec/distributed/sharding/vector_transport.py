"""How vectors get from the ranks that look them up to those that want them, and gradients back: one exchange each way.

Two autograd nodes make both exchanges overlap with other work: forward, the first one starts and the second one ends
the exchange of vectors; backward, the second one starts and the first one ends the exchange of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rayrec.distributed import comm
from rayrec.distributed.awaitable import Deferred, LazyAwaitable
from rayrec.distributed.sharding.buffers import BufferPool


@dataclass(frozen=True)
class Codec:
    """The number formats in which vectors and gradients travel."""

    forward: torch.dtype = torch.float32
    backward: torch.dtype = torch.float32


class VectorMessage(Protocol):
    """One batch's vectors: how many numbers travel, and how they lie before and after."""

    @property
    def leave(self) -> list[int]:
        """Numbers for each rank, on the way forward."""

    @property
    def come(self) -> list[int]:
        """Numbers from each rank, on the way forward."""

    def pack(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The kernels' vectors as one flat message, rank after rank."""

    def unpack(self, arrived: torch.Tensor) -> torch.Tensor:
        """The result, from the flat float32 numbers of all ranks."""

    def pack_gradients(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of what `unpack` got, averaged over ranks, from the gradient of the result."""

    def unpack_gradients(self, arrived: torch.Tensor) -> Sequence[torch.Tensor]:
        """The gradient of each of the kernels' vectors, from what arrived for `pack`'s message."""


class VectorTransport:
    """The way of one collection's vectors.

    Args:
        group: joins the ranks.
        codec: number formats on the wire.
        buffers: memory for what arrives.
    """

    def __init__(self, group: comm.Group, codec: Codec, buffers: BufferPool) -> None:
        self.group, self.codec, self._buffers = group, codec, buffers

    def start(self, parts: Sequence[torch.Tensor], message: VectorMessage) -> LazyAwaitable[torch.Tensor]:
        """Begins to send `parts`; what comes back waits for the result."""
        exchange = _Exchange(self, message)
        token = _Send.apply(exchange, *parts)
        return Deferred(lambda: _Receive.apply(token, exchange))

    def exchange(self, numbers: torch.Tensor, leave: list[int], come: list[int]) -> LazyAwaitable[torch.Tensor]:
        """Begins to exchange flat numbers; waits for those of all ranks, as float32."""
        if len(leave) == 1:
            return Deferred(lambda: numbers.float())
        arrived = self._buffers.empty(sum(come), numbers.dtype)
        wait = comm.all_to_all(arrived, numbers, come, leave, self.group)

        def finish() -> torch.Tensor:
            wait()
            return arrived.float()

        return Deferred(finish)


@dataclass
class _Exchange:
    """There and back, shared by its two autograd nodes."""

    transport: VectorTransport
    message: VectorMessage
    under_way: LazyAwaitable[torch.Tensor] | None = None

    def arrived(self) -> torch.Tensor:
        assert self.under_way is not None
        arrived, self.under_way = self.under_way.wait(), None  # its memory is used again
        return arrived


class _Send(torch.autograd.Function):
    """Forward starts the exchange of vectors; backward ends the exchange of gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, *parts: torch.Tensor) -> torch.Tensor:
        ctx.exchange, transport, form = exchange, exchange.transport, exchange.message
        numbers = form.pack(parts, transport.codec.forward)
        exchange.under_way = transport.exchange(numbers, form.leave, form.come)
        return parts[0].new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.exchange.message.unpack_gradients(ctx.exchange.arrived())


class _Receive(torch.autograd.Function):
    """Forward ends the exchange of vectors; backward starts the exchange of gradients."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.message.unpack(exchange.arrived())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        exchange = ctx.exchange
        form, transport = exchange.message, exchange.transport
        numbers = form.pack_gradients(grads[0]).to(transport.codec.backward)
        exchange.under_way = transport.exchange(numbers, form.come, form.leave)
        return grads[0].new_zeros(0), None
