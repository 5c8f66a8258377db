"""A batch's ids in the order in which they leave: the wanted features, split by the ranks that hold their rows.

A message for a rank is a header and a part. The header has counts (int64); the part has ids (int64), lengths (int32)
and, where ids carry weights, weights (float32). Messages are tensors of 4-byte words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayrec.distributed.comm.wire import ID_BYTES, LENGTH_BYTES, WEIGHT_BYTES
from rayrec.distributed.ids.batch import (
    BATCH,
    FAILED,
    GROUPS,
    NUMBER,
    VALUES,
    WORD,
    WORD_BYTES,
    Headers,
    Ids,
    OutgoingIds,
)
from rayrec.distributed.ids.routes import Output, Routes
from rayrec.modules import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType
from rayrec.sparse import KeyedJaggedTensor, ops


class FeatureOrder:
    """Selects features of batches on the host; caches the places for each list of keys.

    Args:
        features: wanted, in order; a feature may come several times.
        weighted: ids carry weights.
    """

    def __init__(self, features: Sequence[str], weighted: bool) -> None:
        self._features, self._weighted = tuple(features), weighted
        self._orders: dict[tuple[str, ...], torch.Tensor | None] = {}

    def of(self, kjt: KeyedJaggedTensor) -> Ids:
        """The features' ids: lengths `[F, B]`, int64 values."""
        keys = tuple(kjt.keys())
        if keys not in self._orders:
            order = [kjt.index_per_key()[feature] for feature in self._features]
            in_order = order == list(range(len(keys)))
            self._orders[keys] = None if in_order else torch.tensor(order, dtype=torch.int32)
        order_F = self._orders[keys]
        weights = kjt.weights() if self._weighted else None
        lengths_FB, values = kjt.lengths().view(len(keys), kjt.stride()), kjt.values().to(torch.int64)
        if order_F is None:
            return Ids(lengths_FB, values, weights)
        if not self._features:
            return Ids(lengths_FB[:0], values[:0], None if weights is None else weights[:0])
        return Ids(*ops.permute_segments(order_F, lengths_FB, values, weights))


class MeanScale:
    """Makes means of sums: kernels only add up, and a bag's whole length is known on the rank of its example.

    Args:
        tables: of the outputs, among others.
        outputs: in the order of factors.
    """

    def __init__(self, tables: Sequence[BaseEmbeddingConfig], outputs: Sequence[Output]) -> None:
        means = {t.name for t in tables if isinstance(t, EmbeddingBagConfig) and t.pooling is PoolingType.MEAN}
        self._features = [output.feature for output in outputs]
        self._sums = [place for place, output in enumerate(outputs) if output.table not in means]
        self._orders: dict[tuple[str, ...], list[int]] = {}

    def of(self, kjt: KeyedJaggedTensor) -> torch.Tensor | None:
        """Factors `[B, E]`: 1 / length for a mean, 1 for a sum; None if every output is a sum. An empty bag's is 1."""
        if len(self._sums) == len(self._features):
            return None
        keys = tuple(kjt.keys())
        if keys not in self._orders:
            self._orders[keys] = [kjt.index_per_key()[feature] for feature in self._features]
        lengths_EB = kjt.lengths().view(len(keys), kjt.stride())[self._orders[keys]]
        factors_BE = 1 / lengths_EB.t().clamp(min=1).to(torch.float32)
        if self._sums:
            factors_BE[:, self._sums] = 1
        return factors_BE


