"""What sharded collections have in common outside a step: executors, tables, kernels and their optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from rayrec.distributed.collections.fused_optimizer import fused_optimizer_of
from rayrec.distributed.collections.sharded_table import ShardedTable, make_tables
from rayrec.distributed.comm.host_memory import keep_freed_memory
from rayrec.distributed.executors.replicated import ReplicatedExecutor
from rayrec.distributed.executors.setup import Executor, Setup, ShardedExecutor
from rayrec.distributed.ids.input_dist import IdCheck, InputDist, RoutedFeatures
from rayrec.distributed.ids.routes import Output
from rayrec.distributed.kernel import Kernel
from rayrec.optim import CombinedOptimizer
from rayrec.sparse import KeyedJaggedTensor


class ShardedCollection(nn.Module, ABC):
    """A collection whose tables lie on many ranks.

    Args:
        setup: the tables and their plan.
        sharded: the executor of the tables that are cut.
        replicated: of the others; None if there are none.
    """

    shown_as: ClassVar[str]  # the attribute that holds the tables, as in the unsharded collection

    def __init__(self, setup: Setup[Any], sharded: ShardedExecutor, replicated: ReplicatedExecutor[Any] | None) -> None:
        super().__init__()
        if setup.place.device.type == "cpu":
            keep_freed_memory()
        self._sharded, self._replicated = sharded, replicated
        updates = any(optimizer is not None for optimizer in setup.optimizers.values())
        self._check = IdCheck(tuple(setup.configs), setup.weighted)
        shown = make_tables(setup, self.kernels(), sharded.exchange.routes)
        self.add_module(self.shown_as, nn.ModuleDict(shown))
        self._optimizer = fused_optimizer_of(self.kernels(), shown, self.shown_as)
        self.ids_ahead = InputDist(setup.place.device, self._prepare, sharded.exchange, updates)

    @abstractmethod
    def _prepare(self, features: KeyedJaggedTensor) -> RoutedFeatures:
        """What a batch sends to every rank and what it keeps.

        Raises:
            ValueError: a batch that cannot be looked up.
        """

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
    def executors(self) -> list[Executor]:
        """One or two."""
        return [executor for executor in (self._sharded, self._replicated) if executor is not None]

    @property
    def blocks(self) -> list[list[Output]]:
        """The outputs of each tensor of the executors' results."""
        return [block for executor in self.executors for block in executor.blocks]

    # -- the stages by the tutorials' names

    def extra_repr(self) -> str:
        return f"(executors): {self.executors}\n(lookups): {self.kernels()}"

    @property
    def _input_dists(self) -> Sequence[object]:
        return self.executors

    @property
    def _lookups(self) -> list[Kernel]:
        return self.kernels()

    @property
    def _output_dists(self) -> Sequence[object]:
        return self.executors
