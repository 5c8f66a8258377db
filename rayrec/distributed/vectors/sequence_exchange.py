"""output_dist of vectors id by id: each id's vector back to the rank that sent it, and its gradient in reverse.

One collective forward and one backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rayrec.distributed.comm.place import Place
from rayrec.distributed.comm.wire import Codec
from rayrec.distributed.ids.batch import GROUPS, Headers, RankIds
from rayrec.distributed.ids.routes import Routes
from rayrec.distributed.ids.sequence_places import PlaceFinder
from rayrec.distributed.vectors.transport import VectorTransport


class SequenceExchange:
    """Sends each rank its ids' vectors, and puts what arrives in the order of the outputs.

    Args:
        routes: of the collection; the tables of a kernel group have one width.
        finder: of the places of what comes back.
        place: this process among the ranks.
        codec: number formats on the wire.
    """

    def __init__(self, routes: Routes, finder: PlaceFinder, place: Place, codec: Codec) -> None:
        self._transport = VectorTransport(place.group, codec)
        self.unit, self.dim = finder.unit, finder.dim
        widths = {group: held[0].cols.size for route in routes.ranks for group, held in route.tables.items()}
        self._widths = torch.tensor([widths[group] for group in range(routes.num_groups)], dtype=torch.int64)
        self._held = list(routes.ranks[place.rank].tables)

    def start(self, parts: Sequence[torch.Tensor], ids: RankIds) -> Callable[[], torch.Tensor]:
        """Begins to send; the function returned waits for the vectors of this rank's own ids `[N, dim]`, output after
        output.

        Args:
            parts: for each kernel group that this rank has `[ids, width]`, rank after rank.
            ids: what was looked up, and where the vectors belong.
        """
        sent, received = self._numbers(ids.headers.received), self._numbers(ids.headers.sent)
        sizes = sent.sum(1).tolist(), received.sum(1).tolist()
        return self._transport.start(parts, _SequenceMessage(self, sent[:, self._held], *sizes, ids.units))

    def _numbers(self, headers: Headers) -> torch.Tensor:
        """`[W, groups]`: how many numbers the vectors of each rank and group have."""
        return torch.tensor(headers)[:, GROUPS : GROUPS + self._widths.numel()] * self._widths


class _SequenceMessage:
    """See `VectorMessage`.

    Args:
        by_group: `[W, groups held here]`, numbers for each rank.
        to_ranks, from_ranks: numbers for, and from, each rank.
        units: where the vectors that arrive belong; None if they come in order.
    """

    gathered = False

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

    def pack(self, parts: Sequence[torch.Tensor], piece: int) -> torch.Tensor:
        flat = [part.float().reshape(-1) for part in parts]
        if len(flat) == 1:
            return flat[0]
        split = [part.split(sizes) for part, sizes in zip(flat, self.by_group.t().tolist(), strict=True)]
        return torch.cat([numbers for of_rank in zip(*split, strict=True) for numbers in of_rank])

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
        self, arrived: torch.Tensor, piece: int, parts: Sequence[torch.Size], grads: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        if len(parts) == 1:
            return [arrived.view(parts[0])]
        split = arrived.split(self.by_group.view(-1).tolist())
        return [torch.cat(split[n :: len(parts)]).view(shape) for n, shape in enumerate(parts)]
