"""The estimate of a plan: seconds and bytes of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.plan.shards import ParameterSharding
from rayrec.distributed.planner.cost.memory import shard_storage
from rayrec.distributed.planner.cost.seconds import (
    executor_of,
    latency_seconds,
    shard_cost,
    shared_seconds,
    work_seconds,
)
from rayrec.distributed.planner.cost.terms import Cost, ShardBytes
from rayrec.distributed.planner.machine.topology import Topology
from rayrec.distributed.planner.tables.table import Table

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted load of every rank.

    Args:
        cost_RT: seconds a step, ranks x terms of `Cost`.
        storage_RT: bytes, ranks x terms of `ShardBytes`.
        collectives_s: latency of the collectives, equal for all ranks.
        routing_s: seconds of every rank's work on its own batch: step overhead, launching collectives, routing ids,
            adding partial sums.
        reserve_R: reserved bytes of every rank.
    """

    cost_RT: Floats
    storage_RT: Floats
    collectives_s: float
    routing_s: float
    reserve_R: Floats

    @property
    def fixed_s(self) -> float:
        """Seconds that are equal for all ranks."""
        return self.collectives_s + self.routing_s

    @property
    def seconds_R(self) -> Floats:
        return np.asarray(self.cost_RT.sum(axis=1) + self.fixed_s)

    @property
    def lookup_R(self) -> Floats:
        return np.asarray(self.cost_RT[:, Cost._fields.index("lookup")])

    @property
    def tables_R(self) -> Floats:
        """Device bytes of shards and their buffers."""
        return np.asarray(self.storage_RT[:, :-1].sum(axis=1))

    @property
    def device_bytes_R(self) -> Floats:
        return self.tables_R + self.reserve_R

    @property
    def host_bytes_R(self) -> Floats:
        return np.asarray(self.storage_RT[:, -1])

    @property
    def worst_s(self) -> float:
        return float(self.seconds_R.max())

    @property
    def worst_rank(self) -> int:
        return int(self.seconds_R.argmax())

    @property
    def lookup_ratio(self) -> float:
        """Maximum over mean lookup load; 1 is perfect balance."""
        mean = float(self.lookup_R.mean())
        return float(self.lookup_R.max()) / mean if mean > 0 else 1.0


def evaluate(
    plan: ShardingPlan,
    tables: Sequence[Table],
    topology: Topology,
    reserve_R: Floats | None = None,
) -> Estimate:
    """Predict the load of every rank of `topology` under `plan`.

    Raises:
        ValueError: an unknown table or rank in the plan.
    """
    table_of = {table.key: table for table in tables}
    local_R = np.zeros(topology.world_size, dtype=np.int64)
    for host in topology.hosts:
        local_R[host.ranks.start : host.ranks.stop] = host.num_ranks
    cost_RT = np.zeros((topology.world_size, len(Cost._fields)))
    storage_RT = np.zeros((topology.world_size, len(ShardBytes._fields)))
    executors, shared = set(), 0.0
    for path, module in plan.plan.items():
        for name, sharding in module.items():
            if (path, name) not in table_of:
                raise ValueError(f"plan names table {name!r} of module {path!r}, which the model does not have")
            executors.add(executor_of(sharding.sharding_type))
            cols, rows = (len(set(cuts)) for cuts in zip(*((s.cols, s.rows) for s in sharding.shards), strict=True))
            shared += shared_seconds(table_of[path, name], sharding.sharding_type, cols, rows, topology)
            _add(table_of[path, name], sharding, topology, local_R, cost_RT, storage_RT)
    return Estimate(
        cost_RT=cost_RT,
        storage_RT=storage_RT,
        collectives_s=latency_seconds(frozenset(executors), topology),
        routing_s=shared + work_seconds(frozenset(executors), topology),
        reserve_R=np.zeros(topology.world_size) if reserve_R is None else reserve_R,
    )


def _add(
    table: Table,
    sharding: ParameterSharding,
    topology: Topology,
    local_R: NDArray[np.int64],
    cost_RT: Floats,
    storage_RT: Floats,
) -> None:
    """Adds a table's shards to their ranks; computes equal shapes with equal shares of the ids on equal hosts once."""
    ranks_of: dict[tuple[int, int, int, float], list[int]] = {}
    for shard in sharding.shards:
        if not 0 <= shard.rank < topology.world_size:
            raise ValueError(
                f"table {table.label!r}: the plan puts a shard on rank {shard.rank}, "
                f"but the topology has ranks 0 .. {topology.world_size - 1}"
            )
        rows, share = shard.rows, table.share(shard.rows.start, shard.rows.stop)
        key = (rows.stop - rows.start, shard.cols.stop - shard.cols.start, int(local_R[shard.rank]), share)
        ranks_of.setdefault(key, []).append(shard.rank)
    kind, kernel, factor = sharding.sharding_type, sharding.compute_kernel, sharding.load_factor
    for (num_rows, num_cols, local, share), ranks in ranks_of.items():
        cost = shard_cost(table, kind, kernel, (num_rows, num_cols), local, topology, factor, share)
        storage = shard_storage(table, kind, kernel, (num_rows, num_cols), topology, factor)
        np.add.at(cost_RT, ranks, np.array(cost))
        np.add.at(storage_RT, ranks, np.array(storage))
