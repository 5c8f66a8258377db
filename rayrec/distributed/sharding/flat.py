"""The flat executor: any rectangles on any ranks, at a constant number of collectives a step.

Ids on the way in, vectors on the way out, gradients back: three, whatever mix the plan holds, and one more where ids
take two exchanges (see `id_transport`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rayrec.distributed.awaitable import Awaitable, LazyAwaitable
from rayrec.distributed.kernel import OptimizerSpec, PoolingKernel, make_pooling_kernel, pooling_group
from rayrec.distributed.sharding.columns import columns_of
from rayrec.distributed.sharding.id_exchange import IdExchange
from rayrec.distributed.sharding.id_receiver import RoutedIds
from rayrec.distributed.sharding.place import Place
from rayrec.distributed.sharding.pooling import MeanScale, is_mean
from rayrec.distributed.sharding.routing import make_routes
from rayrec.distributed.sharding.vector_exchange import Codec, VectorExchange
from rayrec.distributed.types import ModuleSharding
from rayrec.modules import EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor


class PooledLookups:
    """What the executors of sharded tables share: ids on their way in, and this rank's sums.

    Args:
        tables: in the order of the collection; none of them replicated.
        plan: their shards.
        optimizers: by table.
        place: this process among the ranks.
        weighted: ids carry weights.
        num_counts: further numbers that ranks tell each other in the header.
        sources: the order of ranks within the global batch; by default rank order.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        plan: ModuleSharding,
        optimizers: Mapping[str, OptimizerSpec | None],
        place: Place,
        weighted: bool,
        num_counts: int,
        sources: Sequence[int] | None = None,
    ) -> None:
        self._device = device = place.device
        self.routes = make_routes(tables, plan, optimizers, place.world_size, lambda t: pooling_group(t, device))
        self._ids = IdExchange(self.routes, place.group, place.rank, weighted, num_counts, device, sources=sources)
        route = self.routes.ranks[place.rank]
        self.kernels: dict[int, PoolingKernel] = {
            number: make_pooling_kernel(held, [lookup.table for lookup in route.lookups_of(number)], device)
            for number, held in route.tables.items()
        }
        self.scale = MeanScale([(o.feature, is_mean(tables, o.table)) for o in self.routes.outputs])

    def input_dist(
        self, kjt: KeyedJaggedTensor, counts: torch.Tensor | None = None, problem: ValueError | None = None
    ) -> Awaitable[RoutedIds]:
        """Sends ids to the ranks that hold their rows; `problem` reaches every rank as an error."""
        return self._ids.start(kjt, counts, problem)

    def lookup(self, ids: RoutedIds) -> torch.Tensor:
        """Sums of this rank's lookups for the global batch, `[global B, own width]`, source after source."""
        parts = [self.kernels[number].pooled(lookups) for number, lookups in ids.lookups.items()]
        if not parts:  # this rank holds no table, but takes part in every exchange
            nothing = torch.zeros(sum(ids.batch_sizes), 0, device=self._device, requires_grad=torch.is_grad_enabled())
            return nothing if ids.weights is None else nothing + ids.weights.sum() * 0
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class FlatExecutor:
    """Pooled lookups of sharded tables; vectors go straight to the rank that wants them, which adds up row partials.

    Args:
        tables: in the order of the collection; none of them replicated.
        plan: their shards.
        optimizers: by table.
        place: this process among the ranks.
        weighted: ids carry weights.
        num_counts: further numbers that ranks tell each other in the header.
        codec: number formats of the pooled vectors on the wire.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        plan: ModuleSharding,
        optimizers: Mapping[str, OptimizerSpec | None],
        place: Place,
        weighted: bool,
        num_counts: int,
        codec: Codec,
    ) -> None:
        self._lookups = PooledLookups(tables, plan, optimizers, place, weighted, num_counts)
        self.routes, self.kernels = self._lookups.routes, self._lookups.kernels
        self._vectors = VectorExchange(columns_of(self.routes), place.group, place.rank, codec, place.device)

    def __repr__(self) -> str:
        return f"FlatExecutor({len(self.routes.outputs)} outputs over {len(self.routes.ranks)} ranks)"

    def input_dist(
        self, kjt: KeyedJaggedTensor, counts: torch.Tensor | None = None, problem: ValueError | None = None
    ) -> Awaitable[RoutedIds]:
        """Sends ids to the ranks that hold their rows; `problem` reaches every rank as an error."""
        return self._lookups.input_dist(kjt, counts, problem)

    def lookup(self, ids: RoutedIds) -> torch.Tensor:
        """Sums of this rank's lookups for the global batch, `[global B, own width]`, rank after rank."""
        return self._lookups.lookup(ids)

    def output_dist(self, pooled: torch.Tensor, ids: RoutedIds, kjt: KeyedJaggedTensor) -> LazyAwaitable[torch.Tensor]:
        """Sends each rank its examples' vectors: waits for `[B, total width]`, means where tables ask for them."""
        return self._vectors.start(pooled, ids.batch_sizes, self._lookups.scale.of(kjt))
