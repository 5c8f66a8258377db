"""A batch's ids, sorted by the ranks that hold their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed.ids.message import BAD, BATCH, GROUPS, VALUES, Ids
from rayrec.distributed.ids.routes import Routes
from rayrec.sparse import ops


@dataclass(frozen=True)
class Notice:
    """What all ranks are told with a batch's ids.

    Args:
        counts: int64 numbers, equally many on all ranks.
        problem: why this rank cannot go on; every rank then raises.
    """

    counts: torch.Tensor | None = None
    problem: ValueError | None = None


@dataclass(frozen=True)
class Outgoing:
    """A batch in the order in which ranks receive it.

    Args:
        ids: streams of rank 0, then of rank 1 …, lengths `[streams, B]`.
        header: int64, one row a rank: the columns of `id_message`, then the counts.
        problem: why this rank cannot go on.
        lengths_FB: of the features, as they came.
        origins: for each of `ids`, its place among the ids that came; None where nobody asks.
    """

    ids: Ids
    header: torch.Tensor
    problem: ValueError | None
    lengths_FB: torch.Tensor
    origins: torch.Tensor | None


class Sender:
    """Puts ids in the order in which ranks receive them, on the host.

    Args:
        routes: of the collection.
        traced: also note where each id goes.
    """

    def __init__(self, routes: Routes, traced: bool) -> None:
        self._routes, self._traced = routes, traced
        self._header_width = GROUPS + routes.num_groups
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
        rows = []  # of [raw features | bucket 0 of every cut variant | bucket 1 …], in the order of ranks and streams
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
        int64 = torch.int64  # of empty lists, too
        return torch.tensor(slots, dtype=int64), torch.tensor(sources, dtype=int64)

    def pack(self, given: Ids, notice: Notice) -> Outgoing:
        """The features' ids, lengths `[F, B]`, ready to leave."""
        ids = given
        origins = torch.arange(given.values.numel()) if self._traced else None
        if self._num_cut:
            ids, origins = self._with_buckets(given, origins)
        if self._order is not None:
            if origins is not None:
                origins = ops.permute_segments(self._order, ids.lengths, origins)[1]
            ids = Ids(*ops.permute_segments(self._order, ids.lengths, ids.values, ids.weights))
        row = [0] * self._header_width
        row[BATCH], row[BAD] = given.lengths.shape[1], int(notice.problem is not None)
        header = torch.tensor([row] * len(self._routes.ranks))
        totals = ids.lengths.sum(1, dtype=torch.int64)
        header.view(-1).index_add_(0, self._slots, totals.index_select(0, self._sources))
        if notice.counts is not None:
            header = torch.cat([header, notice.counts.expand(header.shape[0], -1)], dim=1)
        return Outgoing(ids, header, notice.problem, given.lengths, origins)

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


def _even(edges: Sequence[int]) -> bool:
    sizes = [b - a for a, b in zip(edges, edges[1:], strict=False)]
    return len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]
