"""The sharded embedding bag collection and its sharder, and what both sharded collections have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from rayrec.distributed.collections.fused_optimizer import fused_optimizer_of
from rayrec.distributed.collections.sharded_table import ShardedTable, make_tables
from rayrec.distributed.collections.sharder import CollectionSharder
from rayrec.distributed.collections.variable_batch import Examples, same_size
from rayrec.distributed.comm import trace
from rayrec.distributed.comm.awaitable import Deferred, LazyAwaitable
from rayrec.distributed.comm.host_memory import keep_freed_memory
from rayrec.distributed.executors.pooled import PooledExecutor, worthwhile_hosts
from rayrec.distributed.executors.replicated import ReplicatedExecutor
from rayrec.distributed.executors.sequences import SequencesExecutor
from rayrec.distributed.executors.setup import Setup, ShardedExecutor
from rayrec.distributed.ids.batch import Kept, RankIds
from rayrec.distributed.ids.input_dist import IdCheck, InputDist, PendingInput, RoutedFeatures
from rayrec.distributed.ids.routes import Output, make_outputs
from rayrec.distributed.kernel import Kernel
from rayrec.distributed.plan.shards import Span
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.modules.embedding import output_names
from rayrec.optim import CombinedOptimizer
from rayrec.sparse import KeyedJaggedTensor, KeyedTensor

Result = TypeVar("Result")


@dataclass(frozen=True)
class BatchVectors:
    """A batch after `lookup`: the vectors of each executor; None without replicated tables."""

    ids: RankIds
    sharded: Any
    replicated: list[torch.Tensor] | None


class ShardedCollection(nn.Module, ABC, Generic[Result]):
    """The twin of a collection with tables on many ranks: same input, same output, awaited.

    A step is three stages, which `forward` runs in turn: `input_dist`, `lookup`, `output_dist`. Embedding gradients are
    averaged over ranks and applied inside backward, or left on the parameters of tables with a dense kernel.

    Args:
        module: the unsharded collection.
        setup: the tables and their plan.
        sharded: the executor of the tables that are cut.
        replicated: of the others; None if there are none.
    """

    shown_as: ClassVar[str]  # the attribute that holds the tables, as in the unsharded collection
    awaitable: type[Deferred[Result]]

    def __init__(
        self,
        module: nn.Module,
        setup: Setup[Any],
        sharded: ShardedExecutor,
        replicated: ReplicatedExecutor[Any] | None,
    ) -> None:
        super().__init__()
        if setup.place.device.type == "cpu":
            keep_freed_memory()
        self._sharded, self._replicated = sharded, replicated
        updates = any(table.optimizer is not None for table in setup.tables)
        whole = {f for t in setup.tables if t.sharding.replicated for f in t.config.feature_names}
        checked = set() if setup.dedup else {*sharded.exchange.routes.features} - whole  # by the split
        self._check = IdCheck(setup.configs, setup.weighted, checked)
        shown = make_tables(setup, self.kernels(), sharded.exchange.routes)
        self.add_module(self.shown_as, nn.ModuleDict(shown))
        self._optimizer = fused_optimizer_of(self.kernels(), shown, self.shown_as)
        self.ids_ahead = InputDist(setup.place.device, self._prepare, sharded.exchange, updates)

    # -- a step

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[Result]:
        """The result for this rank's batch, awaited."""
        return self.output_dist(self.lookup(self.ids_ahead.take(features).wait()))

    def input_dist(self, features: KeyedJaggedTensor) -> PendingInput:
        """Sends ids to the ranks that hold their rows.

        Raises (from `wait`, on every rank):
            ValueError: a feature is missing, or an id is outside its table.
        """
        return PendingInput(self.ids_ahead, features)

    def _prepare(self, features: KeyedJaggedTensor) -> RoutedFeatures:
        """What a batch sends to every rank and what it keeps.

        Raises:
            ValueError: a batch that cannot be looked up.
        """
        kjt, of_collection = self._as_sent(features)
        self._check.check(kjt)
        sent, kept = self._sharded.prepare(kjt)
        if self._replicated is None:
            return sent, (), Kept(kept, None, of_collection)
        counts, replicated = self._replicated.prepare(kjt)
        return sent, counts, Kept(kept, replicated, of_collection)

    @abstractmethod
    def _as_sent(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Any]:
        """The features as executors take them, and what `_result` needs of them."""

    def lookup(self, ids: RankIds) -> BatchVectors:
        """Looks up this rank's rows for the global batch, and replicated tables for its own."""
        with trace.span(trace.LOOKUP):
            replicated = None if self._replicated is None else self._replicated.lookup(ids)
            return BatchVectors(ids, self._sharded.lookup(ids), replicated)

    def output_dist(self, vectors: BatchVectors) -> LazyAwaitable[Result]:
        """Sends vectors back to the ranks of their examples."""
        ids, finish = vectors.ids, self._sharded.output_dist(vectors.sharded, vectors.ids)

        def result() -> Result:
            with trace.span(trace.VECTORS):
                found = [*([finish()] if finish else []), *(vectors.replicated or [])]
            return self._result(found, ids.kept.collection)

        return self.awaitable(result)

    @abstractmethod
    def _result(self, found: list[torch.Tensor], of_collection: Any) -> Result:
        """The result, from those of the executors (see `blocks`)."""

    # -- outside a step

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizer that runs inside backward."""
        return self._optimizer

    def reset_parameters(self) -> None:
        """Fills this rank's shards as they were first; sharded tables take no other seed than their own."""
        for table in self.tables().values():
            table.reset_parameters()

    def tables(self) -> dict[str, ShardedTable]:
        """Each table's shards by name."""
        shown: nn.ModuleDict = getattr(self, self.shown_as)
        return {name: table for name, table in shown.items() if isinstance(table, ShardedTable)}

    def kernels(self) -> list[Kernel]:
        """This rank's kernels: those of sharded tables, then those of replicated ones."""
        return [kernel for executor in self.executors for kernel in executor.kernels]

    @property
    def executors(self) -> list[ShardedExecutor | ReplicatedExecutor[Any]]:
        """One or two."""
        return [executor for executor in (self._sharded, self._replicated) if executor is not None]

    # The three stages, by the names that TorchRec's tutorials print.

    @property
    def _input_dists(self) -> list[ShardedExecutor | ReplicatedExecutor[Any]]:
        return self.executors

    @property
    def _lookups(self) -> list[Kernel]:
        return self.kernels()

    @property
    def _output_dists(self) -> list[ShardedExecutor | ReplicatedExecutor[Any]]:
        return self.executors

    @property
    def blocks(self) -> list[list[Output]]:
        """The outputs of each tensor of the executors' results."""
        return [block for executor in self.executors for block in executor.blocks]

    def extra_repr(self) -> str:
        return f"(executors): {self.executors}\n(lookups): {self.kernels()}"


