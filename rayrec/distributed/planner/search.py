"""Choosing an option for every table and a place for every unit, for the lowest worst rank under memory.

The search walks a fixed grid of limits (how large a piece may be in seconds and in bytes, which executors may be used,
what a byte of memory is worth), packs each choice, and refines the best. No clock and no random number is read: the
same problem gives the same answer everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from rayrec.distributed.planner.bound import Choices, lower_bound, make_choices
from rayrec.distributed.planner.cost import COLLECTIVES, fixed_seconds
from rayrec.distributed.planner.options import Option
from rayrec.distributed.planner.packing import Packing, Stuck, pack
from rayrec.distributed.planner.problem import Bools, Floats, Problem, make_problem
from rayrec.distributed.planner.refine import refine
from rayrec.distributed.planner.topology import Topology
from rayrec.distributed.planner.types import Table

TARGET = 1.005  # of the lower bound: near enough to stop
ENOUGH = 1.02  # of the lower bound: below it, balance of the lookups counts for more than the worst rank
TARGET_LOOKUP = 1.05  # worst over mean lookup load
PIECE_LIMITS = (1.0, 0.5, 0.25, 0.12)  # of the lower bound, for one piece
BYTE_LIMITS = (1.0, 0.5, 0.25, 0.1)  # of a rank's room, for one piece
MEMORY_COSTS = 1.05  # a worst rank this far above what endless memory gives: look for kernels off the device too
REFINED = 6  # packings of a choice of executors that are worth refining


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A packing, its worst rank with the executors' fixed cost, and the bound on any plan's.

    `free_bound_s` is the bound if memory were endless; equal to `bound_s` where memory costs nothing.
    """

    packing: Packing
    worst_s: float
    bound_s: float
    free_bound_s: float


def best_solution(tables: Sequence[Table], topology: Topology, reserve_R: Floats) -> tuple[Problem, Solution | Stuck]:
    """The best packing of `tables`, with kernels that keep tables in host memory where device memory is short.

    A table costs no less off the device, so a solution that device memory does not hold back is final.
    """
    problem = make_problem(tables, topology, reserve_R, off_device=False)
    answer = search(problem)
    spare = any(kernel.startswith("fused_uvm") for t in tables for kernels in t.kernels.values() for kernel in kernels)
    if not spare:
        return problem, answer
    if isinstance(answer, Solution) and answer.worst_s <= answer.free_bound_s * MEMORY_COSTS:
        return problem, replace(answer, bound_s=answer.free_bound_s)  # valid for tables off the device too
    wider = make_problem(tables, topology, reserve_R, off_device=True)
    other = search(wider)
    if not isinstance(answer, Solution) or not isinstance(other, Solution):
        return (problem, answer) if isinstance(answer, Solution) else (wider, other)
    kept = (problem, answer) if answer.worst_s <= other.worst_s else (wider, other)
    return kept[0], replace(kept[1], bound_s=min(answer.bound_s, other.bound_s))


def search(problem: Problem) -> Solution | Stuck:
    """The best packing found, or the table that could not be placed."""
    choices = make_choices(problem)
    floors, free_floor = [], float("inf")
    for executors in _executor_sets(choices):
        usable_O = np.isin(choices.executor_O, sorted(executors))
        fixed = fixed_seconds(executors, problem.topology)
        bound = lower_bound(problem, choices, usable_O, float(problem.room_R.sum()))
        free = lower_bound(problem, choices, usable_O, float("inf"))
        if np.isfinite(bound):
            floors.append((bound + fixed, fixed, usable_O))
            free_floor = min(free_floor, free + fixed)
    floors.sort(key=lambda floor: floor[0])
    best: tuple[float, Packing] | None = None
    stuck: Stuck | None = None
    for floor, fixed, usable_O in floors:
        if best is not None and floor >= best[0]:
            break
        answer = _solve(problem, choices, usable_O, floor - fixed)
        if isinstance(answer, Stuck):
            stuck = stuck or answer
        elif best is None or answer.worst_s + fixed < best[0]:
            best = (answer.worst_s + fixed, answer)
    if best is None:
        return stuck or Stuck(table=0)
    return Solution(packing=best[1], worst_s=best[0], bound_s=floors[0][0], free_bound_s=free_floor)


def _executor_sets(choices: Choices) -> Iterator[frozenset[str]]:
    """Every set of executors that leaves each table an option, small ones first."""
    there = [name for name in COLLECTIVES if name in choices.executor_O]
    for count in range(1, len(there) + 1):
        for names in combinations(there, count):
            usable = np.isin(choices.executor_O, names)
            if np.maximum.reduceat(usable, choices.first_T).all():
                yield frozenset(names)


