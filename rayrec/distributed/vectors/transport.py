"""How vectors get from the ranks that look them up to those that want them, and gradients back: one exchange each way,
or a few where so much would arrive at once that memory matters; never more than two are then under way.

Two autograd nodes make exchanges overlap with other work: forward, the first one starts and the second one ends the
exchange of vectors; backward, the second one starts and the first one ends the exchange of gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rayrec.distributed import comm
from rayrec.distributed.comm.awaitable import Deferred, LazyAwaitable
from rayrec.distributed.comm.buffers import BufferPool
from rayrec.distributed.comm.wire import Codec, NumberFormat
from rayrec.distributed.kernel.number_formats import decode, encode, message_dtype


class VectorMessage(Protocol):
    """One batch's vectors: how many numbers travel, and how they lie before and after. It travels in pieces, equally
    many on all ranks."""

    @property
    def num_pieces(self) -> int: ...

    @property
    def gathered(self) -> bool:
        """Whether every rank wants the same gradients of this one: they are gathered, in one piece."""

    def leave(self, piece: int) -> list[int]:
        """Numbers for each rank, on the way forward."""

    def come(self, piece: int) -> list[int]:
        """Numbers from each rank, on the way forward."""

    def pack(self, parts: Sequence[torch.Tensor], piece: int) -> torch.Tensor:
        """The kernels' vectors as one flat message, rank after rank, float32."""

    def unpack(self, arrived: torch.Tensor, piece: int) -> torch.Tensor:
        """The result's rows, from the flat float32 numbers of all ranks."""

    def pack_gradients(self, grad: torch.Tensor, piece: int) -> torch.Tensor:
        """The gradient of what `unpack` got, from the gradient of the result, which lies in one piece."""

    def unpack_gradients(
        self, arrived: torch.Tensor, piece: int, shapes: Sequence[torch.Size], grads: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """The gradient of each of the kernels' vectors, with what arrived for a piece of `pack`'s message.

        Args:
            shapes: of the vectors.
            grads: what the call for the last piece gave; of the first piece nothing.
        """


class VectorTransport:
    """The way of one collection's vectors.

    Args:
        group: joins the ranks.
        codec: number formats on the wire.
        buffers: memory for what arrives.
    """

    def __init__(self, group: comm.Group, codec: Codec, buffers: BufferPool) -> None:
        self.group, self.codec, self._buffers = group, codec, buffers
        self._size = 1 if group is None else group.size()

    def start(self, parts: Sequence[torch.Tensor], message: VectorMessage) -> LazyAwaitable[torch.Tensor]:
        """Begins to send `parts`; what comes back waits for the result."""
        exchange = _Exchange(self, message)
        token = _Send.apply(exchange, *parts)
        return Deferred(lambda: _Receive.apply(token, exchange))

    def exchange(
        self, numbers: torch.Tensor, leave: list[int], come: list[int], kind: NumberFormat
    ) -> LazyAwaitable[torch.Tensor]:
        """Begins to exchange flat numbers; waits for those of all ranks, as float32."""
        if len(leave) == 1:
            return Deferred(lambda: numbers)
        message = encode(kind, numbers, leave)
        sizes_out, sizes_in = kind.sizes(leave), kind.sizes(come)
        arrived = self._buffers.empty(sum(sizes_in), message_dtype(kind))
        wait = comm.all_to_all(arrived, message, sizes_in, sizes_out, self.group)

        def finish() -> torch.Tensor:
            wait()
            return decode(kind, arrived, come)

        return Deferred(finish)

    def gather(self, numbers: torch.Tensor, kind: NumberFormat) -> LazyAwaitable[torch.Tensor]:
        """Begins to send every rank the same numbers; as `exchange`."""
        sizes = [numbers.numel()] * self._size
        arrived = comm.all_gather(encode(kind, numbers, sizes[:1]), self.group).view(-1)
        return Deferred(lambda: decode(kind, arrived, sizes))

    def averaged(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient's share in the mean over ranks, in one piece, as large as it travels."""
        scale = self.codec.backward_scale / self._size
        if scale == 1 and grad.is_contiguous():
            return grad
        return torch.mul(grad, scale, out=self._buffers.empty(grad.numel(), grad.dtype).view(grad.shape))


@dataclass
class _Exchange:
    """There and back, shared by its two autograd nodes."""

    transport: VectorTransport
    message: VectorMessage
    unsent: Sequence[torch.Tensor] = ()  # vectors, or gradients, of which pieces are still to be sent
    under_way: deque[LazyAwaitable[torch.Tensor]] = field(default_factory=deque)

    def send(self, piece: int, forward: bool) -> None:
        """Begins to send a piece, if there is one of that number."""
        message, transport, codec = self.message, self.transport, self.transport.codec
        if piece < self.num_pieces(forward):
            leave, come = message.leave(piece), message.come(piece)
            if forward:
                numbers = _scaled(message.pack(self.unsent, piece), codec.forward_scale)
                under_way = transport.exchange(numbers, leave, come, codec.forward)
            else:
                numbers, kind = message.pack_gradients(self.unsent[0], piece), codec.backward
                gather, exchange = transport.gather, transport.exchange
                under_way = gather(numbers, kind) if message.gathered else exchange(numbers, come, leave, kind)
            self.under_way.append(under_way)
        if piece >= self.num_pieces(forward) - 1:
            self.unsent = ()

    def begin(self, tensors: Sequence[torch.Tensor], forward: bool) -> None:
        self.unsent = tensors
        self.send(0, forward)
        self.send(1, forward)

    def num_pieces(self, forward: bool) -> int:
        return 1 if self.message.gathered and not forward else self.message.num_pieces

    def arrived(self, piece: int, forward: bool) -> torch.Tensor:
        """Waits for a piece, and begins to send another one."""
        numbers = self.under_way.popleft().wait()  # nobody else holds it: its memory is used again
        self.send(piece + 2, forward)
        codec = self.transport.codec
        return _scaled(numbers, 1 / (codec.forward_scale if forward else codec.backward_scale))


def _scaled(numbers: torch.Tensor, scale: float) -> torch.Tensor:
    return numbers if scale == 1.0 else numbers * scale


class _Send(torch.autograd.Function):
    """Forward starts the exchange of vectors; backward ends the exchange of gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, *parts: torch.Tensor) -> torch.Tensor:
        ctx.exchange, ctx.shapes = exchange, [part.shape for part in parts]
        exchange.begin(parts, forward=True)
        return parts[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        message, grads = ctx.exchange.message, ()
        for piece in range(ctx.exchange.num_pieces(forward=False)):
            grads = message.unpack_gradients(ctx.exchange.arrived(piece, forward=False), piece, ctx.shapes, grads)
        return None, *grads


class _Receive(torch.autograd.Function):
    """Forward ends the exchange of vectors; backward starts the exchange of gradients."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange, message = exchange, exchange.message
        rows = [message.unpack(exchange.arrived(piece, forward=True), piece) for piece in range(message.num_pieces)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.exchange.begin([ctx.exchange.transport.averaged(grads[0])], forward=False)
        return grads[0].new_empty(0), None
