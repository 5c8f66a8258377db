"""The sequence executor: lookups id by id, in any rectangles on any ranks, at a constant number of collectives a step.

Ids on the way in, vectors on the way out, gradients back: three, whatever mix the plan holds, and one more where ids
take two exchanges (see `id_transport`). Where one rank's ids of a feature end and the next one's begin is all that
matters, so a batch travels as one example a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed.awaitable import Awaitable, Deferred, LazyAwaitable
from rayrec.distributed.kernel import OptimizerSpec, VectorKernel, make_vector_kernel, vector_group
from rayrec.distributed.sharding.id_exchange import IdExchange
from rayrec.distributed.sharding.id_receiver import RoutedIds
from rayrec.distributed.sharding.place import Place
from rayrec.distributed.sharding.routing import make_routes
from rayrec.distributed.sharding.sequence_dedup import Dedup, Duplicates
from rayrec.distributed.sharding.sequence_exchange import SequenceExchange
from rayrec.distributed.sharding.vector_exchange import Codec
from rayrec.distributed.types import ModuleSharding
from rayrec.modules import BaseEmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor


@dataclass(frozen=True)
class SequenceIds:
    """What this rank looks up, and which of its own ids stand for several."""

    routed: RoutedIds
    duplicates: Duplicates | None


class SequenceExecutor:
    """Lookups of sharded tables, one vector an id.

    Args:
        tables: in the order of the collection; of one width, if `dedup`; none of them replicated.
        plan: their shards.
        optimizers: by table.
        place: this process among the ranks.
        num_counts: further numbers that ranks tell each other in the header.
        codec: number formats of the vectors on the wire.
        dedup: an id that comes several times in a feature of a rank's batch is sent and looked up once.
    """

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        plan: ModuleSharding,
        optimizers: Mapping[str, OptimizerSpec | None],
        place: Place,
        num_counts: int,
        codec: Codec,
        dedup: bool,
    ) -> None:
        self._device = device = place.device
        self.routes = make_routes(tables, plan, optimizers, place.world_size, lambda t: vector_group(t, device))
        self._ids = IdExchange(self.routes, place.group, place.rank, False, num_counts, device, traced=True)
        self._vectors = SequenceExchange(self.routes, place, codec)
        self._dedup = Dedup(tables, self.routes.features, device) if dedup and tables else None
        route = self.routes.ranks[place.rank]
        self.kernels: dict[int, VectorKernel] = {
            number: make_vector_kernel(held, [lookup.table for lookup in route.lookups_of(number)], device)
            for number, held in route.tables.items()
        }

    def __repr__(self) -> str:
        return f"SequenceExecutor({len(self.routes.outputs)} outputs over {len(self.routes.ranks)} ranks)"

    def input_dist(
        self, kjt: KeyedJaggedTensor, counts: torch.Tensor | None = None, problem: ValueError | None = None
    ) -> Awaitable[SequenceIds]:
        """Sends the ids of a batch of one example to the ranks that hold their rows.

        Args:
            kjt: every feature of the routes, among others.
            counts: int64 numbers that every rank is told.
            problem: why this rank cannot go on; `wait` then raises on every rank.
        """
        duplicates = None
        if self._dedup is not None and problem is None:
            kjt, duplicates = self._dedup.apply(kjt)
        routed = self._ids.start(kjt, counts, problem)
        return Deferred(lambda: SequenceIds(routed.wait(), duplicates))

    def lookup(self, ids: SequenceIds) -> list[torch.Tensor]:
        """For each kernel of this rank the vectors `[ids, width]` of all ranks' ids."""
        parts = [self.kernels[number].vectors(lookups) for number, lookups in ids.routed.lookups.items()]
        # a rank that holds no table takes part in every exchange
        return parts or [torch.zeros(0, device=self._device, requires_grad=torch.is_grad_enabled())]

    def output_dist(self, parts: Sequence[torch.Tensor], ids: SequenceIds) -> LazyAwaitable[torch.Tensor]:
        """Sends each rank its ids' vectors: waits for `[N, dim]`, output after output (see `sequence_order`)."""
        return self._vectors.start(parts, ids.routed, ids.duplicates)
