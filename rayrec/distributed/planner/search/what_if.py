"""Small changes of a problem, each planned again: which make it fit, which make it faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rayrec.distributed.planner.cost.memory import reserves
from rayrec.distributed.planner.machine.topology import Topology
from rayrec.distributed.planner.search.solve import Solution, best_solution, fits
from rayrec.distributed.planner.tables.from_model import for_world
from rayrec.distributed.planner.tables.table import Table, TableKey

MOST_HOSTS = 64  # largest tried factor on the number of hosts
DENSE_KERNEL = "dense"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A changed problem and its description."""

    text: str
    tables: tuple[Table, ...]
    topology: Topology


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The slowest rank and sharding types of a changed problem's plan."""

    worst_s: float
    sharding_of: dict[TableKey, str]


def attempt(change: Change, dense_bytes: int) -> Tried | None:
    """Plans the changed problem; None if it has no plan."""
    reserve_R = reserves(change.tables, change.topology, dense_bytes)
    problem, answer = best_solution(change.tables, change.topology, reserve_R)
    if not isinstance(answer, Solution):
        return None
    kinds = {table.key: o.sharding_type for table, o in zip(problem.tables, answer.packing.chosen, strict=True)}
    return Tried(worst_s=answer.worst_s, sharding_of=kinds)


def unconstrained(table: Table, topology: Topology) -> Table:
    """The table without constraints: every sharding type, every kernel but dense, all ranks, finer cuts."""
    kernels = {
        kind: tuple(kernel for kernel in kernels_of_type if kernel != DENSE_KERNEL) or kernels_of_type
        for kind, kernels_of_type in table.runnable.items()
    }
    return replace(
        table,
        kernels=kernels,
        ranks=tuple(range(topology.world_size)),
        min_partition=min(table.min_partition, 16),
        cache_load_factor=None,
    )


def halved(tables: Sequence[Table]) -> tuple[Table, ...]:
    """The tables with 16-bit weights."""
    return tuple(replace(t, element_bytes=min(t.element_bytes, 2)) for t in tables)


def changes_that_fit(tables: Sequence[Table], topology: Topology, dense_bytes: int, stuck: TableKey) -> Iterator[str]:
    """Yields texts of changes that have a plan, smallest first: fewer constraints, 16-bit weights, more hosts."""
    listed = tuple(tables)
    name = next(t.label for t in listed if t.key == stuck)
    freed = tuple(unconstrained(t, topology) if t.key == stuck else t for t in listed)
    all_freed = tuple(unconstrained(t, topology) for t in listed)
    for text, changed in (
        (f"allow {name!r} every sharding type and kernel that can run", freed),
        ("drop all constraints on sharding types, kernels and ranks", all_freed),
    ):
        if changed != listed and fits(changed, topology, dense_bytes):
            yield text
            break
    half = _fewest_in_half(listed, topology, dense_bytes)
    if half:
        names = ", ".join(repr(t.label) for t in half[:3]) + (f" and {len(half) - 3} more" if len(half) > 3 else "")
        yield f"data_type FP16 for {names}"
    hosts = _fewest_hosts(listed, topology, dense_bytes)
    if hosts is not None:
        wider = topology.with_hosts(hosts)
        yield f"{wider.world_size} ranks ({hosts} hosts of {wider.local_world_size}) instead of {topology.world_size}"
    local = _fewest_ranks(listed, topology, dense_bytes) if len(topology.hosts) == 1 else None
    if local is not None:
        yield f"{local} ranks on the host instead of {topology.world_size}"


def _fewest_in_half(tables: tuple[Table, ...], topology: Topology, dense_bytes: int) -> tuple[Table, ...]:
    """The fewest tables, largest first, to change to 16 bits; empty if none are needed or all are not enough."""
    wide = sorted((t for t in tables if t.element_bytes == 4), key=lambda t: (-t.weight_bytes, t.key))

    def fit(count: int) -> bool:
        keys = {t.key for t in wide[:count]}
        changed = [replace(t, element_bytes=2) if t.key in keys else t for t in tables]
        return fits(changed, topology, dense_bytes)

    count = _least(len(wide), fit)
    return tuple(wide[:count]) if count else ()


def _fewest_hosts(tables: tuple[Table, ...], topology: Topology, dense_bytes: int) -> int | None:
    max_hosts = len(topology.hosts) * MOST_HOSTS

    def fit(count: int) -> bool:
        wider = topology.with_hosts(count)
        return fits(for_world(tables, topology, wider), wider, dense_bytes)

    count = len(topology.hosts) + 1
    while count < max_hosts and not fit(count):
        count *= 2
    if count >= max_hosts and not fit(max_hosts):
        return None
    low = max(len(topology.hosts), count // 2)
    return low + (_least(min(count, max_hosts) - low, lambda more: fit(low + more)) or 0)


def _fewest_ranks(tables: tuple[Table, ...], topology: Topology, dense_bytes: int) -> int | None:
    """The fewest ranks of a single host, each with as much memory as now, up to 16."""
    for ranks in range(topology.world_size + 1, 17):
        wider = topology.with_local(ranks)
        if fits(for_world(tables, topology, wider), wider, dense_bytes):
            return ranks
    return None


def _least(most: int, good: Callable[[int], bool]) -> int | None:
    """The smallest good number of 1 .. most, if all larger ones are good; None if `most` is not."""
    if most < 1 or not good(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high