class IdSender:
    """Puts ids in the order in which ranks receive them, on the host.

    Args:
        routes: of the collection.
        weighted: ids carry weights.
        traced: also record where each id goes.
        num_counts: how many counts a header has.
    """

    def __init__(self, routes: Routes, weighted: bool, traced: bool, num_counts: int) -> None:
        self._routes, self._weighted, self._traced, self._num_counts = routes, weighted, traced, num_counts
        self._packed = 0  # batches so far, by which ranks check that they are at the same one
        self._features = FeatureOrder(routes.features, weighted)
        self._header_width = GROUPS + routes.num_groups
        self._streams = [len(route.streams) for route in routes.ranks]
        features = {feature: place for place, feature in enumerate(routes.features)}
        cut = [variant for variant in routes.variants if variant.edges is not None]
        self._cut_features = torch.tensor([features[v.feature] for v in cut], dtype=torch.int32)
        self._num_cut = len(cut)
        self._all_cut = [features[v.feature] for v in cut] == list(range(len(features)))
        edges = [v.edges for v in cut if v.edges is not None]
        self._num_buckets = max((len(e) - 1 for e in edges), default=0)
        self._blocks = torch.tensor([e[1] - e[0] for e in edges], dtype=torch.int64)
        padded = [torch.tensor([*e, *[e[-1]] * (self._num_buckets + 1 - len(e))]) for e in edges]
        self._edges = None if all(_even(e) for e in edges) else padded
        cut_place = {variant: place for place, variant in enumerate(cut)}
        rows = []  # of [raw features | bucket 0 of every cut variant | bucket 1 ...], in the order of ranks and streams
        for route in routes.ranks:
            for stream in route.streams:
                variant = routes.variants[stream.variant]
                if variant.edges is None:
                    rows.append(features[variant.feature])
                else:
                    rows.append(len(features) + stream.bucket * len(cut) + cut_place[variant])
        self._first_row = 0 if any(row < len(features) for row in rows) else len(features) * bool(cut)
        every = list(range(self._first_row, len(features) + self._num_buckets * len(cut)))
        self._order = None if rows == every else torch.tensor(rows, dtype=torch.int32) - self._first_row
        self._slots, self._sources = self._header_slots()

    def _header_slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For the flat header, the entry to which each (repeated) stream total is added."""
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
        return torch.tensor(slots, dtype=torch.int64), torch.tensor(sources, dtype=torch.int64)

    def pack(self, kjt: KeyedJaggedTensor, counts: Sequence[int]) -> OutgoingIds:
        """A batch, ready to leave.

        Args:
            kjt: every feature of the routes, among others; on the host.
            counts: of this batch, `num_counts` numbers for every rank.
        """
        given = ids = self._features.of(kjt)
        origins = torch.arange(given.values.numel()) if self._traced else None
        if self._num_cut:
            ids, origins = self._with_buckets(given, origins)
        if self._order is not None:
            if origins is not None:
                origins = ops.permute_segments(self._order, ids.lengths, origins)[1]
            ids = Ids(*ops.permute_segments(self._order, ids.lengths, ids.values, ids.weights))
        row = [0] * self._header_width
        row[NUMBER], row[BATCH] = self._packed + 1, given.lengths.shape[1]
        header = torch.tensor([row] * len(self._streams))
        totals = ids.lengths.sum(1, dtype=torch.int64)
        header.view(-1).index_add_(0, self._slots, totals.index_select(0, self._sources))
        if counts:
            header = torch.cat([header, torch.tensor(counts).expand(header.shape[0], -1)], dim=1)
        self._packed += 1
        return OutgoingIds(ids, header, None, given.lengths, origins)

    def pack_nothing(self, error: Exception) -> OutgoingIds:
        """A batch without examples, in place of one that cannot be sent: its header makes every rank raise."""
        self._packed += 1
        header = torch.zeros(len(self._streams), self._header_width, dtype=torch.int64)
        header[:, NUMBER], header[:, FAILED] = self._packed, 1
        values = torch.empty(0, dtype=torch.int64)
        ids = Ids(values.new_empty(sum(self._streams), 0), values, values.float() if self._weighted else None)
        return OutgoingIds(ids, torch.cat([header, header.new_zeros(len(header), self._num_counts)], dim=1), error)

    def words(self, outgoing: OutgoingIds) -> tuple[list[list[torch.Tensor]], list[int]]:
        """For each rank the tensors of its part, as words, and how many words they are."""
        ids = outgoing.ids
        sizes = part_sizes(outgoing.header.tolist(), self._streams, self._weighted)
        columns = [ids.values, ids.lengths.to(torch.int32)]
        columns += [] if ids.weights is None else [ids.weights.detach().to(torch.float32)]
        flat = [ops.as_words(column, WORD) for column in columns]
        pieces = [column.split(of_ranks) for column, of_ranks in zip(flat, zip(*sizes, strict=True), strict=True)]
        return [list(part) for part in zip(*pieces, strict=True)], [sum(of_rank) for of_rank in sizes]

    def _with_buckets(self, given: Ids, origins: torch.Tensor | None) -> tuple[Ids, torch.Tensor | None]:
        """Every cut variant's buckets, after the raw features if some rank receives one of them."""
        cut = given
        if not self._all_cut:
            cut = Ids(*ops.permute_segments(self._cut_features, given.lengths, given.values, given.weights))
        lengths, values, weights, positions = ops.bucketize_rows(
            cut.lengths.reshape(-1),
            cut.values,
            cut.weights,
            self._blocks,
            self._num_buckets,
            self._edges,
            origins is not None,
        )
        if origins is not None and positions is not None:
            of_cut = origins
            if not self._all_cut:
                of_cut = ops.permute_segments(self._cut_features, given.lengths, origins)[1]
            moved = torch.empty_like(of_cut).index_copy_(0, positions.to(torch.int64), of_cut)
            origins = moved if self._first_row else torch.cat([origins, moved])
        lengths = lengths.view(self._num_buckets * self._num_cut, given.lengths.shape[1])
        if self._first_row:
            return Ids(lengths, values, weights), origins
        joined = None if given.weights is None or weights is None else torch.cat([given.weights, weights])
        return Ids(torch.cat([given.lengths, lengths]), torch.cat([given.values, values]), joined), origins


def part_sizes(headers: Headers, streams: Sequence[int], weighted: bool) -> list[list[int]]:
    """For each of W parts the words of its ids, of its lengths and, if `weighted`, of its weights.

    Args:
        headers: of all parts.
        streams: how many streams the receiver of each has.
    """
    sizes = []
    for (count, batch, *_), num_streams in zip(headers, streams, strict=True):
        words = [count * (ID_BYTES // WORD_BYTES), batch * num_streams * (LENGTH_BYTES // WORD_BYTES)]
        sizes.append([*words, count * (WEIGHT_BYTES // WORD_BYTES)] if weighted else words)
    return sizes


def _even(edges: Sequence[int]) -> bool:
    sizes = [b - a for a, b in zip(edges, edges[1:], strict=False)]
    return len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]
