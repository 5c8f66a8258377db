"""The first half of a step: every id to the ranks that hold its row.

Two collectives, whatever the plan: a small header (how much follows), then one message that carries lengths, ids and
weights together. A rank that finds a bad id says so in the header, so that all ranks stop with an error instead of
waiting for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from rayrec.distributed import comm
from rayrec.distributed.awaitable import Awaitable
from rayrec.distributed.kernel import Lookups
from rayrec.distributed.sharding.routing import Routes
from rayrec.distributed.sharding.weight_exchange import with_way_back
from rayrec.sparse import KeyedJaggedTensor, ops

# columns of a header, before one count for each kernel group and one for each group of replicated tables
VALUES, BATCH, BAD, GROUPS = 0, 1, 2, 3


@dataclass(frozen=True)
class Trace:
    """Where this rank's own ids went, so that vectors can be put back in their places.

    Args:
        lengths_F: ids of each of the routes' features.
        lengths_S: ids of each stream that was sent: the streams of rank 0, then of rank 1 …
        origins: for each id sent, its place among the ids of the features.
        asked: for each rank, how many of its ids this rank looks up, by kernel group.
        sent: for each rank, how many of this rank's ids it looks up, by kernel group.
    """

    lengths_F: torch.Tensor
    lengths_S: torch.Tensor
    origins: torch.Tensor
    asked: list[list[int]]
    sent: list[list[int]]


@dataclass(frozen=True)
class RoutedIds:
    """What this rank looks up.

    Args:
        lookups: for each kernel group that this rank has, the ids of its lookups over the global batch.
        batch_sizes: examples of each rank, in rank order.
        row_counts: for each rank, the counts it announced in its header.
        trace: where this rank's own ids went, if the exchange keeps track.
        weights: all arrived weights where they need gradients; backward must reach them on every rank.
    """

    lookups: Mapping[int, Lookups]
    batch_sizes: list[int]
    row_counts: list[list[int]]
    trace: Trace | None = None
    weights: torch.Tensor | None = None


@dataclass(frozen=True)
class _Outgoing:
    lengths_SB: torch.Tensor  # streams of rank 0, then of rank 1 …
    values: torch.Tensor
    weights: torch.Tensor | None
    header: torch.Tensor  # [W, GROUPS + groups]
    problem: ValueError | None
    lengths_FB: torch.Tensor
    origins: torch.Tensor | None


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
    ) -> None:
        self.routes, self.group, self.rank = routes, group, rank
        self._weighted, self._num_counts, self._device = weighted, num_counts, device
        self._sender = _Sender(routes, num_counts, device, traced)
        self.receiver = _Receiver(routes, rank, device)
        self._key_orders: dict[tuple[str, ...], torch.Tensor | None] = {}

    def start(
        self, kjt: KeyedJaggedTensor, counts: torch.Tensor | None = None, problem: ValueError | None = None
    ) -> Awaitable[RoutedIds]:
        """Begins to send; what comes back waits for this rank's own lookups.

        Args:
            kjt: every feature of the routes, among others.
            counts: int64 numbers that every rank is told.
            problem: why this rank cannot go on; `wait` then raises on every rank.
        """
        outgoing = self._sender.pack(*self._features(kjt), counts, problem)
        received = torch.empty_like(outgoing.header)
        wait = comm.all_to_all(received.view(-1), outgoing.header.view(-1), None, None, self.group)
        return _Exchange(self, outgoing, received, wait)

    def _features(self, kjt: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Lengths `[F, B]`, values and weights of the routes' features in their own order."""
        keys = tuple(kjt.keys())
        if keys not in self._key_orders:
            order = [kjt.index_per_key()[feature] for feature in self.routes.features]
            natural = order == list(range(len(keys)))
            self._key_orders[keys] = None if natural else torch.tensor(order, dtype=torch.int32, device=self._device)
        weights = kjt.weights() if self._weighted else None
        lengths_FB, values = kjt.lengths().view(len(keys), kjt.stride()), kjt.values()
        order_tensor = self._key_orders[keys]
        if order_tensor is None:
            return lengths_FB, values, weights
        if not self.routes.features:
            return lengths_FB[:0], values[:0], None if weights is None else weights[:0]
        return ops.permute_segments(order_tensor, lengths_FB, values, weights)


