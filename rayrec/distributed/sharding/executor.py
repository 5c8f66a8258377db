"""What every executor of sharded tables is made of and offers. There are `tiers`, `sequences` and, on top of these,
`dedup`; tables that are not cut have `replicated`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from rayrec.distributed.awaitable import Awaitable, LazyAwaitable
from rayrec.distributed.kernel import Kernel, OptimizerSpec
from rayrec.distributed.sharding.place import Place
from rayrec.distributed.sharding.routing import Routes
from rayrec.distributed.sharding.vector_transport import Codec
from rayrec.distributed.types import ModuleSharding
from rayrec.modules import BaseEmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor

Config = TypeVar("Config", bound=BaseEmbeddingConfig)
Host = TypeVar("Host")
Routed = TypeVar("Routed")
Looked = TypeVar("Looked")


@dataclass(frozen=True, kw_only=True)
class Setup(Generic[Config]):
    """What an executor serves.

    Args:
        tables: in the order of the collection; none of them replicated.
        plan: their shards.
        optimizers: by table.
        place: this process among the ranks.
        codec: number formats of the vectors on the wire.
        weighted: ids carry weights.
        num_counts: further numbers that ranks tell each other with their ids.
    """

    tables: Sequence[Config]
    plan: ModuleSharding
    optimizers: Mapping[str, OptimizerSpec | None]
    place: Place
    codec: Codec
    weighted: bool = False
    num_counts: int = 0


class Executor(Protocol[Host, Routed, Looked]):
    """Lookups of sharded tables at a constant number of collectives a step, whatever mix the plan holds."""

    @property
    def routes(self) -> Routes:
        """Which ids go where, and which columns come back."""

    @property
    def kernels(self) -> Mapping[int, Kernel]:
        """This rank's, by group of tables."""

    def route(self, kjt: KeyedJaggedTensor, counts: torch.Tensor | None, problem: ValueError | None) -> Host:
        """Host work: puts ids in the order in which they are sent.

        Args:
            kjt: every feature of the tables, among others; on the host.
            counts: int64 numbers that every rank is told.
            problem: why this rank cannot go on; waiting for `send` then raises on every rank.
        """

    def send(self, ids: Host) -> Awaitable[Routed]:
        """Begins to send what was routed, whose tensors are on the device; waits for what this rank looks up."""

    def row_counts(self, ids: Routed) -> list[list[int]]:
        """For each rank, the counts that it told."""

    def lookup(self, ids: Routed) -> Looked:
        """Vectors of this rank's tables for all ranks."""

    def output_dist(self, vectors: Looked, ids: Routed) -> LazyAwaitable[torch.Tensor]:
        """Begins to send each rank its vectors; waits for those of this rank's own batch."""
