"""The first half of a step: every id to the ranks that hold its row.

A small header (how much follows) goes to every rank; lengths, ids and weights travel with it or behind it, see
`id_transport`. A rank that finds a bad id says so in the header, so that all ranks stop with an error instead of
waiting for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rayrec.distributed import comm
from rayrec.distributed.awaitable import Awaitable
from rayrec.distributed.sharding.feature_order import FeatureOrder
from rayrec.distributed.sharding.id_message import BAD, GROUPS, VALUES, Part
from rayrec.distributed.sharding.id_receiver import Receiver, RoutedIds, Trace
from rayrec.distributed.sharding.id_sender import Outgoing, Sender
from rayrec.distributed.sharding.id_transport import Delivery, Headers, IdTransport
from rayrec.distributed.sharding.routing import Routes
from rayrec.distributed.sharding.weight_exchange import with_way_back
from rayrec.sparse import KeyedJaggedTensor


class IdExchange:
    """Sends a batch's ids along fixed routes.

    Args:
        routes: of the collection.
        group: joins the ranks; None for one process.
        rank: of this process.
        weighted: ids carry weights.
        num_counts: how many further counts each rank announces.
        device: where ids lie.
        traced: what comes back tells where each id went; batches then have one example, the whole of a rank's ids.
        sources: the order of ranks within what this rank looks up; by default rank order.
    """

    def __init__(
        self,
        routes: Routes,
        group: comm.Group,
        rank: int,
        weighted: bool,
        num_counts: int,
        device: torch.device,
        traced: bool = False,
        sources: Sequence[int] | None = None,
    ) -> None:
        self.routes, self.group, self.rank = routes, group, rank
        self._weighted = weighted
        self._sender = Sender(routes, num_counts, device, traced)
        self.receiver = Receiver(routes, rank, device, sources)
        self._features = FeatureOrder(routes.features, device)
        self._transport = IdTransport(group, rank, [len(route.streams) for route in routes.ranks], weighted, device)

    def start(
        self, kjt: KeyedJaggedTensor, counts: torch.Tensor | None = None, problem: ValueError | None = None
    ) -> Awaitable[RoutedIds]:
        """Begins to send; what comes back waits for this rank's own lookups.

        Args:
            kjt: every feature of the routes, among others.
            counts: int64 numbers that every rank is told.
            problem: why this rank cannot go on; `wait` then raises on every rank.
        """
        outgoing = self._sender.pack(*self._features.of(kjt, self._weighted), counts, problem)
        return _Exchange(self, outgoing, self._transport.start(outgoing.header, outgoing.part))


class _Exchange(Awaitable[RoutedIds]):
    """Ids under way; `wait` puts what arrives in the order of this rank's lookups."""

    def __init__(self, parent: IdExchange, outgoing: Outgoing, delivery: Delivery) -> None:
        self._parent, self._outgoing, self._delivery = parent, outgoing, delivery

    def _wait_impl(self) -> RoutedIds:
        parent, outgoing = self._parent, self._outgoing
        sent, received = self._delivery.headers()
        bad = [rank for rank, header in enumerate(received) if header[BAD]]
        if bad:
            raise outgoing.problem or ValueError(f"rank {bad[0]} was given an id outside its table; see its error")
        alone = len(received) == 1
        parts = [outgoing.part] if alone else self._delivery.parts()
        parts, weights = (parts, None) if alone else self._trainable(parts, sent, received)
        routed = replace(parent.receiver.order(parts, received), weights=weights)
        if outgoing.origins is None:
            return routed
        counts = slice(GROUPS, GROUPS + parent.routes.num_groups)
        trace = Trace(
            lengths_F=outgoing.lengths_FB.view(-1),
            lengths_S=outgoing.part.lengths_SB.view(-1),
            origins=outgoing.origins,
            asked=[header[counts] for header in received],
            sent=[header[counts] for header in sent],
        )
        return replace(routed, trace=trace)

    def _trainable(self, parts: list[Part], sent: Headers, received: Headers) -> tuple[list[Part], torch.Tensor | None]:
        """Parts whose weights hand their gradients back, and all these weights, where the weights need gradients."""
        weights = self._outgoing.part.weights
        if weights is None or not weights.requires_grad or not torch.is_grad_enabled():
            return parts, None
        counts = [header[VALUES] for header in received]
        arrived = torch.cat([part.weights for part in parts if part.weights is not None])
        back = with_way_back(weights, arrived, [header[VALUES] for header in sent], counts, self._parent.group)
        return [replace(part, weights=w) for part, w in zip(parts, back.split(counts), strict=True)], back