class _Sender:
    """Puts ids in the order in which ranks receive them."""

    def __init__(self, routes: Routes, num_counts: int, device: torch.device, traced: bool) -> None:
        self._routes, self._device, self._traced = routes, device, traced
        self._header_width = GROUPS + routes.num_groups + num_counts
        features = {feature: place for place, feature in enumerate(routes.features)}
        cut = [variant for variant in routes.variants if variant.edges is not None]
        self._cut_features = torch.tensor([features[v.feature] for v in cut], dtype=torch.int32, device=device)
        self._num_cut = len(cut)
        self._all_cut = [features[v.feature] for v in cut] == list(range(len(features)))
        edges = [v.edges for v in cut if v.edges is not None]
        self._num_buckets = max((len(e) - 1 for e in edges), default=0)
        self._blocks = [e[1] - e[0] for e in edges]
        self._edges = None if all(_even(e) for e in edges) else [_padded(e, self._num_buckets) for e in edges]
        cut_place = {variant: place for place, variant in enumerate(cut)}
        rows = []  # of [raw features | bucket 0 of every cut variant | bucket 1 …], in the order of ranks and streams
        for route in routes.ranks:
            for stream in route.streams:
                variant = routes.variants[stream.variant]
                if variant.edges is None:
                    rows.append(features[variant.feature])
                else:
                    rows.append(len(features) + stream.bucket * len(cut) + cut_place[variant])
        raw_only = not cut and rows == list(range(len(features)))
        self._order = None if raw_only else torch.tensor(rows, dtype=torch.int32, device=device)
        self._slots, self._sources = self._header_slots()
        self._dtype_tensors: dict[torch.dtype, tuple[torch.Tensor, list[torch.Tensor] | None]] = {}

    def _header_slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For the flat header, which entry each (repeated) stream total is added to."""
        width = self._header_width
        slots, sources, first = [], [], 0
        for rank, route in enumerate(self._routes.ranks):
            for place in range(len(route.streams)):
                slots.append(rank * width + VALUES)
                sources.append(first + place)
            for lookup in route.lookups:
                slots.append(rank * width + GROUPS + lookup.group)
                sources.append(first + lookup.stream)
            first += len(route.streams)
        int64, device = torch.int64, self._device  # of empty lists, too
        return torch.tensor(slots, dtype=int64, device=device), torch.tensor(sources, dtype=int64, device=device)

    def pack(
        self,
        lengths_FB: torch.Tensor,
        values: torch.Tensor,
        weights: torch.Tensor | None,
        counts: torch.Tensor | None,
        problem: ValueError | None,
    ) -> _Outgoing:
        batch, given_FB = lengths_FB.shape[1], lengths_FB
        origins = torch.arange(values.numel(), device=values.device) if self._traced else None
        if self._num_cut:
            lengths_FB, values, weights, origins = self._with_buckets(lengths_FB, values, weights, origins)
        if self._order is not None:
            if origins is not None:
                origins = ops.permute_segments(self._order, lengths_FB, origins)[1]
            lengths_FB, values, weights = ops.permute_segments(self._order, lengths_FB, values, weights)
        header = torch.zeros(len(self._routes.ranks), self._header_width, dtype=torch.int64, device=self._device)
        totals = lengths_FB.sum(1, dtype=torch.int64)
        header.view(-1).index_add_(0, self._slots, totals[self._sources])
        header[:, BATCH] = batch
        header[:, BAD] = int(problem is not None)
        if counts is not None:
            header[:, GROUPS + self._routes.num_groups :] = counts
        return _Outgoing(lengths_FB, values, weights, header, problem, given_FB, origins)

    def _with_buckets(
        self,
        lengths_FB: torch.Tensor,
        values: torch.Tensor,
        weights: torch.Tensor | None,
        origins: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The raw features, followed by every cut variant's buckets."""
        batch = lengths_FB.shape[1]
        cut_lengths, cut_values, cut_weights = lengths_FB, values, weights
        if not self._all_cut:
            cut_lengths, cut_values, cut_weights = ops.permute_segments(self._cut_features, lengths_FB, values, weights)
        blocks, edges = self._buckets(values.dtype)
        lengths, ids, ws, positions = ops.bucketize_rows(
            cut_lengths.reshape(-1), cut_values, cut_weights, blocks, self._num_buckets, edges, origins is not None
        )
        if origins is not None and positions is not None:
            cut = origins if self._all_cut else ops.permute_segments(self._cut_features, lengths_FB, origins)[1]
            origins = torch.cat([origins, torch.empty_like(cut).index_copy_(0, positions.to(torch.int64), cut)])
        lengths = lengths.view(self._num_buckets * self._num_cut, batch)
        joined = None if weights is None or ws is None else torch.cat([weights, ws])
        return torch.cat([lengths_FB, lengths]), torch.cat([values, ids]), joined, origins

    def _buckets(self, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        if dtype not in self._dtype_tensors:
            edges = self._edges
            self._dtype_tensors[dtype] = (
                torch.tensor(self._blocks, dtype=dtype, device=self._device),
                None if edges is None else [torch.tensor(e, dtype=dtype, device=self._device) for e in edges],
            )
        return self._dtype_tensors[dtype]


def _even(edges: Sequence[int]) -> bool:
    sizes = [b - a for a, b in zip(edges, edges[1:], strict=False)]
    return len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]


