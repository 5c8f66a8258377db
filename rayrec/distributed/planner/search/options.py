"""Sharding options of one table with their costs, before placement: sharding type x cut x kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import pairwise

from rayrec.distributed.plan.cuts import COLUMN_UNIT, even_widths
from rayrec.distributed.plan.shards import DEFAULT_LOAD_FACTOR, ShardingType, Span
from rayrec.distributed.planner.cost.memory import shard_storage
from rayrec.distributed.planner.cost.seconds import executor_of, shard_cost, shared_seconds
from rayrec.distributed.planner.machine.topology import Topology
from rayrec.distributed.planner.tables.table import Table

CACHE_LOAD_FACTORS = (0.02, 0.1, DEFAULT_LOAD_FACTOR, 0.5)
HOST_CUTS = (ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)
COLUMN_CUTS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)


class Scope(Enum):
    """What a unit is placed on: one chosen rank, one chosen host, or all ranks of its table."""

    RANK = "rank"
    HOST = "host"
    WORLD = "world"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A part of a table that is placed as a whole.

    Args:
        cols: columns.
        seconds: maximum cost on one of its ranks, by host size.
        lookup: lookup term of `seconds`.
        work: cost summed over its ranks; minimum over host sizes.
        device_bytes, host_bytes: maximum on one of its ranks, by host size.
        total_device_bytes, total_host_bytes: sum over its ranks.
    """

    scope: Scope
    cols: Span
    seconds: tuple[float, ...]
    lookup: tuple[float, ...]
    work: float
    device_bytes: tuple[float, ...]
    host_bytes: tuple[float, ...]
    total_device_bytes: float
    total_host_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One sharding option of table number `table`. A plan chooses one option per table and places its units.

    Args:
        shared_s: seconds on every rank, wherever the units are.
        least_shared_s: the same with the units on the smallest hosts, which have fewer row blocks and partial sums.
        best_units: the units with the largest cache they can grow to; a lower limit of their cost.
    """

    table: int
    sharding_type: str
    kernel: str
    cache_load_factor: float
    units: tuple[Unit, ...]
    best_units: tuple[Unit, ...]
    shared_s: float
    least_shared_s: float

    @property
    def executor(self) -> str:
        return executor_of(self.sharding_type)

    @property
    def work(self) -> float:
        return sum(unit.work for unit in self.units)

    @property
    def least_work(self) -> float:
        return sum(unit.work for unit in self.best_units)

    @property
    def least_unit_s(self) -> float:
        return max(min(unit.seconds) for unit in self.best_units)

    @property
    def unit_s(self) -> float:
        """Maximum cost of one unit on one rank, at the best host size."""
        return max(min(unit.seconds) for unit in self.units)

    @property
    def unit_lookup_s(self) -> float:
        """Maximum lookup cost of one unit on one rank."""
        return max(min(unit.lookup) for unit in self.units)

    @property
    def unit_bytes(self) -> float:
        return max(min(unit.device_bytes) for unit in self.units)

    @property
    def device_bytes(self) -> float:
        return sum(unit.total_device_bytes for unit in self.units)


@lru_cache(maxsize=16)
def host_sizes(topology: Topology) -> tuple[int, ...]:
    """The distinct numbers of ranks per host, ascending: the order of every tuple by host size."""
    return tuple(sorted({host.num_ranks for host in topology.hosts}))


def options(number: int, table: Table, topology: Topology, off_device: bool) -> list[Option]:
    """All options of table `number`.

    Args:
        off_device: include kernels that keep the table in host memory.
    """
    options = []
    for kind, kernels in table.kernels.items():
        for kernel, factor, ceiling in _kernels(table, kernels, off_device):
            recipe = _Recipe(table=table, kind=kind, kernel=kernel, factor=factor, topology=topology)
            cuts = list(_cuts(recipe))
            at_best = cuts if ceiling == factor else list(_cuts(replace(recipe, factor=ceiling)))
            for units, best in zip(cuts, at_best, strict=True):
                row_cuts = _row_cuts(table, kind, topology)
                shared = [shared_seconds(table, kind, len(units), count, topology) for count in row_cuts]
                option = Option(
                    table=number,
                    sharding_type=kind,
                    kernel=kernel,
                    cache_load_factor=factor,
                    units=units,
                    best_units=best,
                    shared_s=max(shared),
                    least_shared_s=min(shared),
                )
                options.append(option)
    return options


def _row_cuts(table: Table, kind: str, topology: Topology) -> tuple[int, int]:
    """The minimum and maximum number of row blocks; inside a host one per rank."""
    if kind == ShardingType.ROW_WISE.value:
        return (min(len(table.ranks), table.rows),) * 2
    hosts = [topology.hosts[number].num_ranks for number in usable_hosts(table, topology)]
    if kind not in HOST_CUTS or not hosts:
        return 1, 1
    return min(*hosts, table.rows), min(max(hosts), table.rows)


def _kernels(table: Table, kernels: tuple[str, ...], off_device: bool) -> Iterator[tuple[str, float, float]]:
    """Yields (kernel, cache load factor, load factor up to which the cache may grow within this option)."""
    on_device = [kernel for kernel in kernels if not kernel.startswith("fused_uvm")]
    for kernel in kernels if off_device or not on_device else on_device:
        if kernel != "fused_uvm_caching":
            yield kernel, 1.0, 1.0
        elif table.cache_load_factor:
            yield kernel, table.cache_load_factor, table.cache_load_factor
        else:
            for factor, ceiling in pairwise((*CACHE_LOAD_FACTORS, 1.0)):
                yield kernel, factor, ceiling


def _cuts(recipe: _Recipe) -> Iterator[tuple[Unit, ...]]:
    table, topology = recipe.table, recipe.topology
    hosts = usable_hosts(table, topology)
    match ShardingType(recipe.kind):
        case ShardingType.TABLE_WISE:
            yield recipe.units(Scope.RANK, 1)
        case ShardingType.COLUMN_WISE:
            for num_cuts in _column_counts(table, len(table.ranks)):
                yield recipe.units(Scope.RANK, num_cuts)
        case ShardingType.TABLE_COLUMN_WISE:
            max_ranks = max((topology.hosts[h].num_ranks for h in hosts), default=0)
            for num_cuts in _column_counts(table, max_ranks) if max_ranks else ():
                yield recipe.units(Scope.RANK, num_cuts)
        case ShardingType.ROW_WISE | ShardingType.DATA_PARALLEL:
            yield recipe.units(Scope.WORLD, 1)
        case ShardingType.TABLE_ROW_WISE:
            if hosts:
                yield recipe.units(Scope.HOST, 1)
        case ShardingType.GRID_SHARD:
            for num_cuts in _column_counts(table, len(hosts)) if hosts else ():
                yield recipe.units(Scope.HOST, num_cuts)


def usable_hosts(table: Table, topology: Topology) -> list[int]:
    """The numbers of the hosts with all ranks allowed for the table."""
    if len(table.ranks) == topology.world_size:
        return list(range(len(topology.hosts)))
    allowed = set(table.ranks)
    return [i for i, host in enumerate(topology.hosts) if allowed.issuperset(host.ranks)]


def _column_counts(table: Table, most: int) -> list[int]:
    """The possible numbers of column cuts; [1] if the table cannot be cut."""
    widest = min(most, table.dim // max(table.min_partition, COLUMN_UNIT))
    counts = [num_cuts for num_cuts in COLUMN_CUTS if num_cuts <= widest]
    least = {num_cuts: min(span.size for span in even_widths(table.dim, num_cuts)) for num_cuts in counts}
    return [num_cuts for num_cuts in counts if least[num_cuts] >= table.min_partition] or [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """What the units of one option have in common."""

    table: Table
    kind: str
    kernel: str
    factor: float
    topology: Topology

    def units(self, scope: Scope, parts: int) -> tuple[Unit, ...]:
        """`parts` units side by side."""
        spans = even_widths(self.table.dim, parts)
        unit_of_width = {width: self._unit(scope, width) for width in {span.size for span in spans}}
        return tuple(replace(unit_of_width[span.size], cols=span) for span in spans)

    def _unit(self, scope: Scope, width: int) -> Unit:
        """A unit of the first `width` columns, with the costs of a rank with most rows and most ids."""
        sizes = host_sizes(self.topology)
        counts = [self._blocks(scope, size) for size in sizes]
        shard_args = (self.table, self.kind, self.kernel)
        cost = [
            {n: shard_cost(*shard_args, (n, width), size, self.topology, self.factor) for n in count}
            for count, size in zip(counts, sizes, strict=True)
        ]
        storage_of_size = {
            n: shard_storage(*shard_args, (n, width), self.topology, self.factor)
            for count_of_size in counts
            for n in count_of_size
        }
        largest = [max(count_of_size) for count_of_size in counts]
        worst = [
            shard_cost(*shard_args, (n, width), size, self.topology, self.factor, self.table.worst_share(n))
            for n, size in zip(largest, sizes, strict=True)
        ]
        if scope is Scope.WORLD:  # its ranks are on hosts of all sizes
            work = sum(min(of_size[n].total for of_size in cost) * count for n, count in counts[0].items())
        else:
            works = zip(counts, cost, strict=True)
            work = min(
                sum(of_size[n].total * count for n, count in count_of_size.items()) for count_of_size, of_size in works
            )
        return Unit(
            scope=scope,
            cols=Span(0, width),
            seconds=tuple(each.total for each in worst),
            lookup=tuple(each.lookup for each in worst),
            work=work,
            device_bytes=tuple(storage_of_size[n].device for n in largest),
            host_bytes=tuple(storage_of_size[n].host for n in largest),
            total_device_bytes=min(
                sum(storage_of_size[n].device * count for n, count in count_of_size.items()) for count_of_size in counts
            ),
            total_host_bytes=min(
                sum(storage_of_size[n].host * count for n, count in count_of_size.items()) for count_of_size in counts
            ),
        )

    def _blocks(self, scope: Scope, host_size: int) -> dict[int, int]:
        """The number of a unit's shards by number of rows."""
        match scope:
            case Scope.RANK:
                return {self.table.rows: 1}
            case Scope.HOST:
                return block_counts(self.table.rows, host_size)
            case Scope.WORLD if self.kind == ShardingType.DATA_PARALLEL.value:
                return {self.table.rows: self.topology.world_size}
            case _:
                return block_counts(self.table.rows, len(self.table.ranks))


def block_counts(rows: int, parts: int) -> dict[int, int]:
    """The number of blocks by size that `cuts.blocks(rows, parts)` creates."""
    step = -(-rows // parts)
    counts = {step: rows // step}
    if rows % step:
        counts[rows % step] = 1
    return counts
