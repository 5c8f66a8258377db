"""The first half of a step: every id to the ranks that hold its row.

A small header (how much follows) goes to every rank; lengths, ids and weights travel with it or behind it, see
`id_transport` and `gpu_transport`. A rank that finds a bad id says so in the header, so that all ranks stop with an
error instead of waiting for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from rayrec.distributed import comm
from rayrec.distributed.comm.awaitable import Awaitable, Deferred
from rayrec.distributed.comm.place import Place
from rayrec.distributed.ids.cpu_transport import IdTransport
from rayrec.distributed.ids.features import FeatureOrder
from rayrec.distributed.ids.gpu_transport import GpuTransport, Parcel
from rayrec.distributed.ids.message import BAD, GROUPS, VALUES, Headers, Ids
from rayrec.distributed.ids.receiver import Asked, Receiver, RoutedIds
from rayrec.distributed.ids.routes import Routes
from rayrec.distributed.ids.sender import Notice, Outgoing, Sender
from rayrec.distributed.ids.upload import OnHost
from rayrec.distributed.ids.weights import with_way_back
from rayrec.distributed.vectors.sequence_places import PlaceFinder
from rayrec.sparse import KeyedJaggedTensor


@dataclass(frozen=True)
class HostIds:
    """A batch routed on the host, ready to be sent.

    Args:
        outgoing: in the order in which ranks receive it.
        problem: why some rank cannot go on, where this is known already.
        parcel: what leaves for GPUs; None between CPUs.
        chunks: sizes that the receiver needs on a GPU (see `Receiver.chunks`).
        units: where vectors that come back belong (see `PlaceFinder`), for a GPU.
    """

    outgoing: OnHost[Outgoing]
    problem: ValueError | None = None
    parcel: Parcel | None = None
    chunks: torch.Tensor | None = None
    units: torch.Tensor | None = None


class IdExchange:
    """Sends a batch's ids along fixed routes.

    Args:
        routes: of the collection.
        place: this process among the ranks.
        weighted: ids carry weights.
        sources: the order of ranks within a lookup; None for vectors id by id: lookups come rank by rank, and where
            each id's vector belongs is found.
    """

    def __init__(self, routes: Routes, place: Place, weighted: bool, sources: Sequence[int] | None) -> None:
        self.routes, self._place, self._first_count = routes, place, GROUPS + routes.num_groups
        self.finder = PlaceFinder(routes) if sources is None else None
        self._sender = Sender(routes, traced=sources is None)
        in_turn = range(place.world_size) if sources is None else sources
        self._receiver = Receiver(routes, place.rank, place.device, in_turn, rank_by_rank=sources is None)
        self._features = FeatureOrder(routes.features, weighted)
        streams = [len(route.streams) for route in routes.ranks]
        self._gpu: GpuTransport | None = None
        if place.device.type == "cpu":
            self._transport = IdTransport(place.group, place.rank, streams, weighted)
        else:
            host_group = comm.host_group(place.group, place.device)
            self._gpu = GpuTransport(place.group, host_group, place.rank, streams, weighted)

    def route(self, kjt: KeyedJaggedTensor, notice: Notice) -> HostIds:
        """Puts a batch in the order in which it is sent; for GPUs, ranks also tell each other sizes.

        Args:
            kjt: every feature of the routes, among others; on the host.
            notice: what every rank is told.
        """
        outgoing = self._sender.pack(self._features.of(kjt), notice)
        if self._gpu is None:
            return HostIds(OnHost(outgoing))
        received = self._gpu.exchange_headers(outgoing.header)
        problem = _problem(outgoing, received)
        if problem is not None:
            return HostIds(OnHost(outgoing), problem)
        parcel = self._gpu.pack(outgoing.ids, outgoing.header.tolist(), received)
        return HostIds(OnHost(outgoing), None, parcel, self._receiver.chunks(received), self._units(outgoing))

    def send(self, ids: HostIds) -> Awaitable[RoutedIds]:
        """Begins to send; what comes back waits for this rank's own lookups.

        Raises (from `wait`):
            ValueError: some rank has a problem.
        """
        outgoing, parcel = ids.outgoing.item, ids.parcel
        if parcel is not None:
            assert self._gpu is not None
            arriving = self._gpu.start(parcel)
            return Deferred(lambda: self._routed(ids, parcel.received.item, arriving.wait))
        alone = self._place.world_size == 1
        delivery = None if alone or ids.problem else self._transport.start(outgoing.header, outgoing.ids)
        units = self._units(outgoing)  # while ids travel

        def finish() -> RoutedIds:
            received = outgoing.header.tolist() if delivery is None else delivery.headers()
            problem = ids.problem or _problem(outgoing, received)
            if problem is not None:
                raise problem
            arrive = (lambda: outgoing.ids) if delivery is None else delivery.ids
            known = replace(ids, chunks=self._receiver.chunks(received), units=units)
            return self._routed(known, received, arrive)

        return Deferred(finish)

    def _units(self, outgoing: Outgoing) -> torch.Tensor | None:
        return None if self.finder is None else self.finder.find(outgoing)

    def _routed(self, batch: HostIds, received: Headers, arrive: Callable[[], Ids]) -> RoutedIds:
        ids, asked, back = arrive(), batch.outgoing.item.header.tolist(), None
        weights = batch.outgoing.item.ids.weights
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            if self._place.world_size == 1:
                ids = replace(ids, weights=weights.to(ids.values.device))
            else:
                assert ids.weights is not None
                sent, come = ([header[VALUES] for header in headers] for headers in (asked, received))
                back = with_way_back(weights, ids.weights, sent, come, self._place.group)
                ids = replace(ids, weights=back)
        lookups = self._receiver.order(ids, received, batch.chunks)
        told = [header[self._first_count :] for header in received]
        return RoutedIds(lookups, received, told, back, Asked(asked, batch.units))


def _problem(outgoing: Outgoing, received: Headers) -> ValueError | None:
    bad = [header[BAD] for header in received]
    if not any(bad):
        return None
    return outgoing.problem or ValueError(f"rank {bad.index(1)} was given an id outside its table; see its error")