def _padded(edges: Sequence[int], num_buckets: int) -> list[int]:
    return [*edges, *[edges[-1]] * (num_buckets + 1 - len(edges))]


class _Exchange(Awaitable[RoutedIds]):
    """Header sent; `wait` sends the ids themselves and puts what arrives in the order of this rank's lookups."""

    def __init__(self, parent: IdExchange, outgoing: _Outgoing, received: torch.Tensor, wait: comm.Wait) -> None:
        self._parent, self._outgoing, self._received, self._wait_header = parent, outgoing, received, wait

    def _wait_impl(self) -> RoutedIds:
        parent, outgoing = self._parent, self._outgoing
        self._wait_header()
        sent, received = torch.stack([outgoing.header, self._received]).tolist()
        bad = [rank for rank, header in enumerate(received) if header[BAD]]
        if bad:
            raise outgoing.problem or ValueError(f"rank {bad[0]} was given an id outside its table; see its error")
        streams = [len(route.streams) for route in parent.routes.ranks]
        if len(streams) == 1 or not any(streams):
            parts = [_Part(outgoing.lengths_SB, outgoing.values, outgoing.weights)]
        else:
            parts = _swap(parent.group, outgoing, sent, received, streams, parent.rank)
        parts, weights = self._trainable(parts, sent, received) if len(streams) > 1 else (parts, None)
        routed = replace(parent.receiver.order(parts, received), weights=weights)
        if outgoing.origins is None:
            return routed
        counts = slice(GROUPS, GROUPS + parent.routes.num_groups)
        trace = Trace(
            lengths_F=outgoing.lengths_FB.view(-1),
            lengths_S=outgoing.lengths_SB.view(-1),
            origins=outgoing.origins,
            asked=[header[counts] for header in received],
            sent=[header[counts] for header in sent],
        )
        return replace(routed, trace=trace)

    def _trainable(
        self, parts: list[_Part], sent: list[list[int]], received: list[list[int]]
    ) -> tuple[list[_Part], torch.Tensor | None]:
        """Parts whose weights hand their gradients back, and all these weights, where the weights need gradients."""
        weights = self._outgoing.weights
        if weights is None or not weights.requires_grad or not torch.is_grad_enabled() or len(parts) == 1:
            return parts, None
        counts = [header[VALUES] for header in received]
        arrived = torch.cat([part.weights for part in parts if part.weights is not None])
        back = with_way_back(weights, arrived, [header[VALUES] for header in sent], counts, self._parent.group)
        return [replace(part, weights=w) for part, w in zip(parts, back.split(counts), strict=True)], back


@dataclass(frozen=True)
class _Part:
    """What one rank sent: lengths `[S, B]` of its examples in this rank's streams."""

    lengths_SB: torch.Tensor
    values: torch.Tensor
    weights: torch.Tensor | None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def _swap(
    group: comm.Group,
    outgoing: _Outgoing,
    sent: list[list[int]],
    received: list[list[int]],
    streams: list[int],
    me: int,
) -> list[_Part]:
    """One message to every rank: lengths (int32), ids, weights (float32), each part padded to 8 bytes."""
    dtype, weighted = outgoing.values.dtype, outgoing.weights is not None
    lengths = _bytes(outgoing.lengths_SB.to(torch.int32))
    values = _bytes(outgoing.values)
    weights = _bytes(outgoing.weights.to(torch.float32)) if outgoing.weights is not None else None
    batch, item = outgoing.lengths_SB.shape[1], outgoing.values.element_size()
    padding = lengths.new_zeros(8)
    pieces, splits, row, value = [], [], 0, 0
    for num_streams, (count, *_) in zip(streams, sent, strict=True):
        pieces.append(lengths[4 * row : 4 * row + 4 * num_streams * batch])
        pieces.append(padding[: _aligned(pieces[-1].numel()) - pieces[-1].numel()])
        pieces.append(values[item * value : item * (value + count)])
        pieces.append(padding[: _aligned(pieces[-1].numel()) - pieces[-1].numel()])
        if weights is not None:
            pieces.append(weights[4 * value : 4 * (value + count)])
            pieces.append(padding[: _aligned(pieces[-1].numel()) - pieces[-1].numel()])
        row, value = row + num_streams * batch, value + count
        splits.append(_message_bytes(num_streams * batch, count, item, weighted))
    message = torch.cat(pieces)
    sizes = [_message_bytes(streams[me] * header[BATCH], header[VALUES], item, weighted) for header in received]
    arrived = message.new_empty(sum(sizes))
    comm.all_to_all(arrived, message, sizes, splits, group)()
    starts = [0, *accumulate(sizes)]
    return [
        _unpack(arrived[start:], streams[me], header[BATCH], header[VALUES], dtype, weighted)
        for start, header in zip(starts, received, strict=False)
    ]


