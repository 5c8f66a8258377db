"""Chooses an option for every table and a place for every unit, to minimize the slowest rank.

The search tries a fixed grid of limits (seconds and bytes of one unit, executors, price of memory), packs each choice,
and refines the best. It uses no clock and no random numbers: the same problem has the same plan everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from rayrec.distributed.planner.cost.memory import reserves
from rayrec.distributed.planner.cost.seconds import COLLECTIVES, fixed_seconds
from rayrec.distributed.planner.machine.topology import Topology
from rayrec.distributed.planner.search.bound import Choices, lower_bound, make_choices
from rayrec.distributed.planner.search.choose import choose, mixtures
from rayrec.distributed.planner.search.options import Option
from rayrec.distributed.planner.search.pack import Packing, Stuck, pack
from rayrec.distributed.planner.search.problem import Bools, Floats, Ints, Problem, make_problem
from rayrec.distributed.planner.search.refine import refine
from rayrec.distributed.planner.tables.table import Table

MANY_TABLES = 200  # above, tolerances are larger
WORST_LOOKUP = 1.08  # accepted maximum over mean lookup load
LOOKUP_PRICES = (1.008, 1.02)  # limit of the slowest rank while balancing lookups, times the lower bound
TARGET_LOOKUP = 1.05  # target of maximum over mean lookup load
UNIT_LIMITS = (1.0, 0.5, 0.25, 0.12)  # maximum seconds of one unit, times the lower bound
BYTE_LIMITS = (1.0, 0.5, 0.25, 0.1)  # maximum bytes of one unit, times a rank's room
MEMORY_COSTS = 1.05  # if the slowest rank exceeds the bound without memory limits by this factor, try host memory
REFINED = 6  # number of packings to refine per set of executors


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A packing, seconds of its slowest rank with the executors' fixed cost, and the lower bound of any plan.

    `free_bound_s` is the bound without memory limits.
    """

    packing: Packing
    worst_s: float
    bound_s: float
    free_bound_s: float


def best_solution(tables: Sequence[Table], topology: Topology, reserve_R: Floats) -> tuple[Problem, Solution | Stuck]:
    """The best packing of `tables`, with tables in host memory if device memory is short.

    Host memory is never faster, so a solution that device memory does not limit is final.
    """
    problem = make_problem(tables, topology, reserve_R, off_device=False)
    answer = search(problem)
    if not _has_host_kernels(tables):
        return problem, answer
    if isinstance(answer, Solution) and answer.worst_s <= answer.free_bound_s * MEMORY_COSTS:
        return problem, replace(answer, bound_s=answer.free_bound_s)  # also valid with host memory
    wider = make_problem(tables, topology, reserve_R, off_device=True)
    wider_answer = search(wider)
    if not isinstance(answer, Solution) or not isinstance(wider_answer, Solution):
        return (problem, answer) if isinstance(answer, Solution) else (wider, wider_answer)
    better = (problem, answer) if answer.worst_s <= wider_answer.worst_s else (wider, wider_answer)
    return better[0], replace(better[1], bound_s=min(answer.bound_s, wider_answer.bound_s))


def least_seconds(tables: Sequence[Table], topology: Topology, reserve_R: Floats) -> float:
    """The lower bound of the slowest rank's seconds under any plan, without a search; 0 if there is no bound."""
    places = (False, True) if _has_host_kernels(tables) else (False,)
    problems = [make_problem(tables, topology, reserve_R, off_device) for off_device in places]
    bounds = [_floors(problem, make_choices(problem))[0] for problem in problems if all(problem.options)]
    return min((floors[0].seconds for floors in bounds if floors), default=0.0)


def fits(tables: Sequence[Table], topology: Topology, dense_bytes: int) -> bool:
    """Whether the search finds a plan; checks sums of bytes first and does not refine."""
    reserve_R = reserves(tables, topology, dense_bytes)
    for off_device in (False, True):
        problem = make_problem(tables, topology, reserve_R, off_device)
        if not all(problem.options):
            return False
        choices = make_choices(problem)
        if choices.least(choices.bytes_O).sum() > problem.room_R.sum():
            continue
        if choices.least(choices.unit_bytes_O).max() > problem.room_R.max():
            continue
        flat = [option for options in problem.options for option in options]
        usable_O = np.ones(len(flat), dtype=np.bool_)
        for byte_limit in BYTE_LIMITS:
            for picked in choose(problem, choices, usable_O, 1.0, 1.0, byte_limit, False):
                if isinstance(_pack(problem, [flat[i] for i in picked], 0.0, 1.0), Packing):
                    return True
    return False


@dataclass(frozen=True, kw_only=True)
class _Floor:
    """The lower bound of plans with some executors: `seconds`, of which `fixed` do not depend on the plan."""

    seconds: float
    fixed: float
    usable_O: Bools


def _floors(problem: Problem, choices: Choices) -> tuple[list[_Floor], float]:
    """The lower bound for each set of executors, ascending, and the least one without memory limits."""
    floors, free_floor = [], float("inf")
    for executors in _executor_sets(choices):
        usable_O = np.isin(choices.executor_O, sorted(executors))
        fixed = fixed_seconds(executors, problem.topology) + choices.shared_s
        bound = lower_bound(problem, choices, usable_O, float(problem.room_R.sum()))
        free = lower_bound(problem, choices, usable_O, float("inf"))
        if np.isfinite(bound):
            floors.append(_Floor(seconds=bound + fixed, fixed=fixed, usable_O=usable_O))
            free_floor = min(free_floor, free + fixed)
    return sorted(floors, key=lambda floor: floor.seconds), free_floor


