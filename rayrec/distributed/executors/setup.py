"""What every executor is made of and offers. There are three: `tiers`, `sequences` (a vector an id, which may be pooled
on the rank that asked) and `replicated`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch

from rayrec.distributed.comm.awaitable import LazyAwaitable
from rayrec.distributed.comm.place import Place
from rayrec.distributed.comm.wire import Codec
from rayrec.distributed.ids.exchange import IdExchange
from rayrec.distributed.ids.receiver import RoutedIds
from rayrec.distributed.ids.routes import Output
from rayrec.distributed.kernel import Kernel, OptimizerSpec
from rayrec.distributed.plan.sharding_plan import ModuleSharding
from rayrec.distributed.plan.shards import ParameterSharding
from rayrec.modules import BaseEmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor

Config = TypeVar("Config", bound=BaseEmbeddingConfig)
Own = TypeVar("Own")
Looked = TypeVar("Looked")


@dataclass(frozen=True)
class PlannedTable(Generic[Config]):
    """A table, its shards and its update inside backward; None leaves gradients to an optimizer of the user's."""

    config: Config
    sharding: ParameterSharding
    optimizer: OptimizerSpec | None


@dataclass(frozen=True, kw_only=True)
class Setup(Generic[Config]):
    """What is served.

    Args:
        tables: in the order of the collection.
        place: this process among the ranks.
        codec: number formats of the vectors on the wire.
        weighted: ids carry weights.
        dedup: an id that comes several times in a feature of a rank's batch is sent and looked up once.
    """

    tables: tuple[PlannedTable[Config], ...]
    place: Place
    codec: Codec
    weighted: bool
    dedup: bool

    @property
    def configs(self) -> list[Config]:
        return [table.config for table in self.tables]

    @property
    def plan(self) -> ModuleSharding:
        return {table.config.name: table.sharding for table in self.tables}

    @property
    def optimizers(self) -> dict[str, OptimizerSpec | None]:
        return {table.config.name: table.optimizer for table in self.tables}

    def only(self, *, replicated: bool) -> Setup[Config]:
        """The same of those tables that are replicated, or of the others."""
        return replace(self, tables=tuple(table for table in self.tables if table.sharding.replicated == replicated))


@dataclass(frozen=True)
class Prepared(Generic[Own]):
    """A batch as an executor takes it, on the host.

    Args:
        kjt: whose ids are sent.
        own: what stays on this rank; its tensors go to the device.
        counts: numbers that every rank must be told before it looks up; always equally many.
    """

    kjt: KeyedJaggedTensor
    own: Own
    counts: tuple[int, ...] = ()


class Executor(Protocol[Own, Looked]):
    """Lookups of some tables at a constant number of collectives a step, whatever mix the plan holds."""

    @property
    def ids(self) -> IdExchange | None:
        """`input_dist`: the way of ids to the ranks that look them up; None where each rank does so for itself."""

    @property
    def kernels(self) -> Sequence[Kernel]:
        """This rank's."""

    @property
    def blocks(self) -> list[list[Output]]:
        """For each tensor of the result the outputs that it holds: side by side, or one below the other."""

    def prepare(self, kjt: KeyedJaggedTensor) -> Prepared[Own]:
        """Host work, before ids are sent.

        Args:
            kjt: every feature of the tables, among others; on the host.
        """

    def lookup(self, ids: RoutedIds, own: Own) -> Looked:
        """Vectors of this rank's tables for all ranks."""

    def output_dist(self, vectors: Looked, ids: RoutedIds, own: Own) -> LazyAwaitable[list[torch.Tensor]]:
        """Begins to send each rank its vectors; waits for those of this rank's own batch, see `blocks`."""
