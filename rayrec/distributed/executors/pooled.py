"""The executor of pooled tables, cut in any way: sums come back to the rank that sent the ids.

One tier: vectors go straight there, and row partials are added up on arrival. Two tiers: what the ranks of a host hold
of a vector is added up there first, and leaves the host once. Every rank then gets the host's sums for those examples
that belong to it or to a rank of its place on another host; after that, ranks of one place exchange across hosts.
Backward takes the same way in reverse. Two rules choose one tier after all: `worthwhile_hosts` for a plan, FEW_BYTES
for a step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rayrec.distributed import comm
from rayrec.distributed.comm.hosts import Hosts, find_hosts
from rayrec.distributed.executors.setup import Setup
from rayrec.distributed.ids.batch import RankIds
from rayrec.distributed.ids.exchange import IdExchange
from rayrec.distributed.ids.routes import make_routes
from rayrec.distributed.kernel.factory import make_pooling_kernel, pooling_group
from rayrec.distributed.kernel.fused import CacheGuard
from rayrec.distributed.kernel.interface import Kernel
from rayrec.distributed.plan.shards import Span
from rayrec.distributed.vectors.columns import ColumnMap, across_hosts, columns_of, inside_host, union
from rayrec.distributed.vectors.pooled_exchange import MeanScale, PooledExchange
from rayrec.modules.configs import EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor

WORTHWHILE = 0.75  # of one tier's columns between hosts
FEW_BYTES = 1 << 18  # saved by a rank in one direction; below, another exchange costs more (jobs/bench/hosts.py)


class PooledExecutor:
    """Pooled lookups of sharded tables.

    Args:
        setup: what is served.
        hosts: ranks that share a host, if two tiers are worthwhile; else None.
        num_counts: of a batch's header, for other executors.
    """

    def __init__(self, setup: Setup[EmbeddingBagConfig], hosts: Hosts | None = None, num_counts: int = 0) -> None:
        context = setup.context
        self._device = device = context.device
        routes = make_routes(setup.tables, context.world_size, lambda table: pooling_group(table, device))
        route = routes.ranks[context.rank]
        self._kernels: dict[int, Kernel] = {
            number: make_pooling_kernel(held, [lookup.table for lookup in route.lookups_of(number)], device)
            for number, held in route.tables.items()
        }
        self.kernels = list(self._kernels.values())
        self._cache = CacheGuard.of(setup.plan, device)
        self.blocks = [list(routes.outputs)] if routes.outputs else []
        columns = columns_of(routes)
        self._hosts = None if hosts is None else _HostTier(columns, setup, hosts)
        self._direct = PooledExchange(columns, context.group, context.rank, setup.codec, device)
        sources = range(context.world_size) if self._hosts is None else self._hosts.sources
        self.exchange = IdExchange(routes, context, setup.weighted, sources, num_counts)
        self._scale = MeanScale(setup.configs, routes.outputs)

    def __repr__(self) -> str:
        over = f"{len(self.exchange.routes.ranks)} ranks" if self._hosts is None else str(self._hosts)
        return f"PooledExecutor({len(self.exchange.routes.outputs)} outputs over {over})"

    def prepare(self, kjt: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, torch.Tensor | None]:
        """Keeps the factors that make means of this rank's own sums."""
        return kjt, self._scale.of(kjt)

    def lookup(self, ids: RankIds) -> torch.Tensor:
        """Sums of this rank's lookups for the global batch, `[global B, own width]`, source after source."""
        if self._cache is not None:
            self._cache.check()
        parts = [self._kernels[number].lookup(lookups) for number, lookups in ids.lookups.items()]
        if not parts:  # this rank holds no table, but takes part in every exchange
            nothing = torch.zeros(sum(ids.batch_sizes), 0, device=self._device, requires_grad=torch.is_grad_enabled())
            parts = [nothing if ids.weights is None else nothing + ids.weights.sum() * 0]
        vectors = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if self._cache is not None:
            self._cache.watch(vectors)
        return vectors

    def output_dist(self, vectors: torch.Tensor, ids: RankIds) -> Callable[[], torch.Tensor] | None:
        """Waits for `[B, total width]`, means if tables ask for them.

        With two tiers it returns when the exchange inside the host is done; the slower one is then under way. A small
        batch, as all ranks together see it, takes one tier.
        """
        if not self.blocks:
            return None
        batch_sizes, factors_BE = ids.batch_sizes, ids.kept.sharded
        if self._hosts is not None and sum(batch_sizes) * self._hosts.saved_bytes >= FEW_BYTES:
            return self._hosts.start(vectors, batch_sizes, factors_BE)
        by_rank = vectors if self._hosts is None else self._hosts.by_rank(vectors, batch_sizes)
        return self._direct.start(by_rank, batch_sizes, factors_BE)


