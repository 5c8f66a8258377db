"""Pooled tables by way of sequences: each distinct id is sent once, and bags are pooled where they are wanted.

What travels is one vector for each distinct id of a rank's batch, and no weights, instead of one vector for each bag
(and each block of rows that it reads). That is less where a rank's batch has fewer distinct ids than bags: few rows or
very uneven ids, and large batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed.awaitable import Awaitable, Deferred, LazyAwaitable
from rayrec.distributed.kernel import VectorKernel
from rayrec.distributed.sharding.executor import Setup
from rayrec.distributed.sharding.feature_order import FeatureOrder
from rayrec.distributed.sharding.local_pooling import LocalPooling, PooledBatch
from rayrec.distributed.sharding.pooling import MeanScale, is_mean
from rayrec.distributed.sharding.sequence_dedup import Dedup
from rayrec.distributed.sharding.sequences import HostSequence, RoutedSequence, SequencesExecutor
from rayrec.modules import EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor


@dataclass(frozen=True)
class HostDistinct:
    """A batch routed on the host: distinct ids, and how its bags are made of their vectors."""

    asked: HostSequence
    bags: PooledBatch


@dataclass(frozen=True)
class RoutedDistinct:
    """What this rank looks up for everyone, and how its own bags are made of the vectors that come back."""

    asked: RoutedSequence
    bags: PooledBatch


class DedupExecutor:
    """Pooled lookups of sharded tables, one vector on the wire for each distinct id.

    Args:
        setup: what is served, at least one table; weights and their gradients stay on their rank.
    """

    def __init__(self, setup: Setup[EmbeddingBagConfig]) -> None:
        self._weighted = setup.weighted
        self._sequences = SequencesExecutor(setup)
        self.routes = self._sequences.routes
        self.kernels: dict[int, VectorKernel] = self._sequences.kernels
        self._features = FeatureOrder(self.routes.features, torch.device("cpu"))
        self._dedup = Dedup(setup.tables, self.routes.features)
        self._pooling = LocalPooling(self.routes)
        self._scale = MeanScale([(o.feature, is_mean(setup.tables, o.table)) for o in self.routes.outputs])

    def __repr__(self) -> str:
        return f"DedupExecutor({len(self.routes.outputs)} outputs over {len(self.routes.ranks)} ranks)"

    def route(
        self, kjt: KeyedJaggedTensor, counts: torch.Tensor | None = None, problem: ValueError | None = None
    ) -> HostDistinct:
        lengths_FB, values, weights = self._features.of(kjt, self._weighted)
        one = KeyedJaggedTensor(list(self.routes.features), values, lengths=lengths_FB.sum(1), stride=1)
        distinct, duplicates = self._dedup.apply(one)
        bags = self._pooling.prepare(duplicates, lengths_FB, distinct.lengths(), weights)
        asked = self._sequences.route(distinct, counts, problem)
        return HostDistinct(asked, PooledBatch(bags, self._scale.of(kjt)))

    def send(self, ids: HostDistinct) -> Awaitable[RoutedDistinct]:
        asked = self._sequences.send(ids.asked)
        return Deferred(lambda: RoutedDistinct(asked.wait(), ids.bags))

    def row_counts(self, ids: RoutedDistinct) -> list[list[int]]:
        return self._sequences.row_counts(ids.asked)

    def lookup(self, ids: RoutedDistinct) -> list[torch.Tensor]:
        """For each kernel of this rank the vectors of all ranks' distinct ids."""
        return self._sequences.lookup(ids.asked)

    def output_dist(self, parts: Sequence[torch.Tensor], ids: RoutedDistinct) -> LazyAwaitable[torch.Tensor]:
        """Waits for `[B, total width]`, means where tables ask for them."""
        rows = self._sequences.output_dist(parts, ids.asked)
        return Deferred(lambda: self._pooling.pool(rows.wait(), ids.bags))
