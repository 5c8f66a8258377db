"""The sharded embedding bag collection and its sharder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayrec.distributed.awaitable import Awaitable, Deferred, LazyAwaitable, NoWait
from rayrec.distributed.collection_sharder import CollectionSharder, Optimizers
from rayrec.distributed.kernel import Kernel, OptimizerSpec, updating
from rayrec.distributed.optimizer_handle import EmbeddingFusedOptimizer
from rayrec.distributed.sharding import collection
from rayrec.distributed.sharding.ahead import IdsAhead
from rayrec.distributed.sharding.dedup import DedupExecutor
from rayrec.distributed.sharding.executor import Executor, Setup
from rayrec.distributed.sharding.id_check import IdCheck
from rayrec.distributed.sharding.input_dist import InputDist, PendingInput
from rayrec.distributed.sharding.parameters import ShardedTable
from rayrec.distributed.sharding.place import Place
from rayrec.distributed.sharding.replicated import ReplicatedExecutor, ReplicatedIds
from rayrec.distributed.sharding.tiers import TiersExecutor, worthwhile_hosts
from rayrec.distributed.sharding.variable_batch import Examples, same_size
from rayrec.distributed.sharding.vector_exchange import Codec
from rayrec.distributed.types import ModuleSharding, ShardingEnv, Span
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.modules.embedding import output_names
from rayrec.optim import CombinedOptimizer
from rayrec.sparse import KeyedJaggedTensor, KeyedTensor


@dataclass(frozen=True)
class BagIds:
    """A batch's ids: of sharded tables, in the form of their executor and stage, and of replicated ones."""

    sharded: Any
    replicated: ReplicatedIds | None
    lists_BE: torch.Tensor | None  # of each example and output, where the batch size varies by key


@dataclass(frozen=True)
class Bags:
    """A batch after `lookup`: sums for the global batch, and finished vectors of replicated tables."""

    ids: BagIds
    pooled: Any  # of the executor of sharded tables
    replicated: list[torch.Tensor]


class ShardedEmbeddingBagCollection(nn.Module):
    """The twin of an `EmbeddingBagCollection` whose tables lie on many ranks: same input, same output, waited for.

    A step is three stages, which `forward` runs in turn: `input_dist`, `lookup`, `output_dist`. Embedding gradients are
    averaged over ranks and applied inside backward, or left on the parameters of tables with a dense kernel.

    Args:
        tables: of the unsharded collection.
        params: each table's sharding.
        optimizers: each table's update inside backward; None leaves its gradient to an optimizer of the user's.
        env, device: where this process stands.
        weighted: ids carry weights.
        codec: number formats of the vectors on the wire.
        dedup: an id that comes several times in a feature of a rank's batch is sent once, and pooled on its own rank.

    Raises:
        ValueError: shards that do not cover a table, or lie outside the world.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        params: ModuleSharding,
        optimizers: Mapping[str, OptimizerSpec | None],
        env: ShardingEnv,
        device: torch.device,
        weighted: bool = False,
        codec: Codec | None = None,
        dedup: bool = False,
    ) -> None:
        super().__init__()
        place = Place.of(env, device)
        self._configs = tuple(tables)
        replicated = [table for table in tables if params[table.name].replicated]
        sharded = [table for table in tables if not params[table.name].replicated]
        self._replicated = ReplicatedExecutor(replicated, optimizers, place, weighted) if replicated else None
        setup = Setup(
            tables=sharded,
            plan=params,
            optimizers=optimizers,
            place=place,
            weighted=weighted,
            num_counts=self._replicated.num_groups if self._replicated else 0,
            codec=codec or Codec(),
        )
        self._sharded = _executor(setup, dedup)
        self._way = InputDist(place.device, self._route, self._send)
        self.ids_ahead: IdsAhead[BagIds] = IdsAhead()
        self._updates = any(optimizer is not None for optimizer in optimizers.values())
        self._check = IdCheck(tables, weighted)
        self._names = [name for names in output_names(tables) for name in names]
        self._dims = [table.embedding_dim for table in tables for _ in table.feature_names]
        features = [feature for table in tables for feature in table.feature_names]
        self._examples = Examples(features, self._dims, device)
        self._merge = _merge_order(tables, params, self._replicated)
        shown = collection.make_tables(tables, self.kernels(), self._sharded.routes, place)
        self.embedding_bags = nn.ModuleDict(shown)
        trained = updating(self.kernels())
        self._optimizer = CombinedOptimizer(
            [EmbeddingFusedOptimizer(trained, shown, "embedding_bags")] if trained else []
        )

    # -- a step

    def input_dist(self, features: KeyedJaggedTensor) -> PendingInput[BagIds]:
        """Sends ids to the ranks that hold their rows.

        Raises (from `wait`, on every rank):
            ValueError: a feature is missing, or an id is outside its table.
        """
        return self._way.start(features)

    def _route(self, features: KeyedJaggedTensor) -> BagIds:
        given, lists_BE = features, None
        if given.variable_stride_per_key():
            features = same_size(given)
        problem = self._check.problem(features)
        if problem is None and given is not features:
            try:
                lists_BE = self._examples.lists_of(given)
            except ValueError as error:
                problem = error
        kjt = features if problem is None else self._check.nothing(features)
        replicated = self._replicated.route(kjt) if self._replicated else None
        sharded = self._sharded.route(kjt, replicated.counts.item if replicated else None, problem)
        return BagIds(sharded, replicated, lists_BE)

    def _send(self, ids: BagIds) -> Awaitable[BagIds]:
        sharded = self._sharded.send(ids.sharded)
        return Deferred(lambda: BagIds(sharded.wait(), ids.replicated, ids.lists_BE))

    def lookup(self, ids: BagIds) -> Bags:
        """Looks up this rank's rows for the global batch, and replicated tables for its own."""
        vectors: list[torch.Tensor] = []
        if self._replicated is not None and ids.replicated is not None:
            vectors = self._replicated.lookup(ids.replicated, self._sharded.row_counts(ids.sharded))
        return Bags(ids, self._sharded.lookup(ids.sharded), vectors)

    def output_dist(self, bags: Bags) -> LazyAwaitable[KeyedTensor]:
        """Sends every example's vectors back to its rank."""
        if not self._sharded.routes.outputs:
            return NoWait(self._keyed(torch.empty(0), bags))
        vectors = self._sharded.output_dist(bags.pooled, bags.ids.sharded)
        return EmbeddingBagCollectionAwaitable(lambda: self._keyed(vectors.wait(), bags))

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        """Pooled vectors `[B, sum of dims]` of this rank's B examples, in the unsharded order, to be waited for."""
        if self._updates and torch.is_grad_enabled():
            collection.refuse_scaled_gradients()
        return self.output_dist(self.lookup(self.ids_ahead.take(features, self.input_dist).wait()))

    def _keyed(self, values: torch.Tensor, bags: Bags) -> KeyedTensor:
        if bags.replicated:
            blocks = (values[:, p.start : p.stop] if isinstance(p, Span) else bags.replicated[p] for p in self._merge)
            values = torch.cat(list(blocks), dim=1)
        if bags.ids.lists_BE is not None:
            values = self._examples.expand(values, bags.ids.lists_BE)
        return KeyedTensor(self._names, self._dims, values)

    # -- what is trained

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizer that runs inside backward."""
        return self._optimizer

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return list(self._configs)

    def tables(self) -> dict[str, ShardedTable]:
        """Each table's shards by name."""
        return {name: table for name, table in self.embedding_bags.items() if isinstance(table, ShardedTable)}

    def kernels(self) -> list[Kernel]:
        """This rank's kernels: those of sharded tables, then those of replicated ones."""
        replicated: list[Kernel] = list(self._replicated.kernels) if self._replicated else []
        return [*self._sharded.kernels.values(), *replicated]

    # -- the stages by the tutorials' names

    def _executors(self) -> list[Any]:
        return [executor for executor in (self._sharded, self._replicated) if executor is not None]

    def extra_repr(self) -> str:
        stages = [f"(executors): {self._executors()}", f"(lookups): {self.kernels()}"]
        return "\n".join(stages)

    @property
    def _input_dists(self) -> list[Any]:
        return self._executors()

    @property
    def _lookups(self) -> list[Any]:
        return self.kernels()

    @property
    def _output_dists(self) -> list[Any]:
        return self._executors()


