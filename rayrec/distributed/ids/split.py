"""A batch's ids in the order of the ranks that hold their rows, by torch's and fbgemm's operators.

Ids of tables that are cut by rows are split by compiled loops where they can be (`compiled_split`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed.ids.batch import Ids
from rayrec.distributed.ids.features import FeatureOrder
from rayrec.distributed.ids.routes import Routes
from rayrec.sparse import KeyedJaggedTensor, ops


@dataclass(frozen=True)
class Split:
    """A batch's ids, stream after stream.

    Args:
        ids: lengths `[S, B]`.
        totals: how many ids each stream has, int64 `[S]`.
        lengths_FB: lengths of the features before they were split.
        origins: for each id its place among the features' ids; None unless traced.
    """

    ids: Ids
    totals: torch.Tensor
    lengths_FB: torch.Tensor
    origins: torch.Tensor | None


class OperatorSplit:
    """Splits ids by torch's and fbgemm's operators.

    Args:
        routes: of the collection.
        weighted: ids carry weights.
        traced: also record where each id comes from.

    Attributes:
        checked: features whose ids are compared with the rows of their tables: none.
    """

    def __init__(self, routes: Routes, weighted: bool, traced: bool) -> None:
        self.checked: set[str] = set()
        self._traced = traced
        self._features = FeatureOrder(routes.features, weighted)
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

    def split(self, kjt: KeyedJaggedTensor) -> Split:
        """Splits every feature of the routes; `kjt` is on the host, and may have others."""
        given = ids = self._features.of(kjt)
        origins = torch.arange(given.values.numel()) if self._traced else None
        if self._num_cut:
            ids, origins = self._with_buckets(given, origins)
        if self._order is not None:
            if origins is not None:
                origins = ops.permute_segments(self._order, ids.lengths, origins)[1]
            ids = Ids(*ops.permute_segments(self._order, ids.lengths, ids.values, ids.weights))
        return Split(ids, ids.lengths.sum(1, dtype=torch.int64), given.lengths, origins)

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
