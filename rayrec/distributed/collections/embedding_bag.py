"""The sharded embedding bag collection and its sharder."""

from __future__ import annotations

import torch
from torch import nn

from rayrec.distributed.collections.sharded_collection import ShardedCollection
from rayrec.distributed.collections.sharder import CollectionSharder
from rayrec.distributed.collections.variable_batch import Examples, same_size
from rayrec.distributed.comm import trace
from rayrec.distributed.comm.awaitable import Deferred, LazyAwaitable
from rayrec.distributed.executors.pooled import PooledExecutor, worthwhile_hosts
from rayrec.distributed.executors.replicated import ReplicatedExecutor
from rayrec.distributed.executors.sequences import SequencesExecutor
from rayrec.distributed.executors.setup import BatchVectors, Setup, ShardedExecutor
from rayrec.distributed.ids.batch import Kept, RankIds
from rayrec.distributed.ids.input_dist import PendingInput, RoutedFeatures
from rayrec.distributed.ids.routes import make_outputs
from rayrec.distributed.plan.shards import Span
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.modules.embedding import output_names
from rayrec.sparse import KeyedJaggedTensor, KeyedTensor


class ShardedEmbeddingBagCollection(ShardedCollection):
    """The twin of an `EmbeddingBagCollection` with tables on many ranks: same input, same output, awaited.

    A step is three stages, which `forward` runs in turn: `input_dist`, `lookup`, `output_dist`. Embedding gradients are
    averaged over ranks and applied inside backward, or left on the parameters of tables with a dense kernel.

    Args:
        setup: the tables and their plan.
        sharded: the executor of the tables that are cut.
        replicated: of the others; None if there are none.
    """

    shown_as = "embedding_bags"
    embedding_bags: nn.ModuleDict

    def __init__(
        self,
        setup: Setup[EmbeddingBagConfig],
        sharded: ShardedExecutor,
        replicated: ReplicatedExecutor[EmbeddingBagConfig] | None,
    ) -> None:
        super().__init__(setup, sharded, replicated)
        self._configs = tuple(setup.configs)
        outputs = make_outputs(self._configs)
        self._names = [name for names in output_names(self._configs) for name in names]
        self._dims = [output.dim for output in outputs]
        self._examples = Examples([output.feature for output in outputs], self._dims, setup.place.device)
        self._columns: list[tuple[int, Span]] = []  # of the executors' results, in the order of this one
        places = {(out.table, out.feature): (n, out) for n, block in enumerate(self.blocks) for out in block}
        for number, output in (places[output.table, output.feature] for output in outputs):
            span = Span(output.col, output.col + output.dim)
            if self._columns and self._columns[-1] == (number, Span(self._columns[-1][1].start, span.start)):
                span = Span(self._columns.pop()[1].start, span.stop)
            self._columns.append((number, span))

    # -- a step

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        """Pooled vectors `[B, sum of dims]` of this rank's B examples, in the unsharded order, awaited."""
        return self.output_dist(self.lookup(self.ids_ahead.take(features).wait()))

    def input_dist(self, features: KeyedJaggedTensor) -> PendingInput:
        """Sends ids to the ranks that hold their rows.

        Raises (from `wait`, on every rank):
            ValueError: a feature is missing, or an id is outside its table.
        """
        return self.ids_ahead.start(features)

    def _prepare(self, features: KeyedJaggedTensor) -> RoutedFeatures:
        kjt, lists_BE = features, None
        if features.variable_stride_per_key():
            kjt, lists_BE = same_size(features), self._examples.lists_of(features)
        self._check.check(kjt)
        sharded = self._sharded.prepare(kjt)
        if self._replicated is None:
            return sharded.kjt, (), Kept(sharded.kept, None, lists_BE)
        replicated = self._replicated.prepare(kjt)
        return sharded.kjt, replicated.counts, Kept(sharded.kept, replicated.kept, lists_BE)

    def lookup(self, ids: RankIds) -> BatchVectors:
        """Looks up this rank's rows for the global batch, and replicated tables for its own."""
        with trace.span(trace.LOOKUP):
            replicated = None if self._replicated is None else self._replicated.lookup(ids)
            return BatchVectors(ids, self._sharded.lookup(ids), replicated)

    def output_dist(self, vectors: BatchVectors) -> LazyAwaitable[KeyedTensor]:
        """Sends every example's vectors back to its rank."""
        ids, finish = vectors.ids, self._sharded.output_dist(vectors.sharded, vectors.ids)

        def keyed() -> KeyedTensor:
            with trace.span(trace.VECTORS):
                found = finish() + (vectors.replicated or [])
            values = found[0]
            if len(found) > 1 or len(self._columns) > 1:
                values = torch.cat([found[number][:, cols.start : cols.stop] for number, cols in self._columns], dim=1)
            if ids.kept.collection is not None:
                values = self._examples.expand(values, ids.kept.collection)
            return KeyedTensor(self._names, self._dims, values)

        return EmbeddingBagCollectionAwaitable(keyed)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return list(self._configs)


class EmbeddingBagCollectionAwaitable(Deferred[KeyedTensor]):
    """Pooled vectors that are being received."""

    result_type = KeyedTensor


class EmbeddingBagCollectionSharder(CollectionSharder[EmbeddingBagCollection, ShardedEmbeddingBagCollection]):
    """Shards an `EmbeddingBagCollection`; settings as of `CollectionSharder`.

    With `dedup` vectors come back unpooled, and the rank that sent the ids pools them: less is sent if a feature has
    fewer distinct ids than bags in a rank's batch.
    """

    module_type = EmbeddingBagCollection

    def _configs(self, module: EmbeddingBagCollection) -> list[EmbeddingBagConfig]:
        return module.embedding_bag_configs()

    def _tables(self, module: EmbeddingBagCollection) -> nn.ModuleDict:
        return module.embedding_bags

    def _twin(self, module: EmbeddingBagCollection, setup: Setup[EmbeddingBagConfig]) -> ShardedEmbeddingBagCollection:
        cut, whole = setup.only(replicated=False), setup.only(replicated=True)
        replicated = ReplicatedExecutor(whole) if whole.tables else None
        num_counts = 0 if replicated is None else len(replicated.groups)
        if setup.dedup and cut.tables:
            return ShardedEmbeddingBagCollection(setup, SequencesExecutor(cut, num_counts), replicated)
        pooled = PooledExecutor(cut, worthwhile_hosts(cut), num_counts)
        return ShardedEmbeddingBagCollection(setup, pooled, replicated)
