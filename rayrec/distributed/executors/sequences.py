"""The executor of lookups id by id: sends every id's own vector to the rank that sent the id.

Lookups id by id do not depend on examples, so a batch travels as one example per rank. With dedup each distinct id is
sent once, and `Distinct` turns the vectors that come back into each id's vector, or into bags.
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
from rayrec.distributed.vectors.dedup import Distinct, DistinctIds
from rayrec.distributed.vectors.sequence_exchange import SequenceExchange
from rayrec.distributed.vectors.sequence_order import SequenceOrder
from rayrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


class SequencesExecutor(Generic[Config]):
    """Lookups of sharded tables with one vector per id, or with dedup, one vector on the wire per distinct id.

    Args:
        setup: the sharded tables. Bags need dedup; weights and their gradients then stay on their rank.
        num_counts: number of counts for other executors in a header.
    """

    def __init__(self, setup: Setup[Config], num_counts: int = 0) -> None:
        setup, context = _by_rank(setup), setup.context
        self._device = device = context.device
        routes = make_routes(setup.tables, context.world_size, lambda table: vector_group(table, device))
        order, sources = SequenceOrder(routes), range(context.world_size)
        self.exchange = IdExchange(routes, context, False, sources, num_counts, order.find_units)
        self._vectors = SequenceExchange(routes, order, context, setup.codec)
        self._distinct = Distinct(setup.configs, setup.weighted, routes) if setup.dedup and setup.tables else None
        self._auto = setup.dedup == "auto"
        route = routes.ranks[context.rank]
        # Ids come ordered by rank, and so do the vectors: they are sent without another permutation.
        self._kernels: dict[int, Kernel] = {
            group: make_vector_kernel(
                tables, [lookup.table for lookup in route.lookups_of(group)] * context.world_size, device
            )
            for group, tables in route.tables.items()
        }
        self.kernels = list(self._kernels.values())
        self._cache = CacheGuard.of(setup.plan, device)
        self.blocks = [list(routes.outputs)] if routes.outputs else []

    def __repr__(self) -> str:
        dedup, routes = ", each distinct id once" if self._distinct else "", self.exchange.routes
        dedup += " where ids repeat often" if self._distinct and self._auto else ""
        return f"SequencesExecutor({len(routes.outputs)} outputs over {len(routes.ranks)} ranks{dedup})"

    def prepare(self, kjt: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, DistinctIds | None]:
        """The ids to send: with dedup the distinct ids. Without dedup `kjt` must have one example.

        Other ranks get one example of ids in either case, so a rank decides alone, and for each batch.
        """
        if self._distinct is None or (self._auto and not self._distinct.pays(kjt)):
            return kjt, None
        return self._distinct.extract(kjt)

    def lookup(self, ids: RankIds) -> list[torch.Tensor]:
        """For each kernel of this rank the vectors `[ids, width]` of all ranks' ids, ordered by rank."""
        if self._cache is not None:
            self._cache.check()
        vectors = [self._kernels[group].lookup(lookups) for group, lookups in ids.lookups.items()]
        # A rank without tables takes part in every exchange.
        vectors = vectors or [torch.zeros(0, device=self._device, requires_grad=torch.is_grad_enabled())]
        if self._cache is not None:
            self._cache.watch(vectors[0])
        return vectors

    def output_dist(self, vectors: list[torch.Tensor], ids: RankIds) -> Callable[[], torch.Tensor] | None:
        """Starts to send vectors; the returned function waits for `[N, dim]`, output after output (see
        `sequence_order`), or for bags `[B, total width]`."""
        if not self.blocks:
            return None
        rows, distinct, own = self._vectors.start(vectors, ids), self._distinct, ids.kept.sharded
        return rows if distinct is None or own is None else lambda: distinct.expand(rows(), own)


def _by_rank(setup: Setup[Config]) -> Setup[Config]:
    """Sorts tables by the ranks that hold them: vectors of tables that are not cut then arrive in the order of the
    outputs, and are not permuted again."""
    rank_of = {name: min((shard.rank for shard in sharding.shards), default=0) for name, sharding in setup.plan.items()}
    return replace(setup, tables=tuple(sorted(setup.tables, key=lambda table: rank_of[table.config.name])))