def _has_host_kernels(tables: Sequence[Table]) -> bool:
    return any(kernel.startswith("fused_uvm") for t in tables for kernels in t.kernels.values() for kernel in kernels)


def search(problem: Problem) -> Solution | Stuck:
    """The best packing found, or the table that could not be placed."""
    for number, options in enumerate(problem.options):
        if not options:
            return Stuck(table=number)
    choices = make_choices(problem)
    floors, free_floor = _floors(problem, choices)
    best: tuple[float, Packing] | None = None
    stuck: Stuck | None = None
    for floor in floors:
        if best is not None and floor.seconds >= best[0]:
            break
        fixed = floor.fixed
        answer = _solve(problem, choices, floor.usable_O, floor.seconds - fixed)
        if isinstance(answer, Stuck):
            stuck = stuck or answer
        elif best is None or answer.worst_s + fixed < best[0]:
            best = (answer.worst_s + fixed, answer)
    if best is None:
        return stuck or Stuck(table=0)
    return Solution(packing=best[1], worst_s=best[0], bound_s=floors[0].seconds, free_bound_s=free_floor)


def _executor_sets(choices: Choices) -> Iterator[frozenset[str]]:
    """Yields every set of executors with an option for each table, small sets first."""
    executors = [name for name in COLLECTIVES if name in choices.executor_O]
    for count in range(1, len(executors) + 1):
        for names in combinations(executors, count):
            usable = np.isin(choices.executor_O, names)
            if np.maximum.reduceat(usable, choices.first_T).all():
                yield frozenset(names)


def _solve(problem: Problem, choices: Choices, usable_O: Bools, bound_s: float) -> Packing | Stuck:
    flat = [option for options in problem.options for option in options]
    seen: set[bytes] = set()
    stuck: Stuck | None = None

    def packings(picks: Iterable[Ints]) -> list[Packing]:
        nonlocal stuck
        done = []
        for picked in picks:
            if picked.tobytes() in seen:
                continue
            seen.add(picked.tobytes())
            answer = _pack(problem, [flat[i] for i in picked], float(choices.extra_O[picked].sum()), bound_s)
            if isinstance(answer, Packing):
                done.append(answer)
            else:
                stuck = stuck or answer
        return done

    def picks(byte_limit: float, with_lookups: bool) -> list[Ints]:
        return [
            picked
            for limit in UNIT_LIMITS
            for picked in choose(problem, choices, usable_O, bound_s, limit, byte_limit, with_lookups)
        ]

    _, enough_s = _stop_at(problem, bound_s)
    for byte_limit in BYTE_LIMITS:
        first_picks = picks(byte_limit, False)
        packed = packings(first_picks)
        if packed:
            best = _refine_best(problem, packed, bound_s)
            if best.worst_s > enough_s:
                best = _refine_best(
                    problem, [best, *packings(mixtures(choices, first_picks, problem.world_size))], bound_s
                )
            if _lookup_ratio(best) > WORST_LOOKUP:
                best = _refine_best(problem, [best, *packings(picks(byte_limit, True))], bound_s)
            return best
    return stuck or Stuck(table=0)


def _stop_at(problem: Problem, bound_s: float) -> tuple[float, float]:
    """The seconds of the slowest rank to aim at, and those below which balanced lookups matter more."""
    target, enough = (1.0005, 1.002) if len(problem.tables) <= MANY_TABLES else (1.005, 1.02)
    return bound_s * target, bound_s * enough


def _refine_best(problem: Problem, packed: list[Packing], bound_s: float) -> Packing:
    """Refines the packings, fastest first, until one is close to the bound and balanced."""
    packed.sort(key=lambda packing: packing.worst_s)
    (target_s, enough_s), limit = _stop_at(problem, bound_s), 200 + 10 * problem.world_size
    best, best_rating = packed[0], (float("inf"), float("inf"))
    for packing in packed[:REFINED]:
        refine(problem, packing, target_s, enough_s, TARGET_LOOKUP, limit)
        rating = (max(packing.worst_s, enough_s), _lookup_ratio(packing))
        if rating < best_rating:
            best, best_rating = packing, rating
        if best_rating[0] <= enough_s and best_rating[1] <= TARGET_LOOKUP:
            break
    for enough in LOOKUP_PRICES:
        if _lookup_ratio(best) > WORST_LOOKUP:
            refine(problem, best, 0.0, bound_s * enough, TARGET_LOOKUP, limit)
    return best


def _lookup_ratio(packing: Packing) -> float:
    mean = float(packing.lookup_R.mean())
    return float(packing.lookup_R.max()) / mean if mean > 0 else 1.0


def _pack(problem: Problem, chosen: list[Option], extra_s: float, bound_s: float) -> Packing | Stuck:
    for weight in (0.0, 1.0, 10.0):
        answer = pack(problem, chosen, extra_s, memory_weight=weight * bound_s)
        if isinstance(answer, Packing):
            break
    return answer
