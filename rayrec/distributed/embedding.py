"""The sharded embedding collection, which looks up a vector for every id, and its sharder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayrec.distributed.awaitable import Awaitable, Deferred, LazyAwaitable
from rayrec.distributed.collection_sharder import CollectionSharder, Optimizers
from rayrec.distributed.kernel import Kernel, OptimizerSpec, updating
from rayrec.distributed.optimizer_handle import EmbeddingFusedOptimizer
from rayrec.distributed.sharding import collection
from rayrec.distributed.sharding.ahead import IdsAhead
from rayrec.distributed.sharding.executor import Setup
from rayrec.distributed.sharding.id_check import IdCheck
from rayrec.distributed.sharding.input_dist import InputDist, PendingInput
from rayrec.distributed.sharding.parameters import ShardedTable
from rayrec.distributed.sharding.place import Place
from rayrec.distributed.sharding.sequence_replicated import SequenceReplicatedExecutor, SequenceReplicatedIds
from rayrec.distributed.sharding.sequences import HostSequence, RoutedSequence, SequencesExecutor
from rayrec.distributed.sharding.upload import OnHost
from rayrec.distributed.sharding.vector_exchange import Codec
from rayrec.distributed.types import ModuleSharding, ShardingEnv
from rayrec.modules import EmbeddingCollection, EmbeddingConfig
from rayrec.modules.embedding import output_names
from rayrec.optim import CombinedOptimizer
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor


@dataclass(frozen=True)
class Features:
    """What the output takes over from the input: lengths of all examples, key after key, and ids if it holds them."""

    kjt: OnHost[KeyedJaggedTensor]
    lengths: torch.Tensor
    values: torch.Tensor | None


@dataclass(frozen=True)
class HostBatch:
    """A batch routed on the host."""

    features: Features
    sharded: HostSequence
    replicated: SequenceReplicatedIds | None


@dataclass(frozen=True)
class RoutedBatch:
    """A batch after `input_dist`: what this rank looks up for everyone, and for itself."""

    features: Features
    sharded: RoutedSequence
    replicated: SequenceReplicatedIds | None


@dataclass(frozen=True)
class Vectors:
    """A batch after `lookup`: vectors of all ranks' ids, and those of this rank's ids in replicated tables."""

    ids: RoutedBatch
    sharded: list[torch.Tensor]
    replicated: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Output:
    """One feature read by one table: its block of rows in part `part` of what is looked up (0: sharded tables)."""

    name: str
    feature: str
    part: int


class ShardedEmbeddingCollection(nn.Module):
    """The twin of an `EmbeddingCollection` whose tables lie on many ranks: same input, same output, waited for.

    A step is three stages, which `forward` runs in turn: `input_dist`, `lookup`, `output_dist`. Embedding gradients are
    averaged over ranks and applied inside backward, or left on the parameters of tables with a dense kernel.

    Args:
        tables: of the unsharded collection.
        params: each table's sharding.
        optimizers: each table's update inside backward; None leaves its gradient to an optimizer of the user's.
        env, device: where this process stands.
        need_indices: the output's weights hold the ids.
        dedup: an id that comes several times in a feature of a rank's batch is sent and looked up once.
        codec: number formats of the vectors on the wire.

    Raises:
        ValueError: shards that do not cover a table, or lie outside the world.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        params: ModuleSharding,
        optimizers: Mapping[str, OptimizerSpec | None],
        env: ShardingEnv,
        device: torch.device,
        need_indices: bool = False,
        dedup: bool = False,
        codec: Codec | None = None,
    ) -> None:
        super().__init__()
        place = Place.of(env, device)
        self._configs, self._need_indices = tuple(tables), need_indices
        replicated = [table for table in tables if params[table.name].replicated]
        sharded = [table for table in tables if not params[table.name].replicated]
        self._replicated = SequenceReplicatedExecutor(replicated, optimizers, place) if replicated else None
        setup = Setup(
            tables=sharded,
            plan=params,
            optimizers=optimizers,
            place=place,
            num_counts=self._replicated.num_groups if self._replicated else 0,
            codec=codec or Codec(),
        )
        self._sharded = SequencesExecutor(setup, dedup)
        self._way = InputDist(place.device, self._route, self._send)
        self.ids_ahead: IdsAhead[RoutedBatch] = IdsAhead()
        self._updates = any(optimizer is not None for optimizer in optimizers.values())
        self._check = IdCheck(tables, weighted=False)
        self._outputs = self._make_outputs()
        self.embeddings = nn.ModuleDict(collection.make_tables(tables, self.kernels(), self._sharded.routes, place))
        trained = updating(self.kernels())
        self._optimizer = CombinedOptimizer(
            [EmbeddingFusedOptimizer(trained, self.tables(), "embeddings")] if trained else []
        )

    # -- a step

    def input_dist(self, features: KeyedJaggedTensor) -> PendingInput[RoutedBatch]:
        """Sends ids to the ranks that hold their rows.

        Raises (from `wait`, on every rank):
            ValueError: a feature is missing, or an id is outside its table.
        """
        return self._way.start(features)

    def _route(self, features: KeyedJaggedTensor) -> HostBatch:
        one = _as_one_example(features)
        problem = self._check.problem(one)
        if problem is not None:
            one = self._check.nothing(one)
        replicated = self._replicated.route(one) if self._replicated else None
        sharded = self._sharded.route(one, replicated.counts.item if replicated else None, problem)
        values = features.values() if self._need_indices else None
        return HostBatch(Features(OnHost(features), features.lengths(), values), sharded, replicated)

    def _send(self, batch: HostBatch) -> Awaitable[RoutedBatch]:
        sharded = self._sharded.send(batch.sharded)
        return Deferred(lambda: RoutedBatch(batch.features, sharded.wait(), batch.replicated))

    def lookup(self, ids: RoutedBatch) -> Vectors:
        """Looks up this rank's rows for all ranks, and replicated tables for itself."""
        vectors: tuple[torch.Tensor, ...] = ()
        if self._replicated is not None and ids.replicated is not None:
            vectors = self._replicated.lookup(ids.replicated, self._sharded.row_counts(ids.sharded))
        parts = self._sharded.lookup(ids.sharded) if self._sharded.routes.outputs else []
        return Vectors(ids, parts, vectors)

    def output_dist(self, vectors: Vectors) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Sends every id's vector back to its rank."""
        features, replicated = vectors.ids.features, vectors.replicated
        if not self._sharded.routes.outputs:
            empty = replicated[0].new_empty(0, replicated[0].shape[1])
            return EmbeddingCollectionAwaitable(lambda: self._by_feature(features, [empty, *replicated]))
        rows = self._sharded.output_dist(vectors.sharded, vectors.ids.sharded)

        def finish() -> dict[str, JaggedTensor]:
            parts = [rows.wait(), *replicated]
            return self._by_feature(features, list(_Together.apply(*parts)) if replicated else parts)

        return EmbeddingCollectionAwaitable(finish)

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """For each feature the vectors of this rank's ids, `values [N, D]` with the feature's lengths, waited for."""
        if self._updates and torch.is_grad_enabled():
            collection.refuse_scaled_gradients()
        return self.output_dist(self.lookup(self.ids_ahead.take(features, self.input_dist).wait()))

    def _by_feature(self, features: Features, parts: Sequence[torch.Tensor]) -> dict[str, JaggedTensor]:
        kjt = features.kjt.item
        index, counts = kjt.index_per_key(), kjt.length_per_key()
        sizes: list[list[int]] = [[] for _ in parts]
        for output in self._outputs:
            sizes[output.part].append(counts[index[output.feature]])
        blocks = [iter(part.split(size) if size else ()) for part, size in zip(parts, sizes, strict=True)]
        lengths = features.lengths.view(-1).split(kjt.stride_per_key())
        ids = None if features.values is None else features.values.split(counts)
        return {
            output.name: JaggedTensor(
                values=next(blocks[output.part]),
                weights=None if ids is None else ids[index[output.feature]],
                lengths=lengths[index[output.feature]],
            )
            for output in self._outputs
        }

    def _make_outputs(self) -> tuple[_Output, ...]:
        """In the order of the unsharded collection, which is also the order inside each part."""
        kernels = self._replicated.outputs if self._replicated else []
        part_of = {pair: number for number, pairs in enumerate(kernels, start=1) for pair in pairs}
        names = output_names(self._configs)
        return tuple(
            _Output(name, feature, part_of.get((config.name, feature), 0))
            for config, of_table in zip(self._configs, names, strict=True)
            for feature, name in zip(config.feature_names, of_table, strict=True)
        )

    # -- what is trained

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizer that runs inside backward."""
        return self._optimizer

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return list(self._configs)

    def embedding_dim(self) -> int:
        return self._configs[0].embedding_dim

    def need_indices(self) -> bool:
        return self._need_indices

    def tables(self) -> dict[str, ShardedTable]:
        """Each table's shards by name."""
        return {name: table for name, table in self.embeddings.items() if isinstance(table, ShardedTable)}

    def kernels(self) -> list[Kernel]:
        """This rank's kernels: those of sharded tables, then those of replicated ones."""
        replicated: list[Kernel] = list(self._replicated.kernels) if self._replicated else []
        return [*self._sharded.kernels.values(), *replicated]

    # -- the stages by the tutorials' names

    def _executors(self) -> list[Any]:
        return [executor for executor in (self._sharded, self._replicated) if executor is not None]

    def extra_repr(self) -> str:
        return f"(executors): {self._executors()}\n(lookups): {self.kernels()}"

    @property
    def _input_dists(self) -> list[Any]:
        return self._executors()

    @property
    def _lookups(self) -> list[Any]:
        return self.kernels()

    @property
    def _output_dists(self) -> list[Any]:
        return self._executors()


class EmbeddingCollectionAwaitable(Deferred[dict[str, JaggedTensor]]):
    """Vectors on their way; waits by itself where it is used as a dict."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.wait())

    def __len__(self) -> int:
        return len(self.wait())

    def __contains__(self, name: object) -> bool:
        return name in self.wait()


class _Together(torch.autograd.Function):
    """Nothing forward. Backward, gradients of all parts go on at once, so that every rank meets the others in the same
    order, whatever its loss reads first and whether it reads every part."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part.view_as(part) for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads


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

    def _twin(
        self,
        module: EmbeddingCollection,
        params: ModuleSharding,
        optimizers: Optimizers,
        env: ShardingEnv,
        device: torch.device,
    ) -> ShardedEmbeddingCollection:
        return ShardedEmbeddingCollection(
            self._configs(module), params, optimizers, env, device, module.need_indices(), self._dedup, self._codec
        )
