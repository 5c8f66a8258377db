"""The second half of a step without pooling: each id's vector back to the rank that asked, and its gradient in reverse.

One collective forward and one backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rayrec.distributed import comm
from rayrec.distributed.awaitable import Deferred, LazyAwaitable
from rayrec.distributed.sharding.buffers import BufferPool
from rayrec.distributed.sharding.id_receiver import RoutedIds
from rayrec.distributed.sharding.place import Place
from rayrec.distributed.sharding.routing import Routes
from rayrec.distributed.sharding.sequence_dedup import Duplicates
from rayrec.distributed.sharding.sequence_order import Places, SequenceOrder
from rayrec.distributed.sharding.vector_exchange import Codec
from rayrec.sparse import ops


@dataclass
class _Transfer:
    """One exchange under way, shared by its two autograd nodes."""

    exchange: SequenceExchange
    leave: list[int]  # numbers for each rank
    come: list[int]  # numbers from each rank
    part_shapes: list[torch.Size]
    sizes: torch.Tensor | None  # numbers of each rank's ids in each lookup, lookup after lookup; None: one run
    places: Places | None = None
    wait: comm.Wait | None = None
    arrived: torch.Tensor | None = None
    grads_wait: comm.Wait | None = None
    grads: torch.Tensor | None = None


class SequenceExchange:
    """Sends each rank its ids' vectors, and puts what arrives in the order of the outputs.

    Args:
        routes: of the collection; the tables of a kernel group have one width.
        place: this process among the ranks.
        codec: number formats on the wire.
    """

    def __init__(self, routes: Routes, place: Place, codec: Codec) -> None:
        self._place, self._codec = place, codec
        self._buffers = BufferPool(place.device)
        self._order = SequenceOrder(routes, place.device)
        self.dim = self._order.dim
        widths = {g: held[0].cols.size for route in routes.ranks for g, held in route.tables.items()}
        self._widths = [widths[group] for group in range(routes.num_groups)]
        lookups = routes.ranks[place.rank].lookups
        world = place.world_size
        self._lookup_widths = torch.tensor([lookup.width for lookup in lookups], device=place.device)
        chunks = torch.arange(len(lookups) * world, dtype=torch.int32, device=place.device)
        self._by_rank = chunks.view(len(lookups), world).t().reshape(-1)
        self._by_lookup = chunks.view(world, len(lookups)).t().reshape(-1)
        self._one_run = world == 1 or len(lookups) <= 1

    def start(
        self, parts: Sequence[torch.Tensor], ids: RoutedIds, duplicates: Duplicates | None
    ) -> LazyAwaitable[torch.Tensor]:
        """Begins to send; waits for the vectors of this rank's own ids `[N, dim]`, output after output.

        Args:
            parts: for each kernel group that this rank has, `[ids, width]`: lookup after lookup, rank after rank.
            ids: what was looked up.
            duplicates: taken out before ids were sent, or None.
        """
        trace = ids.trace
        assert trace is not None
        sizes = None if self._one_run else self._sizes(ids)
        shapes = [part.shape for part in parts]
        transfer = _Transfer(self, self._numbers(trace.asked), self._numbers(trace.sent), shapes, sizes)
        token = _Send.apply(transfer, *parts)
        transfer.places = self._order.places(trace, duplicates)  # while vectors travel
        return Deferred(lambda: _Receive.apply(token, transfer))

    def _numbers(self, counts: Sequence[Sequence[int]]) -> list[int]:
        return [sum(n * width for n, width in zip(by_group, self._widths, strict=True)) for by_group in counts]

    def _sizes(self, ids: RoutedIds) -> torch.Tensor:
        counts = [lookups.offsets[1:] - lookups.offsets[:-1] for lookups in ids.lookups.values()]
        counts_LW = torch.cat(counts).view(-1, self._place.world_size)
        return (counts_LW * self._lookup_widths[:, None]).view(-1)

    def send(self, parts: Sequence[torch.Tensor], transfer: _Transfer) -> None:
        flat = [part.to(self._codec.forward).reshape(-1) for part in parts]
        message = flat[0] if len(flat) == 1 else torch.cat(flat)
        if transfer.sizes is not None:
            message = ops.permute_chunks(self._by_rank, transfer.sizes, message)
        if self._place.world_size == 1:
            transfer.arrived = message
            return
        transfer.arrived = self._buffers.empty(sum(transfer.come), message.dtype)
        transfer.wait = comm.all_to_all(transfer.arrived, message, transfer.come, transfer.leave, self._place.group)

    def receive(self, transfer: _Transfer) -> torch.Tensor:
        if transfer.wait is not None:
            transfer.wait()
        arrived, transfer.arrived = transfer.arrived, None
        assert arrived is not None and transfer.places is not None
        return self._order.assemble(arrived.float(), transfer.places)

    def send_grads(self, grads: torch.Tensor, transfer: _Transfer) -> None:
        """Begins the way back: each rank gets the gradients of the vectors it looked up, averaged over ranks."""
        assert transfer.places is not None
        message = self._order.take_apart(grads, transfer.places, 1 / self._place.world_size)
        if self._place.world_size == 1:
            transfer.grads = message
            return
        message = message.to(self._codec.backward)
        transfer.grads = self._buffers.empty(sum(transfer.leave), message.dtype)
        transfer.grads_wait = comm.all_to_all(transfer.grads, message, transfer.leave, transfer.come, self._place.group)

    def receive_grads(self, transfer: _Transfer) -> list[torch.Tensor]:
        if transfer.grads_wait is not None:
            transfer.grads_wait()
        grads, transfer.grads = transfer.grads, None
        assert grads is not None
        grads = grads.float()
        if transfer.sizes is not None:
            grads = ops.permute_chunks(self._by_lookup, transfer.sizes[self._by_rank], grads)
        pieces = grads.split([shape.numel() for shape in transfer.part_shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, transfer.part_shapes, strict=True)]


class _Send(torch.autograd.Function):
    """Forward starts the exchange of vectors; backward ends the exchange of gradients."""

    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, *parts: torch.Tensor) -> torch.Tensor:
        ctx.transfer = transfer
        transfer.exchange.send(parts, transfer)
        return parts[0].new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.transfer.exchange.receive_grads(ctx.transfer)


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
