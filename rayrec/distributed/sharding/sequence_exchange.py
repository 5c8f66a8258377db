"""The second half of a step without pooling: each id's vector back to the rank that asked, and its gradient in reverse.

One collective forward and one backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed.awaitable import LazyAwaitable
from rayrec.distributed.sharding.buffers import BufferPool
from rayrec.distributed.sharding.id_receiver import RoutedIds
from rayrec.distributed.sharding.place import Place
from rayrec.distributed.sharding.routing import Routes
from rayrec.distributed.sharding.sequence_order import Places, SequenceOrder
from rayrec.distributed.sharding.vector_transport import Codec, VectorTransport
from rayrec.sparse import ops


class SequenceExchange:
    """Sends each rank its ids' vectors, and puts what arrives in the order of the outputs.

    Args:
        routes: of the collection; the tables of a kernel group have one width.
        place: this process among the ranks.
        codec: number formats on the wire.
    """

    def __init__(self, routes: Routes, place: Place, codec: Codec) -> None:
        self._world = world = place.world_size
        self._transport = VectorTransport(place.group, codec, BufferPool(place.device))
        self.order = SequenceOrder(routes, place.device)
        widths = {g: held[0].cols.size for route in routes.ranks for g, held in route.tables.items()}
        self._widths = [widths[group] for group in range(routes.num_groups)]
        lookups = routes.ranks[place.rank].lookups
        self.unit = math.gcd(*(lookup.width for lookup in lookups))
        self._lookup_widths = torch.tensor([lookup.width for lookup in lookups], device=place.device)
        chunks = torch.arange(len(lookups) * world, dtype=torch.int32, device=place.device)
        self.by_rank = chunks.view(len(lookups), world).t().reshape(-1)
        self.by_lookup = chunks.view(world, len(lookups)).t().reshape(-1)
        self._one_run = world == 1 or len(lookups) <= 1

    def start(self, parts: Sequence[torch.Tensor], ids: RoutedIds, places: Places) -> LazyAwaitable[torch.Tensor]:
        """Begins to send; waits for the vectors of this rank's own ids `[N, dim]`, output after output.

        Args:
            parts: for each kernel group that this rank has, `[ids, width]`: lookup after lookup, rank after rank.
            ids: what was looked up.
            places: of what comes back.
        """
        sizes = None if self._one_run else self._sizes(ids)
        leave, come = self._numbers(ids.asked), self._numbers(ids.sent)
        message = _SequenceMessage(self, leave, come, [part.shape for part in parts], sizes, places)
        return self._transport.start(parts, message)

    def _numbers(self, counts: Sequence[Sequence[int]]) -> list[int]:
        return [sum(n * width for n, width in zip(by_group, self._widths, strict=True)) for by_group in counts]

    def _sizes(self, ids: RoutedIds) -> torch.Tensor:
        counts = [lookups.offsets[1:] - lookups.offsets[:-1] for lookups in ids.lookups.values()]
        counts_LW = torch.cat(counts).view(-1, self._world)
        return (counts_LW * self._lookup_widths[:, None]).view(-1)


@dataclass(frozen=True)
class _SequenceMessage:
    exchange: SequenceExchange
    to_ranks: list[int]  # numbers
    from_ranks: list[int]
    part_shapes: list[torch.Size]
    sizes: torch.Tensor | None  # numbers of each rank's ids in each lookup, lookup after lookup; None: one run
    places: Places

    @property
    def num_pieces(self) -> int:
        return 1

    def leave(self, piece: int) -> list[int]:
        return self.to_ranks

    def come(self, piece: int) -> list[int]:
        return self.from_ranks

    def pack(self, parts: Sequence[torch.Tensor], dtype: torch.dtype, piece: int) -> torch.Tensor:
        flat = [part.to(dtype).reshape(-1) for part in parts]
        message = flat[0] if len(flat) == 1 else torch.cat(flat)
        if self.sizes is None:
            return message
        exchange = self.exchange
        return ops.permute_chunks(exchange.by_rank, self.sizes, message, exchange.unit, message.numel())

    def unpack(self, arrived: torch.Tensor, piece: int) -> torch.Tensor:
        return self.exchange.order.assemble(arrived, self.places)

    def pack_gradients(self, grad: torch.Tensor, piece: int) -> torch.Tensor:
        return self.exchange.order.take_apart(grad, self.places, 1 / len(self.to_ranks))

    def unpack_gradients(
        self, arrived: torch.Tensor, piece: int, grads: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        if self.sizes is not None:
            sizes = self.sizes[self.exchange.by_rank]
            exchange = self.exchange
            arrived = ops.permute_chunks(exchange.by_lookup, sizes, arrived, exchange.unit, arrived.numel())
        pieces = arrived.split([shape.numel() for shape in self.part_shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.part_shapes, strict=True)]
