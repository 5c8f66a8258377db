"""The sharded embedding collection, which looks up a vector for every id, and its sharder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayrec.distributed.collections.sharded_collection import ShardedCollection
from rayrec.distributed.collections.sharder import CollectionSharder
from rayrec.distributed.comm import trace
from rayrec.distributed.comm.awaitable import Deferred, LazyAwaitable
from rayrec.distributed.executors.replicated import ReplicatedExecutor
from rayrec.distributed.executors.sequences import SequencesExecutor
from rayrec.distributed.executors.setup import BatchVectors, Setup, ShardedExecutor
from rayrec.distributed.ids.batch import Kept, RankIds
from rayrec.distributed.ids.input_dist import PendingInput, RoutedFeatures
from rayrec.distributed.ids.routes import make_outputs
from rayrec.distributed.ids.upload import OnHost
from rayrec.modules import EmbeddingCollection, EmbeddingConfig
from rayrec.modules.embedding import output_names
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor


@dataclass(frozen=True)
class Features:
    """What the output takes from the input: lengths of all examples, key after key, and ids if it holds them."""

    kjt: OnHost[KeyedJaggedTensor]
    lengths: torch.Tensor
    values: torch.Tensor | None


@dataclass(frozen=True)
class _Output:
    """One feature read by one table: its rows are block number `block` of what is looked up."""

    name: str
    feature: str
    block: int


class ShardedEmbeddingCollection(ShardedCollection):
    """The twin of an `EmbeddingCollection` with tables on many ranks: same input, same output, awaited.

    A step is three stages, which `forward` runs in turn: `input_dist`, `lookup`, `output_dist`. Embedding gradients are
    averaged over ranks and applied inside backward, or left on the parameters of tables with a dense kernel.

    Args:
        setup: the tables and their plan.
        sharded: the executor of the tables that are cut.
        replicated: of the others; None if there are none.
        need_indices: the output's weights hold the ids.
    """

    shown_as = "embeddings"
    embeddings: nn.ModuleDict

    def __init__(
        self,
        setup: Setup[EmbeddingConfig],
        sharded: ShardedExecutor,
        replicated: ReplicatedExecutor[EmbeddingConfig] | None,
        need_indices: bool = False,
    ) -> None:
        super().__init__(setup, sharded, replicated)
        self._configs, self._need_indices = tuple(setup.configs), need_indices
        names = [name for of_table in output_names(self._configs) for name in of_table]
        blocks = self.blocks
        self._parts = [[output.feature for output in part] for part in blocks]
        held = [(output.table, output.feature) for part in blocks for output in part]
        block = {output: number for number, output in enumerate(held)}
        self._outputs = [
            _Output(name, output.feature, block[output.table, output.feature])
            for name, output in zip(names, make_outputs(self._configs), strict=True)
        ]

    # -- a step

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """For each feature the vectors of this rank's ids, `values [N, D]` with the feature's lengths, awaited."""
        return self.output_dist(self.lookup(self.ids_ahead.take(features).wait()))

    def input_dist(self, features: KeyedJaggedTensor) -> PendingInput:
        """Sends ids to the ranks that hold their rows.

        Raises (from `wait`, on every rank):
            ValueError: a feature is missing, or an id is outside its table.
        """
        return self.ids_ahead.start(features)

    def _prepare(self, features: KeyedJaggedTensor) -> RoutedFeatures:
        one = _as_one_example(features)
        self._check.check(one)
        values = features.values() if self._need_indices else None
        of_batch = Features(OnHost(features), features.lengths(), values)
        sharded = self._sharded.prepare(one)
        if self._replicated is None:
            return sharded.kjt, (), Kept(sharded.kept, None, of_batch)
        replicated = self._replicated.prepare(one)
        return sharded.kjt, replicated.counts, Kept(sharded.kept, replicated.kept, of_batch)

    def lookup(self, ids: RankIds) -> BatchVectors:
        """Looks up this rank's rows for all ranks, and replicated tables for itself."""
        with trace.span(trace.LOOKUP):
            replicated = None if self._replicated is None else self._replicated.lookup(ids)
            return BatchVectors(ids, self._sharded.lookup(ids), replicated)

    def output_dist(self, vectors: BatchVectors) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Sends every id's vector back to its rank."""
        ids, finish = vectors.ids, self._sharded.output_dist(vectors.sharded, vectors.ids)

        def by_feature() -> dict[str, JaggedTensor]:
            with trace.span(trace.VECTORS):
                found = finish() + (vectors.replicated or [])
            return self._by_feature(ids.kept.collection, found)

        return EmbeddingCollectionAwaitable(by_feature)

    def _by_feature(self, features: Features, parts: Sequence[torch.Tensor]) -> dict[str, JaggedTensor]:
        kjt = features.kjt.item
        index, counts = kjt.index_per_key(), kjt.length_per_key()
        sizes = [[counts[index[feature]] for feature in part] for part in self._parts]
        blocks = _Cut.apply(sizes, *parts)
        lengths = features.lengths.view(-1).split(kjt.stride_per_key())
        ids = None if features.values is None else features.values.split(counts)
        return {
            output.name: JaggedTensor(
                values=blocks[output.block],
                weights=None if ids is None else ids[index[output.feature]],
                lengths=lengths[index[output.feature]],
            )
            for output in self._outputs
        }

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return list(self._configs)

    def embedding_dim(self) -> int:
        return self._configs[0].embedding_dim

    def need_indices(self) -> bool:
        return self._need_indices


