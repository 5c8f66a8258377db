"""What executors are made of, and their interface. There are three: `pooled`, `sequences` and `replicated`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol

import torch

from rayrec.distributed.comm.rank_context import RankContext
from rayrec.distributed.comm.wire import Codec
from rayrec.distributed.ids.batch import RankIds
from rayrec.distributed.ids.exchange import IdExchange
from rayrec.distributed.ids.routes import Config, Output, PlannedTable
from rayrec.distributed.kernel.interface import Kernel
from rayrec.distributed.plan.sharding_plan import ModuleSharding
from rayrec.sparse import KeyedJaggedTensor


@dataclass(frozen=True, kw_only=True)
class Setup(Generic[Config]):
    """What is served.

    Args:
        tables: in the order of the collection.
        context: This process among the ranks.
        codec: number formats of the vectors on the wire.
        weighted: ids carry weights.
        dedup: an id that comes several times in a feature of a rank's batch is sent and looked up once.
    """

    tables: tuple[PlannedTable[Config], ...]
    context: RankContext
    codec: Codec
    weighted: bool
    dedup: bool

    @property
    def configs(self) -> list[Config]:
        return [table.config for table in self.tables]

    @property
    def plan(self) -> ModuleSharding:
        return {table.config.name: table.sharding for table in self.tables}


class ShardedExecutor(Protocol):
    """Lookups of tables that are cut, whose ids are sent to the ranks that hold their rows, at a constant number of
    collectives a step, whatever mix the plan holds."""

    @property
    def kernels(self) -> Sequence[Kernel]:
        """This rank's."""

    @property
    def blocks(self) -> list[list[Output]]:
        """For each tensor of the result the outputs that it holds: side by side, or one below the other."""

    @property
    def exchange(self) -> IdExchange:
        """`input_dist`."""

    def prepare(self, kjt: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Any]:
        """Host work, before ids are sent: the ids to send, and what stays on this rank; its tensors are moved to the
        device.

        Args:
            kjt: every feature of the tables, among others; on the host.
        """

    def lookup(self, ids: RankIds) -> Any:
        """Vectors of this rank's tables for all ranks."""

    def output_dist(self, vectors: Any, ids: RankIds) -> Callable[[], torch.Tensor] | None:
        """Begins to send each rank its vectors. The function that it returns waits for those of this rank's own batch;
        None if there are no tables."""
