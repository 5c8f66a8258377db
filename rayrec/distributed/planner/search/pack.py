"""Places chosen units on ranks, longest first, each on the least loaded rank with room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayrec.distributed.plan.shards import ShardingType
from rayrec.distributed.planner.search.options import Option, Scope, Unit, block_counts, usable_hosts
from rayrec.distributed.planner.search.problem import Bools, Floats, Ints, Problem


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """No rank (or host) has room for a unit of table number `table`."""

    table: int


@dataclass(kw_only=True)
class Packing:
    """Chosen options, the places of their units, and the load of every rank: mutable state of one search.

    Unit arrays (U) hold rank units only; `place_U` is a unit's rank. `hosts_of` holds the host of each host unit of a
    table.
    """

    chosen: list[Option]
    hosts_of: dict[int, list[int]]
    table_U: Ints
    unit_U: Ints
    place_U: Ints
    pinned_U: Ints  # required host of a unit, or -1
    seconds_UC: Floats
    lookup_UC: Floats
    device_UC: Floats
    host_bytes_UC: Floats
    seconds_R: Floats
    lookup_R: Floats
    device_R: Floats
    host_bytes_R: Floats
    held_TR: Bools  # whether a table has a rank unit on a rank

    @property
    def worst_s(self) -> float:
        return float(self.seconds_R.max())

    @property
    def loads(self) -> tuple[tuple[Floats, Floats], ...]:
        """Every load of the ranks (R) with what each unit adds to it (UC)."""
        return (
            (self.seconds_R, self.seconds_UC),
            (self.lookup_R, self.lookup_UC),
            (self.device_R, self.device_UC),
            (self.host_bytes_R, self.host_bytes_UC),
        )


def pack(
    problem: Problem, chosen: Sequence[Option], extra_s: float = 0.0, memory_weight: float = 0.0
) -> Packing | Stuck:
    """Places every unit of `chosen`.

    Args:
        extra_s: additional seconds on every rank.
        memory_weight: seconds added to a rank's score if its memory is full; 0 ignores memory.
    """
    packing = _empty(problem, list(chosen))
    packing.seconds_R += extra_s
    for option in chosen:
        if option.units[0].scope is Scope.WORLD and not _place_world(problem, packing, option):
            return Stuck(table=option.table)
    on_hosts = sorted(
        (-unit.seconds[0], option.table, number)
        for option in chosen
        for number, unit in enumerate(option.units)
        if unit.scope is Scope.HOST
    )
    for _, table, number in on_hosts:
        if not _place_on_host(problem, packing, packing.chosen[table], number, memory_weight):
            return Stuck(table=table)
    stuck = _place_on_ranks(problem, packing, memory_weight)
    return packing if stuck is None else stuck


def _empty(problem: Problem, chosen: list[Option]) -> Packing:
    units = [(o.table, n, u) for o in chosen for n, u in enumerate(o.units) if u.scope is Scope.RANK]
    classes = int(problem.class_R.max()) + 1

    def column(name: str) -> Floats:
        return np.array([getattr(unit, name) for _, _, unit in units], dtype=np.float64).reshape(-1, classes)

    zeros = np.zeros(problem.world_size)
    return Packing(
        chosen=chosen,
        hosts_of={},
        table_U=np.array([table for table, _, _ in units], dtype=np.int64),
        unit_U=np.array([number for _, number, _ in units], dtype=np.int64),
        place_U=np.full(len(units), -1, dtype=np.int64),
        pinned_U=np.full(len(units), -1, dtype=np.int64),
        seconds_UC=column("seconds"),
        lookup_UC=column("lookup"),
        device_UC=column("device_bytes"),
        host_bytes_UC=column("host_bytes"),
        seconds_R=zeros.copy(),
        lookup_R=zeros.copy(),
        device_R=zeros.copy(),
        host_bytes_R=zeros.copy(),
        held_TR=np.zeros((len(problem.tables), problem.world_size), dtype=np.bool_),
    )


def _place_world(problem: Problem, packing: Packing, option: Option) -> bool:
    table, unit = problem.tables[option.table], option.units[0]
    ranks = np.array(table.ranks)
    if option.sharding_type == ShardingType.ROW_WISE.value:
        ranks = ranks[: sum(block_counts(table.rows, len(ranks)).values())]
    _add(problem, packing, unit, ranks)
    return bool(
        (packing.device_R[ranks] <= problem.room_R[ranks]).all()
        and (packing.host_bytes_R[ranks] <= problem.host_room_R[ranks]).all()
    )


def _add(problem: Problem, packing: Packing, unit: Unit, ranks: Ints) -> None:
    kind = problem.class_R[ranks]
    packing.seconds_R[ranks] += np.array(unit.seconds)[kind]
    packing.lookup_R[ranks] += np.array(unit.lookup)[kind]
    packing.device_R[ranks] += np.array(unit.device_bytes)[kind]
    packing.host_bytes_R[ranks] += np.array(unit.host_bytes)[kind]


def _place_on_host(problem: Problem, packing: Packing, option: Option, unit_number: int, memory_weight: float) -> bool:
    unit = option.units[unit_number]
    hosts = packing.hosts_of.setdefault(option.table, [-1] * len(option.units))
    starts, kind = [host.first_rank for host in problem.topology.hosts], problem.class_R
    device_R = packing.device_R + np.array(unit.device_bytes)[kind]
    host_bytes_R = packing.host_bytes_R + np.array(unit.host_bytes)[kind]
    over_R = (device_R > problem.room_R) | (host_bytes_R > problem.host_room_R)
    score_H = np.maximum.reduceat(packing.seconds_R + np.array(unit.seconds)[kind], starts)
    if memory_weight:
        score_H = score_H + memory_weight * np.maximum.reduceat(device_R / np.maximum(problem.room_R, 1.0), starts)
    usable = np.zeros(len(starts), dtype=np.bool_)
    usable[usable_hosts(problem.tables[option.table], problem.topology)] = True
    usable[[host for host in hosts if host >= 0]] = False
    score_H[np.logical_or.reduceat(over_R, starts) | ~usable] = np.inf
    best = int(score_H.argmin())
    if not np.isfinite(score_H[best]):
        return False
    host = problem.topology.hosts[best]
    _add(problem, packing, unit, np.arange(host.ranks.start, host.ranks.stop))
    hosts[unit_number] = best
    return True


def _place_on_ranks(problem: Problem, packing: Packing, memory_weight: float) -> Stuck | None:
    mean_room = max(1.0, float(problem.room_R.mean()))
    size_U = packing.seconds_UC.min(axis=1) + memory_weight * packing.device_UC.min(axis=1) / mean_room
    order = np.lexsort((packing.unit_U, packing.table_U, -packing.device_UC.min(axis=1), -size_U))
    for u in order:
        table = int(packing.table_U[u])
        score = _scores(problem, packing, int(u), memory_weight)
        if problem.allowed_TR is not None:
            score[~problem.allowed_TR[table]] = np.inf
        if packing.chosen[table].sharding_type == ShardingType.TABLE_COLUMN_WISE.value:
            _pin(problem, packing, int(u), table, score)
        mine = packing.held_TR[table]
        if mine.any() and np.isfinite(score[~mine]).any():
            score[mine] = np.inf  # two columns of a table on one rank would receive its ids twice
        rank = int(score.argmin())
        if not np.isfinite(score[rank]):
            return Stuck(table=table)
        kind = problem.class_R[rank]
        packing.place_U[u] = rank
        for load, size in packing.loads:
            load[rank] += size[u, kind]
        packing.held_TR[table, rank] = True
    return None


def _scores(problem: Problem, packing: Packing, u: int, memory_weight: float) -> Floats:
    kind = problem.class_R
    device = packing.device_R + packing.device_UC[u, kind]
    score = packing.seconds_R + packing.seconds_UC[u, kind]
    if memory_weight:
        score = score + memory_weight * device / np.maximum(problem.room_R, 1.0)
    full = device > problem.room_R
    full |= packing.host_bytes_R + packing.host_bytes_UC[u, kind] > problem.host_room_R
    score[full] = np.inf
    return score


def _pin(problem: Problem, packing: Packing, u: int, table: int, score: Floats) -> None:
    """Keep all columns of a table on one host: the first one placed chooses the least loaded host."""
    pinned = packing.pinned_U[packing.table_U == table].max()
    if pinned < 0:
        num_units = len(packing.chosen[table].units)
        fits = {
            host: np.sort(score[problem.host_R == host])[:num_units].sum()
            for host in usable_hosts(problem.tables[table], problem.topology)
            if problem.topology.hosts[host].num_ranks >= num_units
        }
        pinned = min(fits, key=lambda host: (fits[host], host)) if fits else 0
        packing.pinned_U[packing.table_U == table] = pinned
    score[problem.host_R != pinned] = np.inf
