"""The hierarchical executor: parts of a vector that a host's ranks hold are added up there, and leave the host once.

Ids travel as in the flat executor. Vectors take two exchanges: inside each host, every rank gets the sums of the
host's parts for those examples that belong to it or to a rank of its place on another host; then ranks of one place
meet across hosts. Backward takes the same way in reverse. Between hosts it sends a vector once for each host that
holds rows of the table, where the flat executor sends it once for each rank. Two rules say when the flat way is taken
after all: `worthwhile_hosts` for a plan, FEW_BYTES for a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from rayrec.distributed import comm
from rayrec.distributed.awaitable import Awaitable, LazyAwaitable
from rayrec.distributed.kernel import OptimizerSpec
from rayrec.distributed.sharding.columns import across_hosts, columns_of, inside_host, union
from rayrec.distributed.sharding.flat import PooledLookups
from rayrec.distributed.sharding.hosts import Hosts, find_hosts
from rayrec.distributed.sharding.id_receiver import RoutedIds
from rayrec.distributed.sharding.place import Place
from rayrec.distributed.sharding.vector_exchange import Codec, VectorExchange
from rayrec.distributed.types import ModuleSharding, Span
from rayrec.modules import EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor

WORTHWHILE = 0.75  # of the flat executor's columns between hosts
FEW_BYTES = 1 << 18  # saved by a rank in one direction; below, another exchange costs more (jobs/bench_hosts.py)


class HierarchicalExecutor:
    """Pooled lookups of sharded tables; row partials are added up on their host before they go to another.

    Args:
        tables: in the order of the collection; none of them replicated.
        plan: their shards.
        optimizers: by table.
        place: this process among the ranks.
        hosts: who shares a host; more than one, of more than one rank.
        weighted: ids carry weights.
        num_counts: further numbers that ranks tell each other in the header.
        codec: number formats of the pooled vectors on the wire, inside hosts and between them.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        plan: ModuleSharding,
        optimizers: Mapping[str, OptimizerSpec | None],
        place: Place,
        hosts: Hosts,
        weighted: bool,
        num_counts: int,
        codec: Codec,
    ) -> None:
        assert place.group is not None
        self._hosts = hosts
        # place after place, so that what goes to a rank of the host lies in one piece
        self._sources = [rank for peers in hosts.peers for rank in peers]
        self._lookups = PooledLookups(tables, plan, optimizers, place, weighted, num_counts, self._sources)
        self.routes, self.kernels = self._lookups.routes, self._lookups.kernels
        columns = columns_of(self.routes)
        host, own = divmod(place.rank, hosts.size)
        self._peers, neighbours = hosts.peers[own], hosts.ranks[host]
        inside = comm.subgroup(place.group, neighbours, place.device)
        across = comm.subgroup(place.group, self._peers, place.device)
        self._flat = VectorExchange(columns, place.group, place.rank, codec, place.device)
        self._inside = VectorExchange(inside_host(columns, neighbours), inside, own, codec, place.device)
        self._across = VectorExchange(across_hosts(columns, hosts.ranks), across, host, codec, place.device)
        self._saved_bytes = 4 * (sum(self._flat.widths) - sum(self._across.widths)) / place.world_size  # an example

    def __repr__(self) -> str:
        hosts = f"{len(self._hosts.ranks)} hosts of {self._hosts.size} ranks"
        return f"HierarchicalExecutor({len(self.routes.outputs)} outputs over {hosts})"

    def input_dist(
        self, kjt: KeyedJaggedTensor, counts: torch.Tensor | None = None, problem: ValueError | None = None
    ) -> Awaitable[RoutedIds]:
        """Sends ids to the ranks that hold their rows; `problem` reaches every rank as an error."""
        return self._lookups.input_dist(kjt, counts, problem)

    def lookup(self, ids: RoutedIds) -> torch.Tensor:
        """Sums of this rank's lookups for the global batch, `[global B, own width]`, place after place on the hosts."""
        return self._lookups.lookup(ids)

    def output_dist(self, pooled: torch.Tensor, ids: RoutedIds, kjt: KeyedJaggedTensor) -> LazyAwaitable[torch.Tensor]:
        """Sends each rank its examples' vectors: waits for `[B, total width]`, means where tables ask for them.

        Returns when the exchange inside the host is done; the slower one is then under way. A small batch, as all ranks
        together see it, takes the flat executor's way.
        """
        if sum(ids.batch_sizes) * self._saved_bytes < FEW_BYTES:
            return self._flat.start(self._by_rank(pooled, ids), ids.batch_sizes, self._lookups.scale.of(kjt))
        of_places = [sum(ids.batch_sizes[rank] for rank in peers) for peers in self._hosts.peers]
        of_peers = [ids.batch_sizes[rank] for rank in self._peers]
        sums = self._inside.start(pooled, of_places, None).wait()
        return self._across.start(sums, of_peers, self._lookups.scale.of(kjt))

    def _by_rank(self, pooled: torch.Tensor, ids: RoutedIds) -> torch.Tensor:
        parts = pooled.split([ids.batch_sizes[rank] for rank in self._sources])
        return torch.cat([part for _, part in sorted(zip(self._sources, parts, strict=True), key=lambda pair: pair[0])])


def worthwhile_hosts(tables: Sequence[EmbeddingBagConfig], plan: ModuleSharding, place: Place) -> Hosts | None:
    """The hosts that the hierarchical executor needs; None where the flat one is the better choice.

    That is where no host holds several row blocks of the same columns, or too few to save a quarter of what the flat
    executor sends between hosts. Asks for hosts, a collective, only where a plan cuts tables by rows.
    """
    flat = _columns_sent(tables, plan, lambda rank: rank)
    if flat == _columns_sent(tables, plan, lambda rank: 0):
        return None
    hosts = find_hosts(place)
    if hosts is None or _columns_sent(tables, plan, lambda rank: rank // hosts.size) > WORTHWHILE * flat:
        return None
    return hosts


def _columns_sent(tables: Sequence[EmbeddingBagConfig], plan: ModuleSharding, sender_of: Callable[[int], int]) -> int:
    """Columns of an example that leave their senders, where `sender_of` a rank adds up what its ranks have."""
    total = 0
    for table in tables:
        spans: dict[int, list[Span]] = {}
        for shard in plan[table.name].shards:
            spans.setdefault(sender_of(shard.rank), []).append(shard.cols)
        total += len(table.feature_names) * sum(span.size for held in spans.values() for span in union(held))
    return total