def _solve(problem: Problem, choices: Choices, usable_O: Bools, bound_s: float) -> Packing | Stuck:
    flat = [option for each in problem.options for option in each]
    seen: set[bytes] = set()
    packed: list[Packing] = []
    stuck: Stuck | None = None
    for byte_limit in BYTE_LIMITS:
        for piece_limit in PIECE_LIMITS:
            for picked in _choose(problem, choices, usable_O, bound_s, piece_limit, byte_limit):
                if picked.tobytes() in seen:
                    continue
                seen.add(picked.tobytes())
                answer = _pack(problem, [flat[i] for i in picked], bound_s)
                if isinstance(answer, Stuck):
                    stuck = stuck or answer
                else:
                    packed.append(answer)
        if packed:
            break
    if not packed:
        return stuck or Stuck(table=0)
    return _refine_best(problem, packed, bound_s)


def _refine_best(problem: Problem, packed: list[Packing], bound_s: float) -> Packing:
    """Refine the packings, most promising first, until one is near the bound and well balanced."""
    packed.sort(key=lambda packing: packing.worst_s)
    limit = 200 + 10 * problem.world_size
    best, best_rating = packed[0], (float("inf"), float("inf"))
    for packing in packed[:REFINED]:
        refine(problem, packing, bound_s * TARGET, bound_s * ENOUGH, TARGET_LOOKUP, limit)
        rating = (max(packing.worst_s, bound_s * ENOUGH), _lookup_ratio(packing))
        if rating < best_rating:
            best, best_rating = packing, rating
        if best_rating[0] <= bound_s * ENOUGH and best_rating[1] <= TARGET_LOOKUP:
            break
    return best


def _lookup_ratio(packing: Packing) -> float:
    mean = float(packing.lookup_R.mean())
    return float(packing.lookup_R.max()) / mean if mean > 0 else 1.0


def _choose(
    problem: Problem, choices: Choices, usable_O: Bools, bound_s: float, piece_limit: float, byte_limit: float
) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """For each table the option of least work within the limits, with memory free, then at the price that fits."""
    biggest = max(1.0, float(problem.room_R.max()))
    over_s = np.maximum(choices.piece_O / max(piece_limit * bound_s, 1e-30), 1.0) - 1.0
    mean_lookup_s = _mean_lookup(choices, usable_O) / problem.world_size
    over_lookup = np.maximum(choices.piece_lookup_O / max(piece_limit * mean_lookup_s, 1e-30), 1.0) - 1.0
    over_bytes = np.maximum(choices.piece_bytes_O / (byte_limit * biggest), 1.0) - 1.0
    penalty = 1e3 * float(choices.work_O.max()) * (over_s + over_lookup + over_bytes)
    cost_O = np.where(usable_O, choices.work_O + penalty, np.inf)
    room = float(problem.room_R.sum())
    cheapest = choices.best(cost_O)
    if choices.bytes_O[cheapest].sum() <= room:
        yield cheapest
    for fill in (0.98, 0.9, 0.75):
        if choices.bytes_O[cheapest].sum() > fill * room:
            yield _within(choices, cost_O, fill * room)


def _mean_lookup(choices: Choices, usable_O: Bools) -> float:
    """Lookup seconds of all ranks together when every table takes its option of least work."""
    least = choices.best(np.where(usable_O, choices.work_O, np.inf))
    pieces = choices.work_O[least] / np.maximum(choices.piece_O[least], 1e-30)
    return float((choices.piece_lookup_O[least] * pieces).sum())


def _within(choices: Choices, cost_O: Floats, room: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The options of least cost plus price times bytes, at the lowest price for which they fit (or nearly)."""
    low, high = 0.0, float(choices.work_O.max()) * len(choices.first_T) * 1e6 / max(room, 1.0)
    picked = choices.best(cost_O + high * choices.bytes_O)
    for _ in range(60):
        price = (low + high) / 2
        trial = choices.best(cost_O + price * choices.bytes_O)
        if choices.bytes_O[trial].sum() > room:
            low = price
        else:
            high, picked = price, trial
    return picked


def _pack(problem: Problem, chosen: list[Option], bound_s: float) -> Packing | Stuck:
    answer = pack(problem, chosen)
    for weight in (1.0, 10.0):
        if isinstance(answer, Packing):
            break
        answer = pack(problem, chosen, memory_weight=weight * bound_s)
    return answer