class EmbeddingBagCollectionAwaitable(Deferred[KeyedTensor]):
    """Pooled vectors that are being received."""

    result_type = KeyedTensor


class ShardedEmbeddingBagCollection(ShardedCollection[KeyedTensor]):
    """A sharded `EmbeddingBagCollection`: pooled vectors `[B, sum of dims]` of a rank's B examples, in the unsharded
    order; see `ShardedCollection`."""

    shown_as = "embedding_bags"
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
        self._examples = Examples([output.feature for output in outputs], self._dims, setup.place.device)
        self._columns: list[tuple[int, Span]] = []  # of the executors' results, in the order of this one
        places = {(out.table, out.feature): (n, out) for n, block in enumerate(self.blocks) for out in block}
        for number, output in (places[output.table, output.feature] for output in outputs):
            span = Span(output.col, output.col + output.dim)
            if self._columns and self._columns[-1] == (number, Span(self._columns[-1][1].start, span.start)):
                span = Span(self._columns.pop()[1].start, span.stop)
            self._columns.append((number, span))

    def _as_sent(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, torch.Tensor | None]:
        if features.variable_stride_per_key():
            return same_size(features), self._examples.lists_of(features)
        return features, None

    def _result(self, found: list[torch.Tensor], of_collection: torch.Tensor | None) -> KeyedTensor:
        values = found[0]
        if len(found) > 1 or len(self._columns) > 1:
            values = torch.cat([found[number][:, cols.start : cols.stop] for number, cols in self._columns], dim=1)
        if of_collection is not None:
            values = self._examples.expand(values, of_collection)
        return KeyedTensor(self._names, self._dims, values)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return list(self._configs)


class EmbeddingBagCollectionSharder(CollectionSharder[EmbeddingBagCollection, ShardedEmbeddingBagCollection]):
    """Shards an `EmbeddingBagCollection`; settings as of `CollectionSharder`.

    With `dedup` vectors come back unpooled, and the rank that sent the ids pools them: less is sent if a feature has
    fewer distinct ids than bags in a rank's batch.
    """

    module_type, sharded_type = EmbeddingBagCollection, ShardedEmbeddingBagCollection

    def _executor(self, setup: Setup[EmbeddingBagConfig], num_counts: int) -> ShardedExecutor:
        if setup.dedup and setup.tables:
            return SequencesExecutor(setup, num_counts)
        return PooledExecutor(setup, worthwhile_hosts(setup), num_counts)
