"""The dedup executor: pooled lookups that send each distinct id once and pool where the bags are wanted.

What travels is one vector for each distinct id of a rank's batch, and no weights, instead of one vector for each bag
(and each block of rows that it reads). That is less where a rank's batch has fewer distinct ids than bags: few rows or
very uneven ids, and large batches. The way there and back is the sequence executor's, at its constant number of
collectives a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed.awaitable import Awaitable, Deferred, LazyAwaitable
from rayrec.distributed.kernel import OptimizerSpec, VectorKernel
from rayrec.distributed.sharding.feature_order import FeatureOrder
from rayrec.distributed.sharding.local_pooling import DistinctBags, LocalPooling
from rayrec.distributed.sharding.place import Place
from rayrec.distributed.sharding.pooling import MeanScale, is_mean
from rayrec.distributed.sharding.sequence import SequenceExecutor, SequenceIds
from rayrec.distributed.sharding.sequence_dedup import Dedup
from rayrec.distributed.sharding.vector_exchange import Codec
from rayrec.distributed.types import ModuleSharding
from rayrec.modules import EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor


@dataclass(frozen=True)
class DistinctIds:
    """What this rank looks up for everyone, and how its own bags are made of the vectors that come back."""

    asked: SequenceIds
    bags: DistinctBags

    @property
    def row_counts(self) -> list[list[int]]:
        """For each rank, the counts it announced in its header."""
        return self.asked.routed.row_counts


class DedupExecutor:
    """Pooled lookups of sharded tables, one vector on the wire for each distinct id.

    Args:
        tables: in the order of the collection, at least one; none of them replicated.
        plan: their shards.
        optimizers: by table.
        place: this process among the ranks.
        weighted: ids carry weights; they and their gradients stay on their rank.
        num_counts: further numbers that ranks tell each other in the header.
        codec: number formats of the vectors on the wire.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        plan: ModuleSharding,
        optimizers: Mapping[str, OptimizerSpec | None],
        place: Place,
        weighted: bool,
        num_counts: int,
        codec: Codec,
    ) -> None:
        self._weighted = weighted
        self._sequence = SequenceExecutor(tables, plan, optimizers, place, num_counts, codec, dedup=False)
        self.routes = self._sequence.routes
        self.kernels: dict[int, VectorKernel] = self._sequence.kernels
        self._features = FeatureOrder(self.routes.features, place.device)
        self._dedup = Dedup(tables, self.routes.features, place.device)
        self._pooling = LocalPooling(self.routes, place.device)
        self._scale = MeanScale([(o.feature, is_mean(tables, o.table)) for o in self.routes.outputs])

    def __repr__(self) -> str:
        return f"DedupExecutor({len(self.routes.outputs)} outputs over {len(self.routes.ranks)} ranks)"

    def input_dist(
        self, kjt: KeyedJaggedTensor, counts: torch.Tensor | None = None, problem: ValueError | None = None
    ) -> Awaitable[DistinctIds]:
        """Sends distinct ids to the ranks that hold their rows; `problem` reaches every rank as an error."""
        lengths_FB, values, weights = self._features.of(kjt, self._weighted)
        one = KeyedJaggedTensor(list(self.routes.features), values, lengths=lengths_FB.sum(1), stride=1)
        distinct, duplicates = self._dedup.apply(one)
        bags = DistinctBags(duplicates, lengths_FB, distinct.lengths(), weights)
        asked = self._sequence.input_dist(distinct, counts, problem)
        return Deferred(lambda: DistinctIds(asked.wait(), bags))

    def lookup(self, ids: DistinctIds) -> list[torch.Tensor]:
        """For each kernel of this rank the vectors of all ranks' distinct ids."""
        return self._sequence.lookup(ids.asked)

    def output_dist(
        self, parts: Sequence[torch.Tensor], ids: DistinctIds, kjt: KeyedJaggedTensor
    ) -> LazyAwaitable[torch.Tensor]:
        """Sends each rank its ids' vectors: waits for `[B, total width]`, means where tables ask for them."""
        rows = self._sequence.output_dist(parts, ids.asked)
        factors_BE = self._scale.of(kjt)
        return Deferred(lambda: self._pooling.pool(rows.wait(), ids.bags, factors_BE))
