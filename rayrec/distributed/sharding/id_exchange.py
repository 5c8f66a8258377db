"""The first half of a step: every id to the ranks that hold its row.

A small header (how much follows) goes to every rank; lengths, ids and weights travel with it or behind it, see
`id_transport` and `gpu_transport`. A rank that finds a bad id says so in the header, so that all ranks stop with an
error instead of waiting for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rayrec.distributed import comm
from rayrec.distributed.awaitable import Awaitable
from rayrec.distributed.sharding.feature_order import FeatureOrder
from rayrec.distributed.sharding.gpu_transport import GpuDelivery, GpuTransport, Parcel
from rayrec.distributed.sharding.id_message import BAD, VALUES, Part
from rayrec.distributed.sharding.id_receiver import Receiver, RoutedIds
from rayrec.distributed.sharding.id_sender import Outgoing, Sender
from rayrec.distributed.sharding.id_transport import Delivery, Headers, IdTransport
from rayrec.distributed.sharding.place import Place
from rayrec.distributed.sharding.routing import Routes
from rayrec.distributed.sharding.upload import OnHost
from rayrec.distributed.sharding.weight_exchange import with_way_back
from rayrec.sparse import KeyedJaggedTensor

CPU = torch.device("cpu")


@dataclass(frozen=True)
class HostIds:
    """A batch routed on the host, ready to be sent.

    Args:
        outgoing: in the order in which ranks receive it.
        parcel: what leaves for GPUs; None between CPUs.
        chunks: sizes that the receiver needs on a GPU (see `Receiver.chunks`).
    """

    outgoing: OnHost[Outgoing]
    parcel: Parcel | None = None
    chunks: torch.Tensor | None = None


class IdExchange:
    """Sends a batch's ids along fixed routes.

    Args:
        routes: of the collection.
        place: this process among the ranks.
        weighted: ids carry weights.
        num_counts: how many further counts each rank announces.
        sources: the order of ranks within what this rank looks up; by default rank order.
    """

    def __init__(
        self,
        routes: Routes,
        place: Place,
        weighted: bool,
        num_counts: int,
        sources: Sequence[int] | None = None,
    ) -> None:
        self.routes, self.place = routes, place
        self._weighted = weighted
        self.sender = Sender(routes, num_counts)
        self.receiver = Receiver(routes, place.rank, place.device, sources)
        self._features = FeatureOrder(routes.features, CPU)
        streams = [len(route.streams) for route in routes.ranks]
        self._transport = IdTransport(place.group, place.rank, streams, weighted)
        self._gpu: GpuTransport | None = None
        if place.device.type != "cpu":
            host_group = comm.host_group(place.group, place.device)
            self._gpu = GpuTransport(place.group, host_group, place.rank, streams, weighted)

    def route(
        self,
        kjt: KeyedJaggedTensor,
        counts: torch.Tensor | None = None,
        problem: ValueError | None = None,
        traced: bool = False,
    ) -> HostIds:
        """Puts a batch in the order in which it is sent; for GPUs, ranks also tell each other sizes.

        Args:
            kjt: every feature of the routes, among others; on the host.
            counts: int64 numbers that every rank is told.
            problem: why this rank cannot go on; waiting then raises on every rank.
            traced: also note where each id goes.
        """
        outgoing = self.sender.pack(*self._features.of(kjt, self._weighted), counts, problem, traced)
        if self._gpu is None:
            return HostIds(OnHost(outgoing))
        sent, received = self._gpu.exchange_headers(outgoing.header)
        bad = any(header[BAD] for header in received)
        message = None if bad else self._gpu.message(outgoing.part, sent)
        return HostIds(OnHost(outgoing), Parcel(message, sent, received), self.receiver.chunks(received))

    def send(self, ids: HostIds) -> Awaitable[RoutedIds]:
        """Begins to send; what comes back waits for this rank's own lookups."""
        if self._gpu is None:
            outgoing = ids.outgoing.item
            return _Exchange(self, ids, self._transport.start(outgoing.header, outgoing.part))
        assert ids.parcel is not None
        return _Exchange(self, ids, None if ids.parcel.message is None else self._gpu.start(ids.parcel))


class _Exchange(Awaitable[RoutedIds]):
    """Ids under way; `wait` puts what arrives in the order of this rank's lookups."""

    def __init__(self, parent: IdExchange, ids: HostIds, delivery: Delivery | GpuDelivery | None) -> None:
        self._parent, self._ids, self._delivery = parent, ids, delivery

    def _wait_impl(self) -> RoutedIds:
        outgoing, parcel = self._ids.outgoing.item, self._ids.parcel
        if parcel is not None:
            sent, received = parcel.sent, parcel.received
        else:
            assert isinstance(self._delivery, Delivery)
            sent, received = self._delivery.headers()
        bad = [rank for rank, header in enumerate(received) if header[BAD]]
        if bad:
            raise outgoing.problem or ValueError(f"rank {bad[0]} was given an id outside its table; see its error")
        parts, weights = self._parts(outgoing, sent, received)
        routed = self._parent.receiver.order(parts, received, self._ids.chunks)
        return replace(routed, weights=weights, sent=self._parent.receiver.counts(sent))

    def _parts(self, outgoing: Outgoing, sent: Headers, received: Headers) -> tuple[list[Part], torch.Tensor | None]:
        """What arrived, and all its weights where these need gradients, which then find their way back."""
        assert self._delivery is not None
        weights, alone = outgoing.part.weights, len(received) == 1
        parts = [outgoing.part] if alone and isinstance(self._delivery, Delivery) else self._delivery.parts()
        if weights is None or not weights.requires_grad or not torch.is_grad_enabled():
            return parts, None
        if alone:
            return [replace(parts[0], weights=weights.to(parts[0].values.device))], None
        counts = [header[VALUES] for header in received]
        arrived = torch.cat([part.weights for part in parts if part.weights is not None])
        back = with_way_back(weights, arrived, [header[VALUES] for header in sent], counts, self._parent.place.group)
        return [replace(part, weights=w) for part, w in zip(parts, back.split(counts), strict=True)], back