def _message_bytes(num_lengths: int, count: int, item: int, weighted: bool) -> int:
    return _aligned(4 * num_lengths) + _aligned(item * count) + (_aligned(4 * count) if weighted else 0)


def _unpack(
    message: torch.Tensor, num_streams: int, batch: int, count: int, dtype: torch.dtype, weighted: bool
) -> _Part:
    num_lengths = num_streams * batch
    at = _aligned(4 * num_lengths)
    lengths = message[: 4 * num_lengths].view(torch.int32).view(num_streams, batch)
    values = message[at : at + dtype.itemsize * count].view(dtype)
    at += _aligned(dtype.itemsize * count)
    weights = message[at : at + 4 * count].view(torch.float32) if weighted else None
    return _Part(lengths, values, weights)


class _Receiver:
    """Puts what arrives in the order of this rank's lookups: lookup after lookup, rank after rank."""

    def __init__(self, routes: Routes, rank: int, device: torch.device) -> None:
        route = routes.ranks[rank]
        self._first_count = GROUPS + routes.num_groups
        self._groups = [(group, len(route.lookups_of(group))) for group in route.tables]
        world, streams = len(routes.ranks), len(route.streams)
        order = [source * streams + lookup.stream for lookup in route.lookups for source in range(world)]
        self._order = torch.tensor(order, dtype=torch.int32, device=device)
        self._in_order = order == list(range(world * streams))

    def order(self, parts: Sequence[_Part], headers: Sequence[Sequence[int]]) -> RoutedIds:
        batch_sizes = [header[BATCH] for header in headers]
        row_counts = [list(header[self._first_count :]) for header in headers]
        if not self._groups:
            return RoutedIds({}, batch_sizes, row_counts)
        first = parts[0]
        values = first.values if len(parts) == 1 else torch.cat([part.values for part in parts])
        weights = None
        if first.weights is not None:
            weights = torch.cat([part.weights for part in parts if part.weights is not None])
        counts = {group: sum(header[GROUPS + group] for header in headers) for group, _ in self._groups}
        lengths, values, weights = self._permuted(parts, values, weights, batch_sizes, sum(counts.values()))
        offsets = ops.complete_cumsum(lengths.to(values.dtype))
        lookups = self._by_group(offsets, values, weights, counts, sum(batch_sizes))
        return RoutedIds(lookups, batch_sizes, row_counts)

    def _permuted(
        self,
        parts: Sequence[_Part],
        values: torch.Tensor,
        weights: torch.Tensor | None,
        batch_sizes: Sequence[int],
        num_values: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        if len(set(batch_sizes)) == 1:
            lengths_RB = parts[0].lengths_SB if len(parts) == 1 else torch.cat([part.lengths_SB for part in parts])
            if self._in_order:
                return lengths_RB.reshape(-1), values, weights
            lengths, values, weights = ops.permute_segments(self._order, lengths_RB, values, weights, num_values)
            return lengths.view(-1), values, weights
        # ranks brought batches of different size: rows are chunks of unequal length
        lengths = torch.cat([part.lengths_SB.reshape(-1) for part in parts])
        streams = parts[0].lengths_SB.shape[0]
        sizes = torch.tensor(batch_sizes, dtype=torch.int32, device=lengths.device).repeat_interleave(streams)
        totals = torch.cat([part.lengths_SB.sum(1, dtype=torch.int32) for part in parts])
        return (
            ops.permute_chunks(self._order, sizes, lengths),
            ops.permute_chunks(self._order, totals, values),
            None if weights is None else ops.permute_chunks(self._order, totals, weights),
        )

    def _by_group(
        self,
        offsets: torch.Tensor,
        values: torch.Tensor,
        weights: torch.Tensor | None,
        counts: Mapping[int, int],
        batch: int,
    ) -> dict[int, Lookups]:
        if len(self._groups) == 1:
            return {self._groups[0][0]: Lookups(values, offsets, weights)}
        out, bag, value = {}, 0, 0
        for group, num_lookups in self._groups:
            next_bag, next_value = bag + num_lookups * batch, value + counts[group]
            part = None if weights is None else weights[value:next_value]
            out[group] = Lookups(values[value:next_value], offsets[bag : next_bag + 1] - offsets[bag], part)
            bag, value = next_bag, next_value
        return out
