"""The executor of lookups id by id, in any rectangles on any ranks: every id's own vector comes back to its rank.

Where one rank's ids of a feature end and the next one's begin is all that matters, so a batch travels as one example a
rank. Where each distinct id is sent once, `distinct` makes each id's vector, or bags, of those that come back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Generic

import torch

from rayrec.distributed.executors.setup import Setup
from rayrec.distributed.ids.batch import RankIds
from rayrec.distributed.ids.exchange import IdExchange
from rayrec.distributed.ids.routes import Config, make_routes
from rayrec.distributed.kernel.factory import make_vector_kernel, vector_group
from rayrec.distributed.kernel.fused import CacheGuard
from rayrec.distributed.kernel.interface import Kernel
from rayrec.distributed.vectors.dedup import Distinct, KeptIds
from rayrec.distributed.vectors.sequence_exchange import SequenceExchange
from rayrec.distributed.vectors.sequence_order import SequenceOrder
from rayrec.sparse import KeyedJaggedTensor


class SequencesExecutor(Generic[Config]):
    """Lookups of sharded tables, one vector an id; with dedup, one vector on the wire for each distinct id.

    Args:
        setup: what is served. Bags need dedup; then weights and their gradients stay on their rank.
        num_counts: of a batch's header, for other executors.
    """

    def __init__(self, setup: Setup[Config], num_counts: int = 0) -> None:
        setup, context = _by_rank(setup), setup.context
        self._device = device = context.device
        routes = make_routes(setup.tables, context.world_size, lambda table: vector_group(table, device))
        order, sources = SequenceOrder(routes), range(context.world_size)
        self.exchange = IdExchange(routes, context, False, sources, num_counts, order.find_units)
        self._vectors = SequenceExchange(routes, order, context, setup.codec)
        self._distinct = Distinct(setup.configs, setup.weighted, routes) if setup.dedup and setup.tables else None
        route = routes.ranks[context.rank]
        # ids come rank by rank, and so do the vectors: nothing is put in another order before they leave
        self._kernels: dict[int, Kernel] = {
            number: make_vector_kernel(
                held, [lookup.table for lookup in route.lookups_of(number)] * context.world_size, device
            )
            for number, held in route.tables.items()
        }
        self.kernels = list(self._kernels.values())
        self._cache = CacheGuard.of(setup.plan, device)
        self.blocks = [list(routes.outputs)] if routes.outputs else []

    def __repr__(self) -> str:
        dedup, routes = ", each distinct id once" if self._distinct else "", self.exchange.routes
        return f"SequencesExecutor({len(routes.outputs)} outputs over {len(routes.ranks)} ranks{dedup})"

    def prepare(self, kjt: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, KeptIds | None]:
        """Keeps how distinct ids' vectors become the result; without dedup `kjt` is one example."""
        return (kjt, None) if self._distinct is None else self._distinct.take_out(kjt)

    def lookup(self, ids: RankIds) -> list[torch.Tensor]:
        """For each kernel of this rank the vectors `[ids, width]` of all ranks' ids, rank after rank."""
        if self._cache is not None:
            self._cache.check()
        parts = [self._kernels[number].lookup(lookups) for number, lookups in ids.lookups.items()]
        # a rank that holds no table takes part in every exchange
        parts = parts or [torch.zeros(0, device=self._device, requires_grad=torch.is_grad_enabled())]
        if self._cache is not None:
            self._cache.watch(parts[0])
        return parts

    def output_dist(self, vectors: list[torch.Tensor], ids: RankIds) -> Callable[[], torch.Tensor] | None:
        """Waits for `[N, dim]`, output after output (see `sequence_order`), or for bags `[B, total width]`."""
        if not self.blocks:
            return None
        rows, distinct = self._vectors.start(vectors, ids), self._distinct
        return rows if distinct is None else lambda: distinct.finish(rows(), ids.kept.sharded)


def _by_rank(setup: Setup[Config]) -> Setup[Config]:
    """Tables in the order of the ranks that hold them: vectors of tables that are not cut then arrive in the order of
    the outputs, and are not moved again."""
    first = {name: min((shard.rank for shard in sharding.shards), default=0) for name, sharding in setup.plan.items()}
    return replace(setup, tables=tuple(sorted(setup.tables, key=lambda table: first[table.config.name])))
