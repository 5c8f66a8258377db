"""input_dist: sends every id to the ranks that hold its row, and puts received ids in the order of this rank's lookups.

On CPUs a header and its part travel in one message. For GPUs headers are exchanged on the hosts, a batch ahead, so that
sizes are known before parts travel between devices. A rank that cannot process its batch says so in its header; every
rank then raises, instead of waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from rayrec.distributed import comm
from rayrec.distributed.comm.rank_context import RankContext
from rayrec.distributed.ids.batch import (
    BATCH,
    COLLECTION,
    FAILED,
    GROUPS,
    NUMBER,
    VALUES,
    WORD,
    WORD_BYTES,
    Headers,
    HostIds,
    Ids,
    Kept,
    OutgoingIds,
    RankIds,
    SentIds,
    WordCounts,
)
from rayrec.distributed.ids.device_split import DeviceSplit
from rayrec.distributed.ids.routes import Routes
from rayrec.distributed.ids.sender import IdSender, part_sizes
from rayrec.distributed.ids.upload import OnHost
from rayrec.distributed.kernel.local_table import Lookups
from rayrec.sparse import KeyedJaggedTensor, ops

HEADER_WIDTH = 16  # on the hosts of GPUs, headers are padded to a multiple


class IdExchange:
    """Sends a batch's ids along fixed routes. All ranks call `announce` and `send` in the same order.

    Args:
        routes: routes of the collection.
        context: This process among the ranks.
        weighted: whether ids carry weights.
        sources: order of the ranks within a lookup.
        num_counts: number of counts for other executors in a header.
        find_units: for lookups id by id, finds `RankIds.units`; lookups then come rank by rank.

    Attributes:
        name: name of the collection in errors.
        alone: whether there are no other ranks.
    """

    def __init__(
        self,
        routes: Routes,
        context: RankContext,
        weighted: bool,
        sources: Sequence[int],
        num_counts: int = 0,
        find_units: Callable[[OutgoingIds], torch.Tensor | None] | None = None,
    ) -> None:
        self.routes, self._context, self._weighted, self.name = routes, context, weighted, ""
        self.alone, self._num_counts, self._find_units = context.world_size == 1, num_counts, find_units
        by_id = find_units is not None
        self.sender = IdSender(routes, weighted, by_id, num_counts)
        self._receiver = IdReceiver(routes, context.rank, context.device, sources, rank_by_rank=by_id)
        self._streams = [len(routes.ranks[context.rank].streams)] * context.world_size
        self.on_cpu = context.device.type == "cpu"
        split = None if self.on_cpu or by_id else DeviceSplit(routes, weighted, context.device)
        self.device_split = split if split is not None and split.possible else None
        self._host_group = None if self.on_cpu else comm.host_group(context.group, context.device)
        self._sends = any(route.streams for route in routes.ranks)  # else there are only replicated tables

    def identify(self, number: int, name: str) -> None:
        """Sets the collection's number, equal on all ranks, and its name in errors."""
        self.sender.collection, self.name = number, name

    def prepare(self, outgoing: OutgoingIds, kept: Kept) -> HostIds:
        """For GPUs: makes everything that needs no other rank's header. An error here still reaches every rank."""
        ids = outgoing.ids
        to_ranks = part_sizes(outgoing.header.tolist(), self.sender.streams, self._weighted)
        return HostIds(
            OnHost(outgoing),
            kept,
            words=None if ids is None else self._words(ids, to_ranks),
            weights=None if ids is None or ids.weights is None or not ids.weights.requires_grad else ids.weights,
            units=None if self._find_units is None else self._find_units(outgoing),
        )

    def announce(self, batch: HostIds) -> HostIds:
        """For GPUs: exchanges sizes on the hosts, and returns the batch ready to be sent."""
        outgoing = batch.outgoing.item
        received: Headers
        if self.alone:
            received = outgoing.header.tolist()
        else:
            width = outgoing.header.shape[1]
            # Headers of all collections have one width, so that a rank that calls another collection is recognized.
            padded = F.pad(outgoing.header, (0, -width % HEADER_WIDTH))
            received = comm.exchange_on_hosts(padded, self._host_group)[:, :width].tolist()
        if any(header[FAILED] for header in received):
            return HostIds(batch.outgoing, batch.kept, OnHost(received))
        to_ranks = part_sizes(outgoing.header.tolist(), self.sender.streams, self._weighted)
        from_ranks = part_sizes(received, self._streams, self._weighted)
        chunks = self._receiver.chunks(received)
        return replace(batch, received=OnHost(received), word_counts=OnHost((to_ranks, from_ranks)), chunks=chunks)

    def _words(self, ids: Ids, sizes: WordCounts) -> torch.Tensor:
        return torch.cat([words for message in self.sender.words(ids, sizes) for words in message])

    def send(self, batch: HostIds, features: KeyedJaggedTensor) -> SentIds:
        """Starts the exchange.

        Args:
            batch: the routed batch, on the device.
            features: features of the batch, on the device.
        """
        outgoing = batch.outgoing.item
        if batch.word_counts is not None:
            to_ranks, from_ranks = batch.word_counts.item
            words = batch.words
            if words is None:
                assert self.device_split is not None
                words = self._words(self.device_split.split(features, outgoing), to_ranks)
            if self.alone or not self._sends:
                return SentIds(batch, arrived=words, features=features)
            received = [sum(sizes) for sizes in from_ranks]
            arrived = words.new_empty(sum(received))
            wait = comm.all_to_all(arrived, words, received, [sum(sizes) for sizes in to_ranks], self._context.group)
            return SentIds(batch, wait, arrived, words, features)
        if self.alone or not self.on_cpu:
            return SentIds(batch)
        assert outgoing.ids is not None
        to_ranks = part_sizes(outgoing.header.tolist(), self.sender.streams, self._weighted)
        by_rank = zip(outgoing.header.view(WORD).unbind(), self.sender.words(outgoing.ids, to_ranks), strict=True)
        messages = [(header, *columns) for header, columns in by_rank]
        return SentIds(batch, comm.exchange_messages(messages, self._context.group))

    def finish(self, sent: SentIds) -> RankIds:
        """Waits for this rank's lookups.

        Raises (on every rank):
            Exception: a rank could not route its batch, or is at another batch or in another collection.
        """
        batch, outgoing = sent.batch, sent.batch.outgoing.item
        sent_headers: Headers = outgoing.header.tolist()
        units, chunks = batch.units, batch.chunks
        if self.on_cpu and self._find_units is not None:  # while ids travel
            units = self._find_units(outgoing)
        messages = None if sent.wait is None else sent.wait()
        received = sent_headers
        if batch.received is not None:
            received = batch.received.item
        elif messages is not None:
            width = outgoing.header.shape[1] * (outgoing.header.element_size() // WORD_BYTES)
            starts = [message[:width] for message in messages]
            if any(len(start) < width for start in starts):  # a message of another collection
                starts = [F.pad(start, (0, width - len(start))) for start in starts]
            received = torch.cat(starts).view(torch.int64).view(len(messages), -1).tolist()
        own = received[self._context.rank][NUMBER : COLLECTION + 1]
        if any(header[FAILED] or header[NUMBER : COLLECTION + 1] != own for header in received):
            self._raise_for(outgoing, received)
        batch_sizes = [header[BATCH] for header in received]
        if self.on_cpu and min(batch_sizes) < max(batch_sizes):
            chunks = self._receiver.chunks(received)
        weights = batch.weights
        if sent.arrived is not None and batch.word_counts is not None:
            sizes = [size for counts in batch.word_counts.item[1] for size in counts]
            ids = _ids_from(sent.arrived.split(sizes), self._weighted)
        else:
            assert outgoing.ids is not None
            ids, weights = outgoing.ids, outgoing.ids.weights
            if messages is not None:
                parts = zip(messages, part_sizes(received, self._streams, self._weighted), strict=True)
                words = [column for message, sizes in parts for column in message[width:].split(sizes)]
                ids = _ids_from(words, self._weighted)
        trained = None
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            counts_to, counts_from = ([header[VALUES] for header in headers] for headers in (sent_headers, received))
            trained = weights.to(ids.values.device)
            if not self.alone:
                trained = _Weights.apply(weights, ids.weights, counts_to, counts_from, self._context.group)
            ids = replace(ids, weights=trained)
        return RankIds(
            lookups=self._receiver.order(ids, received, chunks),
            sent=sent_headers,
            received=received,
            batch_sizes=batch_sizes,
            counts=[header[len(header) - self._num_counts :] for header in received],
            kept=batch.kept,
            weights=None if self.alone else trained,
            units=units,
            features=sent.features,
        )

    def _raise_for(self, outgoing: OutgoingIds, received: Headers) -> None:
        """Raises because a rank failed, or is at another batch or in another collection."""
        failed = [rank for rank, header in enumerate(received) if header[FAILED]]
        if outgoing.error is not None:
            raise outgoing.error
        if failed:
            raise ValueError(f"rank {failed[0]} cannot process its batch; see its error")
        number, collection = received[self._context.rank][NUMBER : COLLECTION + 1]
        astray = next((rank for rank, header in enumerate(received) if header[COLLECTION] != collection), None)
        if astray is not None:
            raise ValueError(
                f"rank {astray} calls another collection than rank {self._context.rank}, which calls {self.name}: "
                "every rank must call the collections in the same order"
            )
        behind = next((rank for rank, header in enumerate(received) if header[NUMBER] != number), None)
        if behind is not None:
            raise ValueError(
                f"rank {behind} is at batch {received[behind][NUMBER]} of {self.name}, rank {self._context.rank} is at "
                f"batch {number}: every rank must call a collection equally often"
            )


class _Weights(torch.autograd.Function):
    """Received weights. Backward sends their gradients to the ranks that sent them, in one exchange of all ranks."""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, arrived: torch.Tensor, *sizes: Any) -> torch.Tensor:
        ctx.sizes, ctx.like = sizes, (sent.device, sent.dtype)
        return arrived.view_as(arrived)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        counts_to, counts_from, group = ctx.sizes
        (grad,) = grads
        out = grad.new_empty(sum(counts_to))
        comm.all_to_all(out, grad.contiguous(), counts_to, counts_from, group)()
        # The vectors' gradients were divided by the number of ranks, which averages the tables' updates. The dense
        # parameters behind the weights are averaged by DistributedDataParallel, so the division is undone here.
        return out.mul_(len(counts_to)).to(*ctx.like), None, None, None, None


