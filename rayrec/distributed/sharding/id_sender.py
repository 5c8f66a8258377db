"""A batch's ids, sorted by the ranks that hold their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed.sharding.id_message import BAD, BATCH, GROUPS, VALUES, Part
from rayrec.distributed.sharding.routing import Routes
from rayrec.sparse import ops


@dataclass(frozen=True)
class Outgoing:
    """A batch in the order in which ranks receive it.

    Args:
        part: streams of rank 0, then of rank 1 …
        header: int64, one row a rank: the columns of `id_message`, then the counts.
        problem: why this rank cannot go on.
        lengths_FB: of the features, as they came.
        origins: for each id of `part`, its place among the ids that came; None where nobody asks.
    """

    part: Part
    header: torch.Tensor
    problem: ValueError | None
    lengths_FB: torch.Tensor
    origins: torch.Tensor | None


class Sender:
    """Puts ids in the order in which ranks receive them, on the host."""

    def __init__(self, routes: Routes, num_counts: int) -> None:
        self._routes = routes
        self._header_width = GROUPS + routes.num_groups + num_counts
        features = {feature: place for place, feature in enumerate(routes.features)}
        cut = [variant for variant in routes.variants if variant.edges is not None]
        self._cut_features = torch.tensor([features[v.feature] for v in cut], dtype=torch.int32)
        self._num_cut = len(cut)
        self._all_cut = [features[v.feature] for v in cut] == list(range(len(features)))
        edges = [v.edges for v in cut if v.edges is not None]
        self._num_buckets = max((len(e) - 1 for e in edges), default=0)
        self._blocks = torch.tensor([e[1] - e[0] for e in edges], dtype=torch.int64)
        padded = [torch.tensor(_padded(e, self._num_buckets)) for e in edges]
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
        raw_only = not cut and rows == list(range(len(features)))
        self._order = None if raw_only else torch.tensor(rows, dtype=torch.int32)
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

    def pack(
        self,
        lengths_FB: torch.Tensor,
        values: torch.Tensor,
        weights: torch.Tensor | None,
        counts: torch.Tensor | None,
        problem: ValueError | None,
        traced: bool,
    ) -> Outgoing:
        batch, given_FB = lengths_FB.shape[1], lengths_FB
        origins = torch.arange(values.numel()) if traced else None
        if self._num_cut:
            lengths_FB, values, weights, origins = self._with_buckets(lengths_FB, values, weights, origins)
        if self._order is not None:
            if origins is not None:
                origins = ops.permute_segments(self._order, lengths_FB, origins)[1]
            lengths_FB, values, weights = ops.permute_segments(self._order, lengths_FB, values, weights)
        header = torch.zeros(len(self._routes.ranks), self._header_width, dtype=torch.int64)
        totals = lengths_FB.sum(1, dtype=torch.int64)
        header.view(-1).index_add_(0, self._slots, totals.index_select(0, self._sources))
        header[:, BATCH] = batch
        if problem is not None:
            header[:, BAD] = 1
        if counts is not None:
            header[:, GROUPS + self._routes.num_groups :] = counts
        return Outgoing(Part(lengths_FB, values, weights), header, problem, given_FB, origins)

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
        lengths, ids, ws, positions = ops.bucketize_rows(
            cut_lengths.reshape(-1),
            cut_values,
            cut_weights,
            self._blocks,
            self._num_buckets,
            self._edges,
            origins is not None,
        )
        if origins is not None and positions is not None:
            cut = origins if self._all_cut else ops.permute_segments(self._cut_features, lengths_FB, origins)[1]
            origins = torch.cat([origins, torch.empty_like(cut).index_copy_(0, positions.to(torch.int64), cut)])
        lengths = lengths.view(self._num_buckets * self._num_cut, batch)
        joined = None if weights is None or ws is None else torch.cat([weights, ws])
        return torch.cat([lengths_FB, lengths]), torch.cat([values, ids]), joined, origins


def _even(edges: Sequence[int]) -> bool:
    sizes = [b - a for a, b in zip(edges, edges[1:], strict=False)]
    return len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]


def _padded(edges: Sequence[int], num_buckets: int) -> list[int]:
    return [*edges, *[edges[-1]] * (num_buckets + 1 - len(edges))]
