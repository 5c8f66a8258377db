"""The base class of both sharded collections: a step in three stages, and its tables, kernels and optimizer."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from rayrec.distributed.collections.fused_optimizer import fused_optimizer_of
from rayrec.distributed.collections.sharded_table import ShardedTable, make_tables
from rayrec.distributed.comm import trace
from rayrec.distributed.comm.awaitable import Deferred, LazyAwaitable
from rayrec.distributed.comm.host_memory import keep_freed_memory
from rayrec.distributed.executors.replicated import ReplicatedExecutor
from rayrec.distributed.executors.setup import Setup, ShardedExecutor
from rayrec.distributed.ids.batch import VALUES, Kept, RankIds
from rayrec.distributed.ids.input_dist import IdCheck, InputDist, PendingInput, RoutedFeatures
from rayrec.distributed.ids.routes import Output
from rayrec.distributed.kernel.interface import Kernel
from rayrec.optim import CombinedOptimizer
from rayrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

Result = TypeVar("Result")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchVectors:
    """A batch after `lookup`: the vectors of each executor; None without replicated tables."""

    ids: RankIds
    sharded: Any
    replicated: list[torch.Tensor] | None


class ShardedCollection(nn.Module, ABC, Generic[Result]):
    """A collection with its tables on many ranks: same input, same output, awaited.

    A step has three stages, which `forward` runs in turn: `input_dist`, `lookup`, `output_dist`. Embedding gradients
    are averaged over ranks and applied inside backward, or left on the parameters of tables with a dense kernel.

    Args:
        module: the unsharded collection.
        setup: the tables and their plan.
        sharded: executor of the sharded tables.
        replicated: executor of the replicated tables; None without any.

    Attributes:
        without_optimizer: tables that nobody chose an optimizer for. They are not trained; the first step says so.
    """

    tables_attribute: ClassVar[str]  # name of the attribute that holds the tables, as in the unsharded collection
    awaitable: type[Deferred[Result]]

    def __init__(
        self,
        module: nn.Module,
        setup: Setup[Any],
        sharded: ShardedExecutor,
        replicated: ReplicatedExecutor[Any] | None,
    ) -> None:
        super().__init__()
        if setup.context.device.type == "cpu":
            keep_freed_memory()
        self._sharded, self._replicated = sharded, replicated
        updates = any(table.optimizer is not None and not table.optimizer.frozen for table in setup.tables)
        replicated_features = {f for t in setup.tables if t.sharding.replicated for f in t.config.feature_names}
        # The split checks the ids of sharded tables against their rows, unless they are deduplicated first.
        checked = set() if setup.dedup else {*sharded.exchange.routes.features} - replicated_features
        self._check = IdCheck(setup.configs, setup.weighted, checked)
        tables = make_tables(setup, self.kernels(), sharded.exchange.routes)
        self.add_module(self.tables_attribute, nn.ModuleDict(tables))
        self.without_optimizer: list[str] = []
        self._parameters_frozen = [
            (table.config.name, item.parameter, table.optimizer.frozen)
            for table in setup.tables
            if table.optimizer is not None
            for item in tables[table.config.name].local
        ]
        self._optimizer = fused_optimizer_of(self.kernels(), tables, self.tables_attribute)
        self._sent_ids: list[int] = []
        self.ids_ahead = InputDist(setup.context.device, self._prepare, sharded.exchange, updates)

    # -- a step

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[Result]:
        """The result for this rank's batch, as an awaitable."""
        if self.without_optimizer and self.training and torch.is_grad_enabled():
            _logger.warning(
                "tables %s are not trained, because they have no optimizer: give the sharder fused_params, call "
                "apply_optimizer_in_backward, or set requires_grad to False",
                self.without_optimizer,
            )
            self.without_optimizer = []
        return self.output_dist(self.lookup(self.ids_ahead.take(features).wait()))

    def input_dist(self, features: KeyedJaggedTensor) -> PendingInput:
        """Sends ids to the ranks that hold their rows.

        Raises (from `wait`, on every rank):
            ValueError: a feature is missing, or an id is outside its table.
        """
        return PendingInput(self.ids_ahead, features)

    def _prepare(self, features: KeyedJaggedTensor, on_device: bool) -> RoutedFeatures:
        """Checks a batch, and returns the ids to send, counts for every rank, and the data to keep.

        Args:
            on_device: whether a GPU has the batch too.

        Raises:
            ValueError: a batch that cannot be looked up.
        """
        if torch.is_grad_enabled():
            for name, parameter, frozen in self._parameters_frozen:
                if parameter.requires_grad is frozen:  # kernels cannot change
                    raise ValueError(
                        f"table {name!r} was sharded with requires_grad={not frozen}, and it is {frozen} now: set it "
                        "before the model is sharded, or set the learning rate in `fused_optimizer.param_groups` to 0"
                    )
        kjt, collection_data = self._input(features)
        self._check.check(kjt)
        sent, kept = self._sharded.prepare(kjt)
        if self._replicated is None:
            return sent, (), Kept(kept, None, collection_data)
        counts, replicated = self._replicated.prepare(kjt, on_device and not features.variable_stride_per_key())
        return sent, counts, Kept(kept, replicated, collection_data)

    @abstractmethod
    def _input(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Any]:
        """The input of the executors, and data for `_result`."""

    def lookup(self, ids: RankIds) -> BatchVectors:
        """Looks up this rank's shards for the global batch, and replicated tables for its own batch."""
        if torch.is_grad_enabled():
            sent = (header[VALUES] for header in ids.sent)
            self._sent_ids = [sum(counts) for counts in zip_longest(self._sent_ids, sent, fillvalue=0)]
        with trace.span(trace.LOOKUP):
            replicated = None if self._replicated is None else self._replicated.lookup(ids, self._on_device)
            return BatchVectors(ids, self._sharded.lookup(ids), replicated)

    def output_dist(self, vectors: BatchVectors) -> LazyAwaitable[Result]:
        """Sends vectors to the ranks of their examples."""
        ids, finish = vectors.ids, self._sharded.output_dist(vectors.sharded, vectors.ids)

        def result() -> Result:
            with trace.span(trace.VECTORS):
                tensors = [*([finish()] if finish else []), *(vectors.replicated or [])]
            return self._result(tensors, ids.kept.collection)

        return self.awaitable(result)

    def _on_device(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The input of the executors, on a GPU."""
        return self._input(features)[0]

    @abstractmethod
    def _result(self, tensors: list[torch.Tensor], collection_data: Any) -> Result:
        """The collection's result, from the executors' tensors (see `blocks`)."""

    # -- outside a step

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError, from `copy.deepcopy` and `pickle`: memory that kernels train cannot be copied."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, because it trains its tables in place and holds "
            "process groups: copy, save or average `state_dict()` instead, or copy the model before it is sharded"
        )

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizer that runs inside backward."""
        return self._optimizer

    def take_sent_ids(self) -> list[int]:
        """Ids that this rank sent to each rank in training since the last call; those of replicated tables stay."""
        sent, self._sent_ids = self._sent_ids, []
        return sent

    def reset_parameters(self) -> None:
        """Fills this rank's shards with their initial weights, from the seed of the collection."""
        for table in self.tables().values():
            table.reset_parameters()

    def tables(self) -> dict[str, ShardedTable]:
        """The tables by name."""
        tables: nn.ModuleDict = getattr(self, self.tables_attribute)
        return {name: table for name, table in tables.items() if isinstance(table, ShardedTable)}

    def kernels(self) -> list[Kernel]:
        """This rank's kernels: of the sharded tables, then of the replicated tables."""
        return [kernel for executor in self.executors for kernel in executor.kernels]

    @property
    def executors(self) -> list[ShardedExecutor | ReplicatedExecutor[Any]]:
        """The executors of the sharded and of the replicated tables."""
        return [executor for executor in (self._sharded, self._replicated) if executor is not None]

    # The stages, by the names that TorchRec's tutorials print.

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
        """The outputs in each tensor of the executors' results."""
        return [block for executor in self.executors for block in executor.blocks]

    def extra_repr(self) -> str:
        return f"(executors): {self.executors}\n(lookups): {self.kernels()}"
