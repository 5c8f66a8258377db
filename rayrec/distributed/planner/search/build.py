"""Creates the plan of a packing: shards by `CUTS`, caches grown into the remaining memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rayrec.distributed.plan.cuts import CUTS
from rayrec.distributed.plan.sharding_plan import ModuleSharding, ShardingPlan
from rayrec.distributed.plan.shards import CacheParams, ParameterSharding, Shard, ShardingType
from rayrec.distributed.planner.search.options import Option, Scope
from rayrec.distributed.planner.search.pack import Packing
from rayrec.distributed.planner.search.problem import Problem
from rayrec.distributed.planner.tables.table import TableKey


def build_plan(problem: Problem, packing: Packing, order: Sequence[TableKey]) -> ShardingPlan:
    """The plan of a packing, with tables in the given order."""
    number_of = {table.key: i for i, table in enumerate(problem.tables)}
    ranks_by_table: dict[int, list[int]] = {}
    for u in np.lexsort((packing.unit_U, packing.table_U)):
        ranks_by_table.setdefault(int(packing.table_U[u]), []).append(int(packing.place_U[u]))
    caches = _grown_caches(problem, packing)
    local_ranks = _local_ranks(problem)
    plan: dict[str, ModuleSharding] = {}
    for path, name in order:
        number = number_of[path, name]
        option = packing.chosen[number]
        shards = _shards(problem, option, ranks_by_table.get(number, []), packing.hosts_of.get(number, []))
        plan.setdefault(path, {})[name] = ParameterSharding(
            sharding_type=option.sharding_type,
            compute_kernel=option.kernel,
            shards=shards,
            device=problem.topology.compute_device,
            cache_params=caches.get((path, name)),
            local_ranks={s.rank: local_ranks[s.rank] for s in shards if s.rank in local_ranks},
        )
    return ShardingPlan(plan)


def _local_ranks(problem: Problem) -> dict[int, int]:
    """The local ranks of GPU ranks beyond the first host; devices are numbered from 0 on every host."""
    if problem.topology.compute_device == "cpu":
        return {}
    hosts = problem.topology.hosts
    return {rank: local_rank for host in hosts for local_rank, rank in enumerate(host.ranks) if local_rank != rank}


def _shards(problem: Problem, option: Option, ranks: list[int], hosts: list[int]) -> tuple[Shard, ...]:
    table = problem.tables[option.table]
    kind = ShardingType(option.sharding_type)
    cut = CUTS[kind]
    on_hosts = [list(problem.topology.hosts[host].ranks) for host in hosts]
    match option.units[0].scope:
        case Scope.WORLD:
            return cut(table.name, table.rows, table.dim, list(table.ranks))
        case Scope.HOST if kind is ShardingType.TABLE_ROW_WISE:
            return cut(table.name, table.rows, table.dim, on_hosts[0])
        case Scope.HOST:
            return cut(table.name, table.rows, table.dim, on_hosts)
        case _:
            return cut(table.name, table.rows, table.dim, ranks)


def _grown_caches(problem: Problem, packing: Packing) -> dict[TableKey, CacheParams]:
    """The cache of each UVM-cached table, grown evenly into the remaining memory of its ranks.

    Rounded down to hundredths unless the user set it: tables with equal load factors share a kernel.
    """
    cached = [o for o in packing.chosen if o.kernel == "fused_uvm_caching"]
    if not cached:
        return {}
    wanted_R = np.zeros(problem.world_size)  # bytes of all cached tables
    ranks_of: dict[int, list[tuple[int, float]]] = {}
    for option in cached:
        ranks_of[option.table] = _places(problem, packing, option)
        for rank, whole_bytes in ranks_of[option.table]:
            wanted_R[rank] += whole_bytes
    left_R = np.maximum(0.0, problem.room_R - packing.device_R)
    more_R = np.divide(left_R, wanted_R, out=np.zeros_like(left_R), where=wanted_R > 0)
    grown = {}
    for option in cached:
        table = problem.tables[option.table]
        growth = min(float(more_R[rank]) for rank, _ in ranks_of[option.table])
        share = option.cache_load_factor
        if table.cache_load_factor is None:
            share = max(share, math.floor(100 * min(1.0, share + growth)) / 100)
        grown[table.key] = CacheParams(load_factor=share)
    return grown


def _places(problem: Problem, packing: Packing, option: Option) -> list[tuple[int, float]]:
    """(rank, host bytes) of every shard."""
    table = problem.tables[option.table]
    match option.units[0].scope:
        case Scope.WORLD:
            return [(rank, option.units[0].host_bytes[problem.class_R[rank]]) for rank in table.ranks]
        case Scope.HOST:
            pairs = zip(packing.hosts_of[option.table], option.units, strict=False)
            return [
                (rank, unit.host_bytes[problem.class_R[rank]])
                for host, unit in pairs
                for rank in problem.topology.hosts[host].ranks
            ]
        case _:
            return [
                (int(packing.place_U[u]), float(packing.host_bytes_UC[u, problem.class_R[packing.place_U[u]]]))
                for u in np.flatnonzero(packing.table_U == option.table)
            ]