class EmbeddingCollectionAwaitable(Deferred[dict[str, JaggedTensor]]):
    """Vectors that are being received; waits when it is used as a dict."""

    result_type = dict

    def __iter__(self) -> Iterator[str]:
        return iter(self.wait())

    def __len__(self) -> int:
        return len(self.wait())

    def __contains__(self, name: object) -> bool:
        return name in self.wait()


class _Cut(torch.autograd.Function):
    """Parts, each cut into blocks of rows. Backward, gradients of all parts go on at once, so that ranks exchange in
    the same order, whatever a loss reads first and whether it reads every part."""

    @staticmethod
    def forward(ctx: Any, sizes: list[list[int]], *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.sizes = sizes
        return tuple(block for part, of_part in zip(parts, sizes, strict=True) for block in part.split(of_part))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        blocks = iter(grads)
        return None, *(torch.cat([next(blocks) for _ in sizes]) for sizes in ctx.sizes)


def _as_one_example(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """All ids of a feature in one list; where examples begin matters only to the reader of the vectors."""
    if kjt.variable_stride_per_key():
        lengths = torch.tensor(kjt.length_per_key(), dtype=torch.int64, device=kjt.device())
    else:
        lengths = kjt.lengths().view(len(kjt.keys()), kjt.stride()).sum(1)
    return KeyedJaggedTensor(kjt.keys(), kjt.values(), lengths=lengths, stride=1)


class EmbeddingCollectionSharder(CollectionSharder[EmbeddingCollection, ShardedEmbeddingCollection]):
    """Shards an `EmbeddingCollection`; settings as of `CollectionSharder`.

    `dedup` pays where ids come often, as in histories.
    """

    module_type = EmbeddingCollection

    def _configs(self, module: EmbeddingCollection) -> list[EmbeddingConfig]:
        return module.embedding_configs()

    def _tables(self, module: EmbeddingCollection) -> nn.ModuleDict:
        return module.embeddings

    def _twin(self, module: EmbeddingCollection, setup: Setup[EmbeddingConfig]) -> ShardedEmbeddingCollection:
        cut, whole = setup.only(replicated=False), setup.only(replicated=True)
        replicated = ReplicatedExecutor(whole) if whole.tables else None
        sequences = SequencesExecutor(cut, 0 if replicated is None else len(replicated.groups))
        return ShardedEmbeddingCollection(setup, sequences, replicated, module.need_indices())
