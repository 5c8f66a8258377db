"""The error for tables without a plan: what does not fit, bytes needed and available, changes that fit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from rayrec.distributed.planner.report.result import NoPlanError
from rayrec.distributed.planner.report.text import human_bytes
from rayrec.distributed.planner.search.options import Option
from rayrec.distributed.planner.search.pack import Stuck
from rayrec.distributed.planner.search.problem import Problem
from rayrec.distributed.planner.search.what_if import changes_that_fit
from rayrec.distributed.planner.tables.table import Table

LISTED = 3


def no_plan_error(problem: Problem, stuck: Stuck, dense_bytes: int) -> NoPlanError:
    """The error for a problem without a plan."""
    table = problem.tables[stuck.table]
    largest = float(problem.room_R.max())
    lone = [
        t for t, options in zip(problem.tables, problem.options, strict=True) if _least_unit_bytes(options) > largest
    ]
    reason = _no_option(table, problem) if not problem.options[stuck.table] else None
    reason = reason or (_too_large(lone[0], problem) if lone else _too_much(table, problem))
    changes = islice(changes_that_fit(problem.tables, problem.topology, dense_bytes, (lone or [table])[0].key), LISTED)
    helps = "; or ".join(changes)
    fix = f" What would fit: {helps}." if helps else " No small change fits; more memory is needed."
    return NoPlanError(f"no plan: {reason}.{fix}")


def _least_unit_bytes(options: Sequence[Option]) -> float:
    return min((option.unit_bytes for option in options), default=0.0)


def _all_bytes(option: Option) -> float:
    return option.device_bytes + sum(unit.total_host_bytes for unit in option.units)


def _no_option(table: Table, problem: Problem) -> str:
    sizes = sorted({host.num_ranks for host in problem.topology.hosts})
    return (
        f"table {table.label!r} cannot be cut by {', '.join(table.kernels)} on ranks {list(table.ranks)} "
        f"(hosts have {sizes} ranks; cuts inside a host need all ranks of one)"
    )


def _too_large(table: Table, problem: Problem) -> str:
    options = problem.options[problem.tables.index(table)]
    smallest = min(options, key=lambda option: option.unit_bytes)
    return (
        f"table {table.label!r} ({table.rows} x {table.dim}, {human_bytes(table.weight_bytes + table.state_bytes)} "
        f"with optimizer state) needs at least {human_bytes(smallest.unit_bytes)} on one rank "
        f"({smallest.sharding_type}, {smallest.kernel}), but a rank has "
        f"{human_bytes(float(problem.room_R.max()))} for shards; {_reserved(problem)}"
    )


def _too_much(table: Table, problem: Problem) -> str:
    needed = sum(min((_all_bytes(o) for o in options), default=0.0) for options in problem.options)
    available, ranks = float(problem.room_R.sum() + problem.host_room_R.sum()), problem.world_size
    on_hosts = float(problem.host_room_R.sum())
    host_text = f" ({human_bytes(on_hosts)} of it host memory)" if on_hosts else ""
    big = sorted(problem.tables, key=lambda t: -(t.weight_bytes + t.state_bytes))[:3]
    listed = ", ".join(f"{t.label!r} {human_bytes(t.weight_bytes + t.state_bytes)}" for t in big)
    if needed > available:
        return (
            f"all {len(problem.tables)} tables need {human_bytes(needed)} ({human_bytes(needed / ranks)} a rank), but "
            f"{ranks} ranks have {human_bytes(available)} for shards{host_text}, "
            f"{human_bytes(available / ranks)} a rank, {human_bytes(needed - available)} too little; "
            f"largest: {listed}; {_reserved(problem)}"
        )
    smallest_unit = human_bytes(_least_unit_bytes(problem.options[problem.tables.index(table)]))
    return (
        f"all tables need {human_bytes(needed)} of {human_bytes(available)}{host_text}, but they could not be "
        f"packed: no rank has {smallest_unit} left for table {table.label!r}; largest: {listed}; {_reserved(problem)}"
    )


def _reserved(problem: Problem) -> str:
    rank = int(problem.room_R.argmax())
    memory = problem.topology.host_of(rank).memory_bytes
    return (
        f"{human_bytes(float(problem.reserve_R[rank]))} of its {human_bytes(memory)} are reserved for everything else"
    )
