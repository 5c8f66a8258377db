"""Reduces the slowest rank of a packing by moving or swapping its units. The chosen options stay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rayrec.distributed.planner.search.pack import Packing
from rayrec.distributed.planner.search.problem import Bools, Floats, Ints, Problem

PARTNERS = 64  # number of least loaded ranks to try first
LEAST_GAIN = 1e-6


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Moves unit `out` from the slowest rank to rank `to`, and unit `back` (-1: none) from there."""

    out: int
    to: int
    back: int
    value: float


def refine(
    problem: Problem, packing: Packing, target_s: float, enough_s: float, target_lookup: float, limit: int
) -> None:
    """Reduce the slowest rank to `target_s` (0: skip), then the maximum lookup load to `target_lookup` x mean.

    Args:
        enough_s: limit of the slowest rank while lookups are balanced.
        limit: maximum number of exchanges of each of the two phases.
    """
    for _ in range(limit if target_s > 0 else 0):
        if packing.worst_s <= target_s:
            break
        step = _best_exchange(problem, packing, packing.seconds_UC, packing.seconds_R, None)
        if step is None:
            break
        _apply(problem, packing, step)
    ceiling = max(packing.worst_s, enough_s)
    for _ in range(limit):
        if packing.lookup_R.max() <= target_lookup * packing.lookup_R.mean():
            break
        step = _best_exchange(problem, packing, packing.lookup_UC, packing.lookup_R, ceiling)
        if step is None:
            break
        _apply(problem, packing, step)


def _best_exchange(
    problem: Problem, packing: Packing, size_UC: Floats, load_R: Floats, ceiling_s: float | None
) -> Exchange | None:
    """The exchange that minimizes the larger load of the two ranks; None if no exchange helps."""
    worst = int(load_R.argmax())
    mine = np.flatnonzero(packing.place_U == worst)
    if not len(mine):
        return None
    order = np.argsort(load_R, kind="stable")
    near = order[: min(PARTNERS, len(order))]
    for partners in (near, order) if len(near) < len(order) else (order,):
        partners = partners[partners != worst]
        if not len(partners):
            continue
        exchanges = [
            step
            for step in (
                _best_move(problem, packing, size_UC, load_R, ceiling_s, worst, mine, partners),
                _best_swap(problem, packing, size_UC, load_R, ceiling_s, worst, mine, partners),
            )
            if step is not None and step.value < load_R[worst] * (1 - LEAST_GAIN)
        ]
        if exchanges:
            return min(exchanges, key=lambda step: (step.value, step.back))
    return None


def _best_move(
    problem: Problem,
    packing: Packing,
    size_UC: Floats,
    load_R: Floats,
    ceiling_s: float | None,
    worst: int,
    mine: Ints,
    partners: Ints,
) -> Exchange | None:
    worst_class, partner_classes = problem.class_R[worst], problem.class_R[partners]
    out = mine[:, None]
    value = np.maximum(load_R[partners] + size_UC[out, partner_classes], load_R[worst] - size_UC[out, worst_class])
    bad = packing.device_R[partners] + packing.device_UC[out, partner_classes] > problem.room_R[partners]
    bad |= packing.host_bytes_R[partners] + packing.host_bytes_UC[out, partner_classes] > problem.host_room_R[partners]
    if ceiling_s is not None:
        bad |= packing.seconds_R[partners] + packing.seconds_UC[out, partner_classes] > ceiling_s
    bad |= ~_may_go(problem, packing, mine, partners)
    return _least(np.where(bad, np.inf, value), mine, partners, None)


def _best_swap(
    problem: Problem,
    packing: Packing,
    size_UC: Floats,
    load_R: Floats,
    ceiling_s: float | None,
    worst: int,
    mine: Ints,
    partners: Ints,
) -> Exchange | None:
    is_partner = np.zeros(problem.world_size, dtype=np.bool_)
    is_partner[partners] = True
    candidates = np.flatnonzero(is_partner[packing.place_U])
    if not len(candidates):
        return None
    ranks = packing.place_U[candidates]
    worst_class, partner_classes, out = problem.class_R[worst], problem.class_R[ranks], mine[:, None]

    def after(load: Floats, size: Floats) -> tuple[Floats, Floats]:
        return load[ranks] + size[out, partner_classes] - size[candidates, partner_classes], load[worst] - size[
            out, worst_class
        ] + size[candidates, worst_class]

    theirs, ours = after(load_R, size_UC)
    value = np.maximum(theirs, ours)
    bad = value >= load_R[worst]
    for load, size, free in (
        (packing.device_R, packing.device_UC, problem.room_R),
        (packing.host_bytes_R, packing.host_bytes_UC, problem.host_room_R),
    ):
        far, near = after(load, size)
        bad |= (far > free[ranks]) | (near > free[worst])
    if ceiling_s is not None:
        far, near = after(packing.seconds_R, packing.seconds_UC)
        bad |= (far > ceiling_s) | (near > ceiling_s)
    bad |= ~_may_go(problem, packing, mine, ranks) | ~_may_go(problem, packing, candidates, np.array([worst])).T
    return _least(np.where(bad, np.inf, value), mine, ranks, candidates)


def _least(value: Floats, mine: Ints, ranks: Ints, others: Ints | None) -> Exchange | None:
    if value.size == 0 or not np.isfinite(value.min()):
        return None
    row, column = divmod(int(value.argmin()), value.shape[1])
    return Exchange(
        out=int(mine[row]),
        to=int(ranks[column]),
        back=-1 if others is None else int(others[column]),
        value=float(value[row, column]),
    )


def _may_go(problem: Problem, packing: Packing, units: Ints, ranks: Ints) -> Bools:
    """Whether each unit may be on each rank: allowed by the user, required host, no unit of the same table."""
    tables, pinned = packing.table_U[units], packing.pinned_U[units]
    may = (pinned[:, None] < 0) | (pinned[:, None] == problem.host_R[ranks])
    may &= ~packing.held_TR[tables[:, None], ranks]
    if problem.allowed_TR is not None:
        may &= problem.allowed_TR[tables[:, None], ranks]
    return np.asarray(may)


def _apply(problem: Problem, packing: Packing, step: Exchange) -> None:
    worst = int(packing.place_U[step.out])
    _shift(problem, packing, step.out, worst, step.to)
    if step.back >= 0:
        _shift(problem, packing, step.back, step.to, worst)


def _shift(problem: Problem, packing: Packing, unit: int, source: int, target: int) -> None:
    for load, size in packing.loads:
        load[source] -= size[unit, problem.class_R[source]]
        load[target] += size[unit, problem.class_R[target]]
    packing.place_U[unit] = target
    table = packing.table_U[unit]
    packing.held_TR[table, source] = bool((packing.place_U[packing.table_U == table] == source).any())
    packing.held_TR[table, target] = True
