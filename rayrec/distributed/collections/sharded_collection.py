"""What sharded collections of bags and of vectors have in common beside a step: tables, kernels and their optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Generic

from torch import nn

from rayrec.distributed.collections.fused_optimizer import ScaledGradients, fused_optimizer_of
from rayrec.distributed.collections.sharded_table import ShardedTable, make_tables
from rayrec.distributed.collections.stages import Stages
from rayrec.distributed.executors.setup import Looked, Own, Setup
from rayrec.distributed.ids.check import IdCheck
from rayrec.distributed.kernel import Kernel
from rayrec.optim import CombinedOptimizer


class ShardedCollection(nn.Module, Generic[Own, Looked]):
    """A collection whose tables lie on many ranks.

    Args:
        setup: the tables and their plan.
        stages: the executors that serve them.
    """

    shown_as: ClassVar[str]  # the attribute that holds the tables, as in the unsharded collection

    def __init__(self, setup: Setup[Any], stages: Stages[Own, Looked]) -> None:
        super().__init__()
        self._stages = stages
        self._scaled = ScaledGradients(any(optimizer is not None for optimizer in setup.optimizers.values()))
        self._check = IdCheck(tuple(setup.configs), setup.weighted)
        shown = make_tables(setup, stages.kernels, stages.exchange.routes)
        self.add_module(self.shown_as, nn.ModuleDict(shown))
        self._optimizer = fused_optimizer_of(stages.kernels, shown, self.shown_as)

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
        return self._stages.kernels

    # -- the stages by the tutorials' names

    def extra_repr(self) -> str:
        return f"(executors): {self._stages.executors}\n(lookups): {self.kernels()}"

    @property
    def _input_dists(self) -> Sequence[object]:
        return self._stages.executors

    @property
    def _lookups(self) -> list[Kernel]:
        return self.kernels()

    @property
    def _output_dists(self) -> Sequence[object]:
        return self._stages.executors
