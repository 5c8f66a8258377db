"""The executor of lookups id by id, in any rectangles on any ranks: every id's own vector comes back to its rank.

Where one rank's ids of a feature end and the next one's begin is all that matters, so a batch travels as one example a
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed.awaitable import Awaitable, Deferred, LazyAwaitable
from rayrec.distributed.kernel import VectorKernel, make_vector_kernel, vector_group
from rayrec.distributed.sharding.executor import Config, Setup
from rayrec.distributed.sharding.id_exchange import HostIds, IdExchange
from rayrec.distributed.sharding.id_receiver import RoutedIds
from rayrec.distributed.sharding.routing import make_routes
from rayrec.distributed.sharding.sequence_dedup import Dedup, Duplicates
from rayrec.distributed.sharding.sequence_exchange import SequenceExchange
from rayrec.distributed.sharding.sequence_order import PlaceFinder, Places
from rayrec.distributed.sharding.upload import OnHost
from rayrec.sparse import KeyedJaggedTensor


@dataclass(frozen=True)
class HostSequence:
    """A batch routed on the host, and where the vectors that come back belong; None: still to be found."""

    ids: HostIds
    duplicates: OnHost[Duplicates | None]
    places: Places | None


@dataclass(frozen=True)
class RoutedSequence:
    """What this rank looks up for all ranks, and where the vectors of its own ids belong."""

    ids: RoutedIds
    places: Places


class SequencesExecutor:
    """Lookups of sharded tables, one vector an id.

    Args:
        setup: what is served; tables of one width, if `dedup`.
        dedup: an id that comes several times in a feature of a rank's batch is sent and looked up once.
    """

    def __init__(self, setup: Setup[Config], dedup: bool = False) -> None:
        place = setup.place
        self._device = device = place.device
        self.routes = make_routes(
            setup.tables, setup.plan, setup.optimizers, place.world_size, lambda table: vector_group(table, device)
        )
        self._ids = IdExchange(self.routes, place, False, setup.num_counts)
        self._vectors = SequenceExchange(self.routes, place, setup.codec)
        self._finder = PlaceFinder(self.routes)
        self._dedup = Dedup(setup.tables, self.routes.features) if dedup and setup.tables else None
        route = self.routes.ranks[place.rank]
        self.kernels: dict[int, VectorKernel] = {
            number: make_vector_kernel(held, [lookup.table for lookup in route.lookups_of(number)], device)
            for number, held in route.tables.items()
        }

    def __repr__(self) -> str:
        return f"SequencesExecutor({len(self.routes.outputs)} outputs over {len(self.routes.ranks)} ranks)"

    def route(
        self, kjt: KeyedJaggedTensor, counts: torch.Tensor | None = None, problem: ValueError | None = None
    ) -> HostSequence:
        """As in `Executor`; `kjt` is one example."""
        duplicates = None
        if self._dedup is not None and problem is None:
            kjt, duplicates = self._dedup.apply(kjt)
        ids = self._ids.route(kjt, counts, problem, traced=True)
        early = self._device.type != "cpu"  # else while ids travel
        places = self._finder.find(ids.outgoing.item, duplicates) if early else None
        return HostSequence(ids, OnHost(duplicates), places)

    def send(self, batch: HostSequence) -> Awaitable[RoutedSequence]:
        routed = self._ids.send(batch.ids)
        places = batch.places or self._finder.find(batch.ids.outgoing.item, batch.duplicates.item)
        return Deferred(lambda: RoutedSequence(routed.wait(), places))

    def row_counts(self, batch: RoutedSequence) -> list[list[int]]:
        return batch.ids.row_counts

    def lookup(self, batch: RoutedSequence) -> list[torch.Tensor]:
        """For each kernel of this rank the vectors `[ids, width]` of all ranks' ids."""
        parts = [self.kernels[number].vectors(lookups) for number, lookups in batch.ids.lookups.items()]
        # a rank that holds no table takes part in every exchange
        return parts or [torch.zeros(0, device=self._device, requires_grad=torch.is_grad_enabled())]

    def output_dist(self, parts: Sequence[torch.Tensor], batch: RoutedSequence) -> LazyAwaitable[torch.Tensor]:
        """Waits for `[N, dim]`, output after output (see `sequence_order`)."""
        return self._vectors.start(parts, batch.ids, batch.places)