def _executor(setup: Setup[EmbeddingBagConfig], dedup: bool) -> Executor[Any, Any, Any]:
    """The one that serves the tables that are not replicated; the same on every rank."""
    if dedup and setup.tables:
        return DedupExecutor(setup)
    return TiersExecutor(setup, worthwhile_hosts(setup.tables, setup.plan, setup.place))


class EmbeddingBagCollectionAwaitable(Deferred[KeyedTensor]):
    """Pooled vectors on their way."""


def _merge_order(
    tables: Sequence[EmbeddingBagConfig], params: ModuleSharding, replicated: ReplicatedExecutor | None
) -> list[Span | int]:
    """The result's blocks in order: columns of the flat executor's result, or places among the replicated vectors."""
    places = {(table, f): n for n, (table, f, _) in enumerate(replicated.outputs)} if replicated else {}
    order: list[Span | int] = []
    col = 0
    for table in tables:
        for feature in table.feature_names:
            if params[table.name].replicated:
                order.append(places[(table.name, feature)])
                continue
            last = order[-1] if order else None
            start = last.start if isinstance(last, Span) else col
            col += table.embedding_dim
            if isinstance(last, Span):
                order[-1] = Span(start, col)
            else:
                order.append(Span(start, col))
    return order


class EmbeddingBagCollectionSharder(CollectionSharder[EmbeddingBagCollection, ShardedEmbeddingBagCollection]):
    """Shards an `EmbeddingBagCollection`; settings as of `CollectionSharder`.

    With `dedup` vectors come back unpooled, and the rank whose ids they are pools: it sends less where a feature has
    fewer distinct ids than bags in a rank's batch.
    """

    module_type = EmbeddingBagCollection

    def _configs(self, module: EmbeddingBagCollection) -> list[EmbeddingBagConfig]:
        return module.embedding_bag_configs()

    def _tables(self, module: EmbeddingBagCollection) -> nn.ModuleDict:
        return module.embedding_bags

    def _twin(
        self,
        module: EmbeddingBagCollection,
        params: ModuleSharding,
        optimizers: Optimizers,
        env: ShardingEnv,
        device: torch.device,
    ) -> ShardedEmbeddingBagCollection:
        return ShardedEmbeddingBagCollection(
            self._configs(module), params, optimizers, env, device, module.is_weighted(), self._codec, self._dedup
        )