def _ids_from(words: Sequence[torch.Tensor], weighted: bool) -> Ids:
    """The ids of all messages. `words` are the ids, lengths and, if `weighted`, weights of each message in turn."""
    columns = [words[number :: 2 + weighted] for number in range(2 + weighted)]
    sizes = [sum(map(len, column)) for column in columns]
    values, lengths, *weights = torch.cat([words for column in columns for words in column]).split(sizes)
    return Ids(lengths, values.view(torch.int64), weights[0].view(torch.float32) if weighted else None)


class IdReceiver:
    """Puts received ids in the order of this rank's lookups.

    Args:
        routes: routes of the collection.
        rank: rank of this process.
        device: device of the ids.
        sources: order of the ranks.
        rank_by_rank: whether a kernel group is ordered by rank, then by lookup; else by lookup, then by rank.
    """

    def __init__(
        self, routes: Routes, rank: int, device: torch.device, sources: Sequence[int], rank_by_rank: bool
    ) -> None:
        route = routes.ranks[rank]
        self._streams = len(route.streams)
        lookups_of = {group: route.lookups_of(group) for group in route.tables}
        self._groups = [(group, len(lookups)) for group, lookups in lookups_of.items()]
        order = []
        for lookups in lookups_of.values():
            if rank_by_rank:
                order += [source * self._streams + lookup.stream for source in sources for lookup in lookups]
            else:
                order += [source * self._streams + lookup.stream for lookup in lookups for source in sources]
        self._order = torch.tensor(order, dtype=torch.int32, device=device)
        self._num_rows = len(routes.ranks) * self._streams
        self._in_order = order == list(range(self._num_rows))

    def chunks(self, received: Headers) -> torch.Tensor | None:
        """Number of examples of each stream of each rank, on the host; None if all ranks have the same number."""
        batch_sizes = [header[BATCH] for header in received]
        if len(set(batch_sizes)) == 1:
            return None
        return torch.tensor(batch_sizes, dtype=torch.int32).repeat_interleave(self._streams)

    def order(self, ids: Ids, received: Headers, chunks: torch.Tensor | None) -> dict[int, Lookups]:
        """This rank's lookups, by kernel group.

        Args:
            ids: ids of every rank; lists ordered by rank, then by stream.
            received: every rank's header.
            chunks: result of `chunks` for these headers, on the device.
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
            group_weights = None if weights is None else weights[value:next_value]
            out[group] = Lookups(values[value:next_value], offsets[bag : next_bag + 1] - offsets[bag], group_weights)
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
        # Ranks have batches of different sizes, so rows are chunks of unequal length.
        ends = chunks.cumsum(0)
        starts = ops.complete_cumsum(lengths)
        totals = (starts[ends] - starts[ends - chunks]).to(torch.int32)
        num_lengths = sum(num for _, num in self._groups) * (lengths.numel() // self._streams)
        return (
            ops.permute_chunks(self._order, chunks, lengths, num_values=num_lengths),
            ops.permute_chunks(self._order, totals, values, num_values=num_values),
            None if weights is None else ops.permute_chunks(self._order, totals, weights, num_values=num_values),
        )
