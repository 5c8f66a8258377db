"""The sharded embedding bag collection, and its sharder."""

from __future__ import annotations

import torch
from torch import nn

from rayrec.distributed.collections.sharded_collection import ShardedCollection
from rayrec.distributed.collections.sharder import CollectionSharder
from rayrec.distributed.collections.variable_batch import Examples, same_size
from rayrec.distributed.comm.awaitable import Deferred
from rayrec.distributed.executors.pooled import PooledExecutor, worthwhile_hosts
from rayrec.distributed.executors.replicated import ReplicatedExecutor
from rayrec.distributed.executors.sequences import SequencesExecutor
from rayrec.distributed.executors.setup import Setup, ShardedExecutor
from rayrec.distributed.ids.routes import make_outputs
from rayrec.distributed.plan.shards import Span
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.modules.embedding import output_names
from rayrec.sparse import KeyedJaggedTensor, KeyedTensor


class EmbeddingBagCollectionAwaitable(Deferred[KeyedTensor]):
    """Pooled vectors in transit. Waits when it is used."""

    result_type = KeyedTensor


class ShardedEmbeddingBagCollection(ShardedCollection[KeyedTensor]):
    """A sharded `EmbeddingBagCollection`: pooled vectors `[B, sum of dims]` of this rank's B examples, in the order of
    the unsharded collection. See `ShardedCollection`."""

    tables_attribute = "embedding_bags"
    awaitable = EmbeddingBagCollectionAwaitable
    embedding_bags: nn.ModuleDict

    def __init__(
        self,
        module: EmbeddingBagCollection,
        setup: Setup[EmbeddingBagConfig],
        sharded: ShardedExecutor,
        replicated: ReplicatedExecutor[EmbeddingBagConfig] | None,
    ) -> None:
        super().__init__(module, setup, sharded, replicated)
        self._configs = tuple(setup.configs)
        outputs = make_outputs(self._configs)
        self._names = [name for names in output_names(self._configs) for name in names]
        self._dims = [output.dim for output in outputs]
        self._examples = Examples([output.feature for output in outputs], self._dims, setup.context.device)
        self._columns: list[tuple[int, Span]] = []  # of the executors' results, in the order of this one
        blocks = {(out.table, out.feature): (n, out) for n, block in enumerate(self.blocks) for out in block}
        for number, output in (blocks[output.table, output.feature] for output in outputs):
            span = Span(output.col, output.col + output.dim)
            if self._columns and self._columns[-1] == (number, Span(self._columns[-1][1].start, span.start)):
                span = Span(self._columns.pop()[1].start, span.stop)
            self._columns.append((number, span))

    def _input(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, torch.Tensor | None]:
        if features.variable_stride_per_key():
            return same_size(features), self._examples.lists_of(features)
        return features, None

    def _result(self, tensors: list[torch.Tensor], collection_data: torch.Tensor | None) -> KeyedTensor:
        values = tensors[0]
        if len(tensors) > 1 or len(self._columns) > 1:
            values = torch.cat([tensors[number][:, cols.start : cols.stop] for number, cols in self._columns], dim=1)
        if collection_data is not None:
            values = self._examples.expand(values, collection_data)
        return KeyedTensor(self._names, self._dims, values)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return list(self._configs)


class EmbeddingBagCollectionSharder(CollectionSharder[EmbeddingBagCollection, ShardedEmbeddingBagCollection]):
    """Shards an `EmbeddingBagCollection`. See `CollectionSharder` for its settings.

    With `dedup` vectors come back unpooled, and the rank that sent the ids pools them. This sends less if a feature has
    fewer distinct ids than bags in a rank's batch.
    """

    module_type, sharded_type = EmbeddingBagCollection, ShardedEmbeddingBagCollection

    def _executor(self, setup: Setup[EmbeddingBagConfig], num_counts: int) -> ShardedExecutor:
        if setup.dedup is True and setup.tables:
            return SequencesExecutor(setup, num_counts)
        return PooledExecutor(setup, worthwhile_hosts(setup), num_counts)
