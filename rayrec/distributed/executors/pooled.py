"""The executor of pooled lookups: sends sums of vectors to the ranks that sent the ids.

One tier: vectors go straight to their rank, and row partials are added up on arrival. Two tiers: the ranks of a host
first add up their partials of a vector, so that one sum leaves the host. In the first tier, each rank gets its host's
sums for its own examples and for the examples of ranks with the same local rank on other hosts. In the second tier,
ranks with the same local rank exchange across hosts. Backward runs the tiers in reverse.

One tier is used where two do not pay: `worthwhile_hosts` decides for a plan, `MIN_SAVED_BYTES` for a step.
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
from rayrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

MAX_COLUMN_FRACTION = 0.75  # columns between hosts with two tiers, as a fraction of those with one tier
MIN_SAVED_BYTES = 1 << 18  # per rank and direction; below, another exchange costs more (jobs/bench/hosts.py)


class PooledExecutor:
    """Pooled lookups of sharded tables.

    Args:
        setup: the sharded tables.
        hosts: hosts of the ranks, if two tiers are worthwhile; else None.
        num_counts: number of counts for other executors in a header.
    """

    def __init__(self, setup: Setup[EmbeddingBagConfig], hosts: Hosts | None = None, num_counts: int = 0) -> None:
        context = setup.context
        self._device = device = context.device
        routes = make_routes(setup.tables, context.world_size, lambda table: pooling_group(table, device))
        route = routes.ranks[context.rank]
        self._kernels: dict[int, Kernel] = {
            group: make_pooling_kernel(tables, [lookup.table for lookup in route.lookups_of(group)], device)
            for group, tables in route.tables.items()
        }
        self.kernels = list(self._kernels.values())
        self._cache = CacheGuard.of(setup.plan, device)
        self.blocks = [list(routes.outputs)] if routes.outputs else []
        columns = columns_of(routes)
        self._hosts = None if hosts is None else _HostTiers(columns, setup, hosts)
        self._direct = PooledExchange(columns, context.group, context.rank, setup.codec, device)
        sources = range(context.world_size) if self._hosts is None else self._hosts.sources
        self.exchange = IdExchange(routes, context, setup.weighted, sources, num_counts)
        self._scale = MeanScale(setup.configs, routes.outputs)

    def __repr__(self) -> str:
        over = f"{len(self.exchange.routes.ranks)} ranks" if self._hosts is None else str(self._hosts)
        return f"PooledExecutor({len(self.exchange.routes.outputs)} outputs over {over})"

    def prepare(self, kjt: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, torch.Tensor | None]:
        """Keeps the factors that turn this rank's own sums into means."""
        return kjt, self._scale.of(kjt)

    def lookup(self, ids: RankIds) -> torch.Tensor:
        """Sums of this rank's lookups for the global batch, `[global B, own width]`, ordered by source rank."""
        if self._cache is not None:
            self._cache.check()
        by_kernel = [self._kernels[group].lookup(lookups) for group, lookups in ids.lookups.items()]
        if not by_kernel:  # a rank without tables takes part in every exchange
            empty = torch.zeros(sum(ids.batch_sizes), 0, device=self._device, requires_grad=torch.is_grad_enabled())
            by_kernel = [empty if ids.weights is None else empty + ids.weights.sum() * 0]
        vectors = by_kernel[0] if len(by_kernel) == 1 else torch.cat(by_kernel, dim=1)
        if self._cache is not None:
            self._cache.watch(vectors)
        return vectors

    def output_dist(self, vectors: torch.Tensor, ids: RankIds) -> Callable[[], torch.Tensor] | None:
        """Starts to send vectors; the returned function waits for `[B, total width]`: sums, or means if tables have
        mean pooling.

        With two tiers it returns after the exchange inside the host, when the slower exchange has started. A small
        global batch uses one tier.
        """
        if not self.blocks:
            return None
        batch_sizes, factors_BE = ids.batch_sizes, ids.kept.sharded
        if self._hosts is not None and sum(batch_sizes) * self._hosts.saved_bytes >= MIN_SAVED_BYTES:
            return self._hosts.start(vectors, batch_sizes, factors_BE)
        by_rank = vectors if self._hosts is None else self._hosts.by_rank(vectors, batch_sizes)
        return self._direct.start(by_rank, batch_sizes, factors_BE)


class _HostTiers:
    """Two exchanges: inside the host, then across hosts."""

    def __init__(self, columns: ColumnMap, setup: Setup[EmbeddingBagConfig], hosts: Hosts) -> None:
        context, codec = setup.context, setup.codec
        assert context.group is not None
        self._hosts = hosts
        # Ordered by local rank, so that the rows for a rank of the host are contiguous.
        self.sources = [rank for peers in hosts.peers for rank in peers]
        host, local_rank = divmod(context.rank, hosts.size)
        self._peers, neighbours = hosts.peers[local_rank], hosts.ranks[host]
        inside = comm.subgroup(context.group, neighbours, context.device)
        across = comm.subgroup(context.group, self._peers, context.device)
        self._inside = PooledExchange(inside_host(columns, neighbours), inside, local_rank, codec, context.device)
        self._across = PooledExchange(across_hosts(columns, hosts.ranks), across, host, codec, context.device)
        # Per example and rank.
        self.saved_bytes = 4 * (sum(columns.widths) - sum(self._across.widths)) / context.world_size

    def __str__(self) -> str:
        return f"{len(self._hosts.ranks)} hosts of {self._hosts.size} ranks"

    def start(
        self, pooled: torch.Tensor, batch_sizes: list[int], factors_BE: torch.Tensor | None
    ) -> Callable[[], torch.Tensor]:
        by_local_rank = [sum(batch_sizes[rank] for rank in peers) for peers in self._hosts.peers]
        by_peer = [batch_sizes[rank] for rank in self._peers]
        sums = self._inside.start(pooled, by_local_rank, None)()
        return self._across.start(sums, by_peer, factors_BE)

    def by_rank(self, pooled: torch.Tensor, batch_sizes: list[int]) -> torch.Tensor:
        """The rows ordered by rank."""
        rows = zip(self.sources, pooled.split([batch_sizes[rank] for rank in self.sources]), strict=True)
        return torch.cat([rows_of_rank for _, rows_of_rank in sorted(rows, key=lambda pair: pair[0])])


def worthwhile_hosts(setup: Setup[EmbeddingBagConfig]) -> Hosts | None:
    """The hosts for two tiers, or None if one tier is better.

    Two tiers pay if hosts hold several row blocks of the same columns, enough to save a quarter of what one tier sends
    between hosts. Finding the hosts is a collective, which runs only if the plan cuts tables by rows.
    """
    one_tier = _columns_sent(setup, lambda rank: rank)
    if one_tier == _columns_sent(setup, lambda rank: 0):
        return None
    hosts = find_hosts(setup.context)
    if hosts is None or _columns_sent(setup, lambda rank: rank // hosts.size) > MAX_COLUMN_FRACTION * one_tier:
        return None
    return hosts


def _columns_sent(setup: Setup[EmbeddingBagConfig], sender_of: Callable[[int], int]) -> int:
    """Columns of an example that leave their senders; ranks with the same `sender_of` add up their partials."""
    total = 0
    for table in setup.tables:
        spans: dict[int, list[Span]] = {}
        for shard in table.sharding.shards:
            spans.setdefault(sender_of(shard.rank), []).append(shard.cols)
        features = len(table.config.feature_names)
        total += features * sum(span.size for cols in spans.values() for span in union(cols))
    return total
