"""Exchanges vectors forward and gradients backward: one collective each way, or several where what would arrive at once
takes much memory; at most two are then in flight. Gradients that all ranks need alike are gathered in one collective.

Two autograd nodes overlap exchanges with other work. Forward, `_Send` starts and `_Receive` ends the exchange of
vectors; backward, `_Receive` starts and `_Send` ends the exchange of gradients.
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
    """The layout of one batch's vectors before and after they travel, in pieces, whose number is equal on all ranks.

    Attributes:
        sent, received: for each piece, the number of elements for, and from, each rank on the way forward.
    """

    sent: list[list[int]]
    received: list[list[int]]

    def pack(self, vectors: Sequence[torch.Tensor], piece: int) -> torch.Tensor:
        """The kernels' vectors as one flat float32 message, ordered by target rank."""

    def unpack(self, arrived: torch.Tensor, piece: int) -> torch.Tensor:
        """The result's rows, from the flat float32 message of all ranks."""

    def pack_gradients(self, grad: torch.Tensor, piece: int) -> torch.Tensor:
        """The gradient of the argument of `unpack`, from the gradient of the result of all pieces."""

    def unpack_gradients(
        self, arrived: torch.Tensor, piece: int, shapes: Sequence[torch.Size], grads: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """The gradients of the kernels' vectors, updated with the gradients of a piece.

        Args:
            shapes: shapes of the vectors.
            grads: result of the call for the previous piece; empty for the first piece.
        """


class RoundTrip(Protocol):
    """Sends one batch's vectors to the ranks that asked for them, and their gradients back."""

    def send(self, vectors: Sequence[torch.Tensor]) -> None:
        """Starts to send the kernels' vectors."""

    def receive(self) -> torch.Tensor:
        """Waits for the result's rows."""

    def send_gradients(self, grad: torch.Tensor) -> None:
        """Starts to send the gradient of the result, divided by the number of ranks."""

    def receive_gradients(self, shapes: Sequence[torch.Size]) -> Sequence[torch.Tensor]:
        """Waits for the gradients of the kernels' vectors, of these shapes."""


def begin(trip: RoundTrip, vectors: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Starts to send `vectors`; the returned function waits for the result."""
    token = _Send.apply(trip, *vectors)
    return partial(_Receive.apply, token, trip)


@dataclass
class MessageTrip:
    """A `RoundTrip` by collectives, as flat messages.

    Args:
        group: group of the ranks.
        codec: number formats on the wire.
        message: layout of the batch's vectors.
    """

    group: comm.Group
    codec: Codec
    message: VectorMessage
    _unsent: Sequence[torch.Tensor] = ()  # vectors, or gradients, with pieces that are not sent yet
    _in_flight: deque[tuple[torch.Tensor, comm.Wait | None, list[int]]] = field(default_factory=deque)

    def send(self, vectors: Sequence[torch.Tensor]) -> None:
        self._begin(vectors, forward=True)

    def receive(self) -> torch.Tensor:
        message = self.message
        rows = [message.unpack(self._end(piece, forward=True), piece) for piece in range(len(message.sent))]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def send_gradients(self, grad: torch.Tensor) -> None:
        self._begin([self.averaged(grad)], forward=False)

    def receive_gradients(self, shapes: Sequence[torch.Size]) -> Sequence[torch.Tensor]:
        grads: Sequence[torch.Tensor] = ()
        for piece in range(len(self.message.sent)):
            grads = self.message.unpack_gradients(self._end(piece, forward=False), piece, shapes, grads)
        return grads

    def averaged(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient divided by the number of ranks and scaled for the wire, contiguous."""
        scale = self.codec.backward_scale / self.world_size
        if scale == 1 and grad.is_contiguous():
            return grad
        return torch.mul(grad, scale, out=torch.empty(grad.shape, dtype=grad.dtype, device=grad.device))

    @property
    def world_size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def _begin(self, tensors: Sequence[torch.Tensor], forward: bool, pieces: Sequence[int] = (0, 1)) -> None:
        """Starts to send `pieces`, if they exist."""
        message, codec, last = self.message, self.codec, len(self.message.sent) - 1
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
            if self.world_size == 1:
                self._in_flight.append((numbers, None, received))
            else:
                coded = numbers if kind is FP32 else encode(kind, numbers, sent)
                sizes_out, sizes_in = (sent, received) if kind is FP32 else (kind.sizes(sent), kind.sizes(received))
                dtype = torch.float32 if kind is FP32 else message_dtype(kind)
                arrived = coded.new_empty(sum(sizes_in), dtype=dtype)
                wait = comm.all_to_all(arrived, coded, sizes_in, sizes_out, self.group)
                self._in_flight.append((arrived, wait, received))
        self._unsent = tensors if pieces[-1] < last else ()

    def _end(self, piece: int, forward: bool) -> torch.Tensor:
        """Waits for a piece, starts to send another one, and returns the numbers that arrived, as float32."""
        arrived, wait, sizes = self._in_flight.popleft()  # the only reference, so that its memory is reused
        if wait is not None:
            wait()
        if self._unsent:
            self._begin(self._unsent, forward, [piece + 2])
        codec = self.codec
        kind, scale = (codec.forward, codec.forward_scale) if forward else (codec.backward, codec.backward_scale)
        numbers = arrived if kind is FP32 or self.world_size == 1 else decode(kind, arrived, sizes)
        return numbers if scale == 1 else numbers * (1 / scale)


@dataclass
class GatherTrip:
    """A `RoundTrip` whose gradients every rank gathers whole, in one piece: all ranks have equal batches and columns.

    Args:
        forward: sends the vectors.
        scaled: multiplies rows of the result by factors that turn sums into means; None without factors.
    """

    forward: MessageTrip
    scaled: Callable[[torch.Tensor], torch.Tensor] | None
    _arrived: torch.Tensor = field(init=False)

    def send(self, vectors: Sequence[torch.Tensor]) -> None:
        self.forward.send(vectors)

    def receive(self) -> torch.Tensor:
        return self.forward.receive()

    def send_gradients(self, grad: torch.Tensor) -> None:
        trip, grad = self.forward, self.forward.averaged(grad)
        numbers = (grad if self.scaled is None else self.scaled(grad)).reshape(-1)
        kind = trip.codec.backward
        coded = numbers if kind is FP32 else encode(kind, numbers, [numbers.numel()])
        self._arrived = comm.all_gather(coded, trip.group).view(-1)

    def receive_gradients(self, shapes: Sequence[torch.Size]) -> Sequence[torch.Tensor]:
        codec, world, arrived = self.forward.codec, self.forward.world_size, self._arrived
        del self._arrived  # a result that the user keeps must not keep its gradients
        if codec.backward is not FP32:
            arrived = decode(codec.backward, arrived, [shapes[0].numel() // world] * world)
        if codec.backward_scale != 1:
            arrived = arrived * (1 / codec.backward_scale)
        return [arrived.view(shapes[0])]


class _Send(torch.autograd.Function):
    """Forward starts the exchange of vectors; backward ends the exchange of gradients."""

    @staticmethod
    def forward(ctx: Any, trip: RoundTrip, *vectors: torch.Tensor) -> torch.Tensor:
        ctx.trip, ctx.shapes = trip, [tensor.shape for tensor in vectors]
        trip.send(vectors)
        return vectors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.trip.receive_gradients(ctx.shapes)


class _Receive(torch.autograd.Function):
    """Forward ends the exchange of vectors; backward starts the exchange of gradients."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, trip: RoundTrip) -> torch.Tensor:
        ctx.trip = trip
        return trip.receive()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.trip.send_gradients(grads[0])
        return grads[0].new_empty(0), None
