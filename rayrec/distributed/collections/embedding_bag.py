"""The sharded embedding bag collection and its sharder."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from rayrec.distributed.collections.sharded_collection import ShardedCollection
from rayrec.distributed.collections.sharder import CollectionSharder
from rayrec.distributed.collections.stages import Stages, StepIds, StepVectors, places_of
from rayrec.distributed.collections.variable_batch import Examples, same_size
from rayrec.distributed.comm.awaitable import Awaitable, Deferred, LazyAwaitable
from rayrec.distributed.executors.pooled import TiersExecutor, worthwhile_hosts
from rayrec.distributed.executors.replicated import ReplicatedExecutor
from rayrec.distributed.executors.sequences import SequencesExecutor
from rayrec.distributed.executors.setup import Looked, Own, Setup
from rayrec.distributed.ids.exchange import HostIds
from rayrec.distributed.ids.input_dist import InputDist, PendingInput
from rayrec.distributed.ids.receiver import RoutedIds
from rayrec.distributed.ids.routes import make_outputs
from rayrec.distributed.plan.shards import Span
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.modules.embedding import output_names
from rayrec.sparse import KeyedJaggedTensor, KeyedTensor


@dataclass(frozen=True)
class Lists:
    """Of each example and output the list of ids that stands for it, where the batch size varies by key."""

    lists_BE: torch.Tensor | None


class ShardedEmbeddingBagCollection(ShardedCollection[Own, Looked]):
    """The twin of an `EmbeddingBagCollection` whose tables lie on many ranks: same input, same output, waited for.

    A step is three stages, which `forward` runs in turn: `input_dist`, `lookup`, `output_dist`. Embedding gradients are
    averaged over ranks and applied inside backward, or left on the parameters of tables with a dense kernel.

    Args:
        setup: the tables and their plan.
        stages: the executors that serve them.
    """

    shown_as = "embedding_bags"
    embedding_bags: nn.ModuleDict

    def __init__(self, setup: Setup[EmbeddingBagConfig], stages: Stages[Own, Looked]) -> None:
        super().__init__(setup, stages)
        self._configs = tuple(setup.configs)
        self.ids_ahead = InputDist(setup.place.device, self._route, self._send)
        outputs = make_outputs(self._configs)
        self._names = [name for names in output_names(self._configs) for name in names]
        self._dims = [output.dim for output in outputs]
        self._examples = Examples([output.feature for output in outputs], self._dims, setup.place.device)
        self._columns: list[tuple[int, Span]] = []  # of the stages' results, in the order of this one
        for number, output in places_of(outputs, stages.blocks):
            span = Span(output.col, output.col + output.dim)
            if self._columns and self._columns[-1] == (number, Span(self._columns[-1][1].start, span.start)):
                span = Span(self._columns.pop()[1].start, span.stop)
            self._columns.append((number, span))

    # -- a step

    def input_dist(self, features: KeyedJaggedTensor) -> PendingInput[StepIds[RoutedIds, Own, Lists]]:
        """Sends ids to the ranks that hold their rows.

        Raises (from `wait`, on every rank):
            ValueError: a feature is missing, or an id is outside its table.
        """
        return self.ids_ahead.start(features)

    def _route(self, features: KeyedJaggedTensor) -> StepIds[HostIds, Own, Lists]:
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
        return self._stages.route(kjt, problem, Lists(lists_BE))

    def _send(self, ids: StepIds[HostIds, Own, Lists]) -> Awaitable[StepIds[RoutedIds, Own, Lists]]:
        return self._stages.send(ids)

    def lookup(self, ids: StepIds[RoutedIds, Own, Lists]) -> StepVectors[Own, Looked, Lists]:
        """Looks up this rank's rows for the global batch, and replicated tables for its own."""
        return self._stages.lookup(ids)

    def output_dist(self, vectors: StepVectors[Own, Looked, Lists]) -> LazyAwaitable[KeyedTensor]:
        """Sends every example's vectors back to its rank."""
        found, lists_BE = self._stages.output_dist(vectors), vectors.ids.batch.lists_BE
        return EmbeddingBagCollectionAwaitable(lambda: self._keyed(found.wait(), lists_BE))

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        """Pooled vectors `[B, sum of dims]` of this rank's B examples, in the unsharded order, to be waited for."""
        self._scaled.check_autocast()
        return self.output_dist(self.lookup(self.ids_ahead.take(features).wait()))

    def _keyed(self, found: list[torch.Tensor], lists_BE: torch.Tensor | None) -> KeyedTensor:
        values = found[0]
        if len(found) > 1 or len(self._columns) > 1:
            values = torch.cat([found[number][:, cols.start : cols.stop] for number, cols in self._columns], dim=1)
        if lists_BE is not None:
            values = self._examples.expand(values, lists_BE)
        return KeyedTensor(self._names, self._dims, self._scaled.watch(values))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return list(self._configs)


class EmbeddingBagCollectionAwaitable(Deferred[KeyedTensor]):
    """Pooled vectors on their way."""


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

    def _twin(self, module: EmbeddingBagCollection, setup: Setup[EmbeddingBagConfig]) -> ShardedEmbeddingBagCollection:
        cut, whole = setup.only(replicated=False), setup.only(replicated=True)
        replicated = ReplicatedExecutor(whole) if whole.tables else None
        if setup.dedup and cut.tables:
            return ShardedEmbeddingBagCollection(setup, Stages(SequencesExecutor(cut), replicated))
        tiers = TiersExecutor(cut, worthwhile_hosts(cut))
        return ShardedEmbeddingBagCollection(setup, Stages(tiers, replicated))
