"""Settings of a collection, and the interface of the executors of sharded tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol

import torch

from rayrec.distributed.comm.rank_context import RankContext
from rayrec.distributed.comm.wire import Codec
from rayrec.distributed.ids.batch import RankIds
from rayrec.distributed.ids.exchange import IdExchange
from rayrec.distributed.ids.routes import Config, Output, PlannedTable
from rayrec.distributed.kernel.interface import Kernel
from rayrec.distributed.plan.sharding_plan import ModuleSharding
from rayrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


@dataclass(frozen=True, kw_only=True)
class Setup(Generic[Config]):
    """The tables of a collection or an executor, and its settings.

    Args:
        tables: the tables, in the order of the collection.
        context: this process among the ranks.
        codec: number formats of the vectors on the wire.
        weighted: whether ids carry weights.
        dedup: whether an id that repeats in a feature of a rank's batch is sent and looked up once; "auto": in batches
            where that is faster (lookups id by id only).
    """

    tables: tuple[PlannedTable[Config], ...]
    context: RankContext
    codec: Codec
    weighted: bool
    dedup: bool | Literal["auto"]

    @property
    def configs(self) -> list[Config]:
        return [table.config for table in self.tables]

    @property
    def plan(self) -> ModuleSharding:
        return {table.config.name: table.sharding for table in self.tables}


class ShardedExecutor(Protocol):
    """Lookups of sharded tables: sends ids to the ranks that hold their rows. The number of collectives per step does
    not depend on the plan."""

    @property
    def kernels(self) -> Sequence[Kernel]:
        """The kernels of this rank."""

    @property
    def blocks(self) -> list[list[Output]]:
        """The outputs in each tensor of the result: blocks of columns, or of rows."""

    @property
    def exchange(self) -> IdExchange:
        """The exchange of ids."""

    def prepare(self, kjt: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Any]:
        """Runs on the host before ids are sent.

        Args:
            kjt: every feature of the tables, and maybe others; on the host.

        Returns:
            the ids to send, and data that stays on this rank, whose tensors are moved to the device.
        """

    def lookup(self, ids: RankIds) -> Any:
        """Vectors of this rank's shards for all ranks."""

    def output_dist(self, vectors: Any, ids: RankIds) -> Callable[[], torch.Tensor] | None:
        """Starts to send each rank its vectors. The returned function waits for the vectors of this rank's own batch.
        None without tables."""
