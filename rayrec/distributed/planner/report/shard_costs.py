"""The shards of a plan, each with its cost and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayrec.distributed.plan.shards import Shard
from rayrec.distributed.planner.cost.memory import shard_storage
from rayrec.distributed.planner.cost.seconds import shard_cost
from rayrec.distributed.planner.cost.terms import Cost, ShardBytes
from rayrec.distributed.planner.report.result import PlanResult
from rayrec.distributed.planner.tables.table import TableKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCost:
    """A shard, its cost and its bytes."""

    key: TableKey
    label: str
    sharding_type: str
    kernel: str
    shard: Shard
    cost: Cost
    storage: ShardBytes


def shard_costs(result: PlanResult, rank: int | None = None) -> Iterator[ShardCost]:
    """Yields the shards of the plan, or those on `rank`, table by table."""
    tables, topology = {table.key: table for table in result.tables}, result.topology
    local_of = {r: host.num_ranks for host in topology.hosts for r in host.ranks}
    for path, sharding, shard in result.plan.shards():
        if rank is not None and shard.rank != rank:
            continue
        table = tables[path, shard.table]
        kind, kernel, factor = sharding.sharding_type, sharding.compute_kernel, sharding.load_factor
        yield ShardCost(
            key=table.key,
            label=table.label,
            sharding_type=kind,
            kernel=kernel,
            shard=shard,
            cost=shard_cost(
                table,
                kind,
                kernel,
                shard.shape,
                local_of[shard.rank],
                topology,
                factor,
                table.share(shard.rows.start, shard.rows.stop),
            ),
            storage=shard_storage(table, kind, kernel, shard.shape, topology, factor),
        )
