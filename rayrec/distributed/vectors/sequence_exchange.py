"""output_dist of vectors id by id: sends each id's vector to the rank that sent the id, and its gradient in reverse.

One collective forward and one backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rayrec.distributed.comm.rank_context import RankContext
from rayrec.distributed.comm.wire import Codec
from rayrec.distributed.ids.batch import GROUPS, Headers, RankIds
from rayrec.distributed.ids.routes import Routes
from rayrec.distributed.vectors.sequence_order import SequenceOrder
from rayrec.distributed.vectors.transport import MessageTrip, begin


class SequenceExchange:
    """Sends each rank its ids' vectors, and puts received vectors in the order of the outputs.

    Args:
        routes: routes of the collection; the tables of a kernel group have one width.
        order: order of the vectors that come back.
        context: This process among the ranks.
        codec: number formats on the wire.
    """

    def __init__(self, routes: Routes, order: SequenceOrder, context: RankContext, codec: Codec) -> None:
        self._group, self._codec = context.group, codec
        self.unit, self.dim = order.unit, order.dim
        widths = {group: tables[0].cols.size for route in routes.ranks for group, tables in route.tables.items()}
        self._widths = torch.tensor([widths[group] for group in range(routes.num_groups)], dtype=torch.int64)
        self._own_groups = list(routes.ranks[context.rank].tables)

    def start(self, vectors: Sequence[torch.Tensor], ids: RankIds) -> Callable[[], torch.Tensor]:
        """Starts to send; the returned function waits for the vectors of this rank's own ids `[N, dim]`, output after
        output.

        Args:
            vectors: for each kernel group of this rank `[ids, width]`, ordered by rank.
            ids: the ids that were looked up.
        """
        sent, received = self._elements(ids.received), self._elements(ids.sent)
        message = _SequenceMessage(
            self, sent[:, self._own_groups], sent.sum(1).tolist(), received.sum(1).tolist(), ids.units
        )
        return begin(MessageTrip(self._group, self._codec, message), vectors)

    def _elements(self, headers: Headers) -> torch.Tensor:
        """`[W, groups]`: number of elements of the vectors of each rank and group."""
        return torch.tensor(headers)[:, GROUPS : GROUPS + self._widths.numel()] * self._widths


class _SequenceMessage:
    """See `VectorMessage`.

    Args:
        exchange: the exchange of the vectors.
        by_group: `[W, own groups]`, number of elements for each rank.
        to_ranks, from_ranks: number of elements for, and from, each rank.
        units: see `RankIds`.
    """

    def __init__(
        self,
        exchange: SequenceExchange,
        by_group: torch.Tensor,
        to_ranks: list[int],
        from_ranks: list[int],
        units: torch.Tensor | None,
    ) -> None:
        self.exchange, self.by_group, self.units = exchange, by_group, units
        self.sent, self.received = [to_ranks], [from_ranks]

    def pack(self, vectors: Sequence[torch.Tensor], piece: int) -> torch.Tensor:
        flat = [tensor.float().reshape(-1) for tensor in vectors]
        if len(flat) == 1:
            return flat[0]
        by_group = [tensor.split(sizes) for tensor, sizes in zip(flat, self.by_group.t().tolist(), strict=True)]
        return torch.cat([numbers for by_rank in zip(*by_group, strict=True) for numbers in by_rank])

    def unpack(self, arrived: torch.Tensor, piece: int) -> torch.Tensor:
        if self.units is None:
            return arrived.view(-1, self.exchange.dim)
        source = torch.empty_like(self.units)
        source[self.units] = torch.arange(source.numel(), device=source.device)
        return arrived.view(-1, self.exchange.unit).index_select(0, source).view(-1, self.exchange.dim)

    def pack_gradients(self, grad: torch.Tensor, piece: int) -> torch.Tensor:
        if self.units is None:
            return grad.view(-1)
        return grad.view(-1, self.exchange.unit).index_select(0, self.units).view(-1)

    def unpack_gradients(
        self, arrived: torch.Tensor, piece: int, shapes: Sequence[torch.Size], grads: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        if len(shapes) == 1:
            return [arrived.view(shapes[0])]
        numbers = arrived.split(self.by_group.view(-1).tolist())
        return [torch.cat(numbers[n :: len(shapes)]).view(shape) for n, shape in enumerate(shapes)]