class _HostTier:
    """Two exchanges: inside the host, then across hosts."""

    def __init__(self, columns: ColumnMap, setup: Setup[EmbeddingBagConfig], hosts: Hosts) -> None:
        context, codec = setup.context, setup.codec
        assert context.group is not None
        self._hosts = hosts
        # place after place, so that what goes to a rank of the host lies in one piece
        self.sources = [rank for peers in hosts.peers for rank in peers]
        host, own = divmod(context.rank, hosts.size)
        self._peers, neighbours = hosts.peers[own], hosts.ranks[host]
        inside = comm.subgroup(context.group, neighbours, context.device)
        across = comm.subgroup(context.group, self._peers, context.device)
        self._inside = PooledExchange(inside_host(columns, neighbours), inside, own, codec, context.device)
        self._across = PooledExchange(across_hosts(columns, hosts.ranks), across, host, codec, context.device)
        self.saved_bytes = 4 * (sum(columns.widths) - sum(self._across.widths)) / context.world_size  # an example

    def __str__(self) -> str:
        return f"{len(self._hosts.ranks)} hosts of {self._hosts.size} ranks"

    def start(
        self, pooled: torch.Tensor, batch_sizes: list[int], factors_BE: torch.Tensor | None
    ) -> Callable[[], torch.Tensor]:
        of_places = [sum(batch_sizes[rank] for rank in peers) for peers in self._hosts.peers]
        of_peers = [batch_sizes[rank] for rank in self._peers]
        sums = self._inside.start(pooled, of_places, None)()
        return self._across.start(sums, of_peers, factors_BE)

    def by_rank(self, pooled: torch.Tensor, batch_sizes: list[int]) -> torch.Tensor:
        """The same rows, rank after rank."""
        parts = pooled.split([batch_sizes[rank] for rank in self.sources])
        return torch.cat([part for _, part in sorted(zip(self.sources, parts, strict=True), key=lambda pair: pair[0])])


def worthwhile_hosts(setup: Setup[EmbeddingBagConfig]) -> Hosts | None:
    """The hosts for two tiers; None where one is the better choice.

    That is where no host holds several row blocks of the same columns, or too few to save a quarter of what one tier
    sends between hosts. Asks for hosts, a collective, only where a plan cuts tables by rows.
    """
    flat = _columns_sent(setup, lambda rank: rank)
    if flat == _columns_sent(setup, lambda rank: 0):
        return None
    hosts = find_hosts(setup.context)
    if hosts is None or _columns_sent(setup, lambda rank: rank // hosts.size) > WORTHWHILE * flat:
        return None
    return hosts


def _columns_sent(setup: Setup[EmbeddingBagConfig], sender_of: Callable[[int], int]) -> int:
    """Columns of an example that leave their senders, where `sender_of` a rank adds up what its ranks have."""
    total = 0
    for table in setup.tables:
        spans: dict[int, list[Span]] = {}
        for shard in table.sharding.shards:
            spans.setdefault(sender_of(shard.rank), []).append(shard.cols)
        features = len(table.config.feature_names)
        total += features * sum(span.size for held in spans.values() for span in union(held))
    return total
