"""Vectors to the ranks that asked for them, and gradients back: one exchange each way, or a few where so much would
arrive at once that memory matters; never more than two are then under way.

Two autograd nodes make exchanges overlap with other work: forward, the first one begins and the second one ends the
exchange of vectors; backward, the second one begins and the first one ends the exchange of gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from rayrec.distributed import comm
from rayrec.distributed.comm.wire import FP32, Codec
from rayrec.distributed.kernel.number_formats import decode, encode, message_dtype


class VectorMessage(Protocol):
    """One batch's vectors: how many numbers travel, and their layout before and after. It travels in pieces, equally
    many on all ranks.

    Attributes:
        sent, received: for each piece the numbers for, and from, each rank on the way forward.
        gathered: every rank wants the same gradients of this one: they are gathered, in one piece.
    """

    sent: list[list[int]]
    received: list[list[int]]
    gathered: bool

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
            grads: what the call for the last piece returned; of the first piece nothing.
        """


class RoundTrip(Protocol):
    """A batch's vectors to the ranks that asked for them, and their gradients back."""

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """Begins to send the kernels' vectors."""

    def receive(self) -> torch.Tensor:
        """Waits for the result's rows."""

    def send_gradients(self, grad: torch.Tensor) -> None:
        """Begins to send this rank's share in the mean of all ranks' gradients of the result."""

    def receive_gradients(self, shapes: Sequence[torch.Size]) -> Sequence[torch.Tensor]:
        """Waits for the gradients of the kernels' vectors, of these shapes."""


def begin(trip: RoundTrip, parts: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Begins to send `parts`; the function that it returns waits for the result."""
    token = _Send.apply(trip, *parts)
    return partial(_Receive.apply, token, trip)


class VectorTransport:
    """The way of one collection's vectors.

    Args:
        group: joins the ranks.
        codec: number formats on the wire.
    """

    def __init__(self, group: comm.Group, codec: Codec) -> None:
        self.group, self.codec = group, codec
        self.world_size = 1 if group is None else group.size()

    def start(self, parts: Sequence[torch.Tensor], message: VectorMessage) -> Callable[[], torch.Tensor]:
        """As `begin`."""
        return begin(_MessageTrip(self, message), parts)


@dataclass
class _MessageTrip:
    """See `RoundTrip`; by collectives, as flat messages."""

    transport: VectorTransport
    message: VectorMessage
    _unsent: Sequence[torch.Tensor] = ()  # vectors, or gradients, of which pieces are still to be sent
    _under_way: deque[tuple[torch.Tensor, comm.Wait | None, list[int]]] = field(default_factory=deque)

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        self._begin(parts, forward=True)

    def receive(self) -> torch.Tensor:
        message = self.message
        rows = [message.unpack(self._end(piece, forward=True), piece) for piece in range(len(message.sent))]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def send_gradients(self, grad: torch.Tensor) -> None:
        scale = self.transport.codec.backward_scale / self.transport.world_size
        if scale != 1 or not grad.is_contiguous():
            grad = torch.mul(grad, scale, out=torch.empty(grad.shape, dtype=grad.dtype, device=grad.device))
        self._begin([grad], forward=False)

    def receive_gradients(self, shapes: Sequence[torch.Size]) -> Sequence[torch.Tensor]:
        message = self.message
        grads: Sequence[torch.Tensor] = ()
        for piece in range(1 if message.gathered else len(message.sent)):
            grads = message.unpack_gradients(self._end(piece, forward=False), piece, shapes, grads)
        return grads

    def _begin(self, tensors: Sequence[torch.Tensor], forward: bool, pieces: Sequence[int] = (0, 1)) -> None:
        """Begins to send pieces of `tensors`, those that there are."""
        transport, message, codec = self.transport, self.message, self.transport.codec
        last = 0 if message.gathered and not forward else len(message.sent) - 1
        kind = codec.forward if forward else codec.backward
        for piece in pieces:
            if piece > last:
                continue
            sent, received = message.sent[piece], message.received[piece]
            if forward:
                numbers = message.pack(tensors, piece)
                if codec.forward_scale != 1:
                    numbers = numbers * codec.forward_scale
            else:
                numbers, sent, received = message.pack_gradients(tensors[0], piece), received, sent
            if transport.world_size == 1:
                self._under_way.append((numbers, None, received))
            elif message.gathered and not forward:
                received = [numbers.numel()] * transport.world_size
                coded = numbers if kind is FP32 else encode(kind, numbers, received[:1])
                self._under_way.append((comm.all_gather(coded, transport.group).view(-1), None, received))
            else:
                coded = numbers if kind is FP32 else encode(kind, numbers, sent)
                sizes_out, sizes_in = (sent, received) if kind is FP32 else (kind.sizes(sent), kind.sizes(received))
                dtype = torch.float32 if kind is FP32 else message_dtype(kind)
                arrived = coded.new_empty(sum(sizes_in), dtype=dtype)
                wait = comm.all_to_all(arrived, coded, sizes_in, sizes_out, transport.group)
                self._under_way.append((arrived, wait, received))
        self._unsent = tensors if pieces[-1] < last else ()

    def _end(self, piece: int, forward: bool) -> torch.Tensor:
        """Waits for a piece, begins to send another one, and returns the numbers that arrived, as float32."""
        arrived, wait, sizes = self._under_way.popleft()  # nothing else refers to it: its memory is used again
        if wait is not None:
            wait()
        if self._unsent:
            self._begin(self._unsent, forward, [piece + 2])
        codec = self.transport.codec
        kind, scale = (codec.forward, codec.forward_scale) if forward else (codec.backward, codec.backward_scale)
        numbers = arrived if kind is FP32 or self.transport.world_size == 1 else decode(kind, arrived, sizes)
        return numbers if scale == 1 else numbers * (1 / scale)


class _Send(torch.autograd.Function):
    """Forward begins the exchange of vectors; backward ends the exchange of gradients."""

    @staticmethod
    def forward(ctx: Any, trip: RoundTrip, *parts: torch.Tensor) -> torch.Tensor:
        ctx.trip, ctx.shapes = trip, [part.shape for part in parts]
        trip.send(parts)
        return parts[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.trip.receive_gradients(ctx.shapes)


class _Receive(torch.autograd.Function):
    """Forward ends the exchange of vectors; backward begins the exchange of gradients."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, trip: RoundTrip) -> torch.Tensor:
        ctx.trip = trip
        return trip.receive()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.trip.send_gradients(grads[0])
        return grads[0].new_empty(0), None
