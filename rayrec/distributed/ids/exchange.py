"""input_dist: every id to the ranks that hold its row, and there into the order of that rank's lookups.

On CPUs a header and its part travel in one message. For GPUs headers are exchanged on the hosts, a batch ahead, so that
sizes are known before parts travel between devices. A rank that cannot go on with its batch says so in its header;
every rank then raises, instead of waiting for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rayrec.distributed import comm
from rayrec.distributed.comm.place import Place
from rayrec.distributed.ids.batch import (
    BATCH,
    FAILED,
    GROUPS,
    NUMBER,
    VALUES,
    WORD,
    WORD_BYTES,
    Arrival,
    BatchHeaders,
    DeviceMessage,
    Headers,
    HostIds,
    Ids,
    Kept,
    OutgoingIds,
    RankIds,
    SentIds,
)
from rayrec.distributed.ids.device_split import DeviceSplit
from rayrec.distributed.ids.routes import Routes
from rayrec.distributed.ids.sender import IdSender, part_sizes
from rayrec.distributed.ids.sequence_places import PlaceFinder
from rayrec.distributed.ids.upload import OnHost
from rayrec.distributed.ids.weight_gradients import with_gradients
from rayrec.distributed.kernel import Lookups
from rayrec.sparse import KeyedJaggedTensor, ops


class IdExchange:
    """Sends a batch's ids along fixed routes. All ranks call `announce` and `send` in the same order.

    Args:
        routes: of the collection.
        place: this process among the ranks.
        weighted: ids carry weights.
        sources: the order of ranks within a lookup; None for vectors id by id: lookups come rank by rank, and where
            each id's vector belongs is found.
        num_counts: how many counts a header has.
    """

    def __init__(
        self, routes: Routes, place: Place, weighted: bool, sources: Sequence[int] | None, num_counts: int = 0
    ) -> None:
        self.routes, self._place, self._weighted = routes, place, weighted
        self._alone, self._num_counts = place.world_size == 1, num_counts
        self.finder = PlaceFinder(routes) if sources is None else None
        self.sender = IdSender(routes, weighted, sources is None, num_counts)
        in_turn = range(place.world_size) if sources is None else sources
        self._receiver = IdReceiver(routes, place.rank, place.device, in_turn, rank_by_rank=sources is None)
        self._streams = [len(routes.ranks[place.rank].streams)] * place.world_size
        self._on_cpu = place.device.type == "cpu"
        split = None if self._on_cpu or sources is None else DeviceSplit(routes, weighted, place.device)
        self.device_split = split if split is not None and split.possible else None
        self._host_group = None if self._on_cpu else comm.host_group(place.group, place.device)
        self._sends = any(route.streams for route in routes.ranks)  # else there are only replicated tables

    def announce(self, outgoing: OutgoingIds, kept: Kept) -> HostIds:
        """The batch, ready to be sent; for GPUs, sizes are exchanged on the hosts."""
        weights = None if outgoing.ids is None else outgoing.ids.weights
        kept = replace(kept, weights=weights if weights is not None and weights.requires_grad else None)
        if self._on_cpu:
            return HostIds(OnHost(outgoing), kept)
        received: Headers = comm.exchange_on_hosts(outgoing.header, self._host_group).tolist()
        batch = HostIds(OnHost(outgoing), kept, OnHost(received))
        if any(header[FAILED] for header in received):
            return batch
        leave = part_sizes(outgoing.header.tolist(), self.sender.streams, self._weighted)
        come = part_sizes(received, self._streams, self._weighted)
        pieces = [size for of_part in come for size in of_part]
        words = None if outgoing.ids is None else self._words(outgoing.ids, leave)
        message = DeviceMessage(words, leave, [sum(of_part) for of_part in come], pieces)
        units = None if self.finder is None else self.finder.find(outgoing)
        return replace(batch, message=message, arrival=Arrival(self._receiver.chunks(received), units))

    def _words(self, ids: Ids, sizes: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.cat([piece for part in self.sender.words(ids, sizes) for piece in part])

    def send(self, batch: HostIds, features: KeyedJaggedTensor) -> SentIds:
        """Begins to send.

        Args:
            batch: what `announce` returned, on the device.
            features: of the batch, there.
        """
        message, outgoing = batch.message, batch.outgoing.item
        if message is not None:
            words = message.words
            if words is None:
                assert self.device_split is not None and outgoing.counted is not None
                words = self._words(self.device_split.split(features, outgoing.counted), message.leave)
            if self._alone or not self._sends:
                return SentIds(batch, arrived=words)
            arrived = words.new_empty(sum(message.received))
            sent = [sum(of_part) for of_part in message.leave]
            wait = comm.all_to_all(arrived, words, message.received, sent, self._place.group)
            return SentIds(batch, wait, arrived)
        if self._alone or not self._on_cpu:
            return SentIds(batch)
        assert outgoing.ids is not None
        leave = part_sizes(outgoing.header.tolist(), self.sender.streams, self._weighted)
        parts = self.sender.words(outgoing.ids, leave)
        headers = outgoing.header.view(WORD).unbind()
        messages = [(header, *part) for header, part in zip(headers, parts, strict=True)]
        return SentIds(batch, comm.exchange_messages(messages, self._place.group))

    def finish(self, under_way: SentIds) -> RankIds:
        """Waits for this rank's own lookups.

        Raises (on every rank):
            Exception: some rank could not route its batch, or is at another one.
        """
        batch, outgoing = under_way.batch, under_way.batch.outgoing.item
        sent: Headers = outgoing.header.tolist()
        arrival = batch.arrival
        if arrival is None:  # while ids travel
            arrival = Arrival(None, None if self.finder is None else self.finder.find(outgoing))
        parts = None if under_way.wait is None else under_way.wait()
        received = sent
        if batch.received is not None:
            received = batch.received.item
        elif parts is not None:
            width = outgoing.header.shape[1] * (outgoing.header.element_size() // WORD_BYTES)
            rows = torch.cat([part[:width] for part in parts]).view(torch.int64)
            received = rows.view(len(parts), -1).tolist()
        number = received[self._place.rank][NUMBER]
        if any(header[FAILED] or header[NUMBER] != number for header in received):
            self._raise_for(outgoing, received)
        batch_sizes = [header[BATCH] for header in received]
        if self._on_cpu and min(batch_sizes) < max(batch_sizes):
            arrival = replace(arrival, chunks=self._receiver.chunks(received))
        if under_way.arrived is not None and batch.message is not None:
            ids = _ids_from(under_way.arrived.split(batch.message.pieces), self._weighted)
        elif parts is not None:
            sizes = part_sizes(received, self._streams, self._weighted)
            split = [part[width:].split(of_part) for part, of_part in zip(parts, sizes, strict=True)]
            ids = _ids_from([piece for pieces in split for piece in pieces], self._weighted)
        else:
            assert outgoing.ids is not None
            ids = outgoing.ids
        trained = None
        if batch.kept.weights is not None and torch.is_grad_enabled():
            to_ranks, from_ranks = ([header[VALUES] for header in headers] for headers in (sent, received))
            trained = with_gradients(batch.kept.weights, ids, to_ranks, from_ranks, self._place.group)
            ids = replace(ids, weights=trained)
        counts = [header[len(header) - self._num_counts :] for header in received]
        return RankIds(
            lookups=self._receiver.order(ids, received, arrival.chunks),
            headers=BatchHeaders(sent, received, batch_sizes, counts),
            kept=batch.kept,
            weights=None if self._alone else trained,
            units=arrival.units,
        )

    def _raise_for(self, outgoing: OutgoingIds, received: Headers) -> None:
        """Some rank failed, or is at another batch."""
        failed = [rank for rank, header in enumerate(received) if header[FAILED]]
        if outgoing.error is not None:
            raise outgoing.error
        if failed:
            raise ValueError(f"rank {failed[0]} cannot go on with its batch; see its error")
        own = received[self._place.rank][NUMBER]
        other = next((rank for rank, header in enumerate(received) if header[NUMBER] != own), None)
        if other is not None:
            raise ValueError(
                f"rank {other} is at batch {received[other][NUMBER]} of a collection, rank {self._place.rank} is at "
                f"batch {own}: every rank must call a collection equally often"
            )


def _ids_from(pieces: Sequence[torch.Tensor], weighted: bool) -> Ids:
    """The ids of all parts, part after part: each part is its ids, its lengths and, if `weighted`, its weights."""
    columns = [pieces[number :: 2 + weighted] for number in range(2 + weighted)]
    words = [sum(piece.numel() for piece in column) for column in columns]
    values, lengths, *weights = torch.cat([piece for column in columns for piece in column]).split(words)
    return Ids(lengths, values.view(torch.int64), weights[0].view(torch.float32) if weighted else None)


class IdReceiver:
    """Puts received ids in the order of this rank's lookups.

    Args:
        routes: of the collection.
        rank: of this process.
        device: where ids lie.
        sources: the order in which ranks come after one another.
        rank_by_rank: within a kernel group a rank's lookups come one after the other; else a lookup's ranks.
    """

    def __init__(
        self, routes: Routes, rank: int, device: torch.device, sources: Sequence[int], rank_by_rank: bool
    ) -> None:
        route = routes.ranks[rank]
        self._streams = len(route.streams)
        lookups = {group: route.lookups_of(group) for group in route.tables}
        self._groups = [(group, len(held)) for group, held in lookups.items()]
        order = []
        for held in lookups.values():
            if rank_by_rank:
                order += [source * self._streams + lookup.stream for source in sources for lookup in held]
            else:
                order += [source * self._streams + lookup.stream for lookup in held for source in sources]
        self._order = torch.tensor(order, dtype=torch.int32, device=device)
        self._num_rows = len(routes.ranks) * self._streams
        self._in_order = order == list(range(self._num_rows))

    def chunks(self, received: Headers) -> torch.Tensor | None:
        """Examples of each stream of each rank, on the host; None if all ranks have equally many."""
        batch_sizes = [header[BATCH] for header in received]
        if len(set(batch_sizes)) == 1:
            return None
        return torch.tensor(batch_sizes, dtype=torch.int32).repeat_interleave(self._streams)

    def order(self, ids: Ids, received: Headers, chunks: torch.Tensor | None) -> dict[int, Lookups]:
        """This rank's lookups, by kernel group.

        Args:
            ids: of every rank, lists rank after rank and stream after stream.
            received: every rank's header.
            chunks: of these headers, on the device.
        """
        if not self._groups:
            return {}
        batch = sum(header[BATCH] for header in received)
        counts = {group: sum(header[GROUPS + group] for header in received) for group, _ in self._groups}
        lengths, values, weights = self._permuted(ids, chunks, sum(counts.values()))
        offsets = ops.complete_cumsum(lengths.to(values.dtype))
        if len(self._groups) == 1:
            return {self._groups[0][0]: Lookups(values, offsets, weights)}
        out, bag, value = {}, 0, 0
        for group, num_lookups in self._groups:
            next_bag, next_value = bag + num_lookups * batch, value + counts[group]
            part = None if weights is None else weights[value:next_value]
            out[group] = Lookups(values[value:next_value], offsets[bag : next_bag + 1] - offsets[bag], part)
            bag, value = next_bag, next_value
        return out

    def _permuted(
        self, ids: Ids, chunks: torch.Tensor | None, num_values: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        lengths, values, weights = ids.lengths.reshape(-1), ids.values, ids.weights
        if chunks is None:
            if self._in_order:
                return lengths, values, weights
            lengths_RB = lengths.view(self._num_rows, lengths.numel() // self._num_rows)
            lengths, values, weights = ops.permute_segments(self._order, lengths_RB, values, weights, num_values)
            return lengths.view(-1), values, weights
        # ranks brought batches of different size: rows are chunks of unequal length
        ends = chunks.cumsum(0)
        starts = ops.complete_cumsum(lengths)
        totals = (starts[ends] - starts[ends - chunks]).to(torch.int32)
        num_lengths = sum(num for _, num in self._groups) * (lengths.numel() // self._streams)
        return (
            ops.permute_chunks(self._order, chunks, lengths, num_values=num_lengths),
            ops.permute_chunks(self._order, totals, values, num_values=num_values),
            None if weights is None else ops.permute_chunks(self._order, totals, weights, num_values=num_values),
        )
