"""Choosing an option for every table and a place for every unit, for the lowest worst rank under memory.

The search walks a fixed grid of limits (how large a piece may be in seconds and in bytes, which executors may be used,
what a byte of memory is worth), packs each choice, and refines the best. No clock and no random number is read: the
same problem gives the same answer everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from rayrec.distributed.planner.bound import Choices, lower_bound, make_choices
from rayrec.distributed.planner.cost import COLLECTIVES, fixed_seconds
from rayrec.distributed.planner.options import Option
from rayrec.distributed.planner.packing import Packing, Stuck, pack
from rayrec.distributed.planner.problem import Floats, Problem
from rayrec.distributed.planner.refine import refine

TARGET = 1.005  # of the lower bound: near enough to stop
TARGET_LOOKUP = 1.05  # worst over mean lookup load
PIECE_LIMITS = (1.0, 0.5, 0.25, 0.12)  # of the lower bound, for one piece
BYTE_LIMITS = (1.0, 0.5, 0.25, 0.1)  # of a rank's room, for one piece
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A packing, its worst rank with the executors' fixed cost, and the bound on any plan's."""

    packing: Packing
    worst_s: float
    bound_s: float


def search(problem: Problem) -> Solution | Stuck:
    """The best packing found, or the table that could not be placed."""
    choices = make_choices(problem)
    floors = []
    for executors in _executor_sets(choices):
        usable_O = np.isin(choices.executor_O, sorted(executors))
        fixed = fixed_seconds(executors, problem.topology)
        bound = lower_bound(problem, choices, usable_O)
        if np.isfinite(bound):
            floors.append((bound + fixed, fixed, usable_O))
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
    return Solution(packing=best[1], worst_s=best[0], bound_s=floors[0][0])


def _executor_sets(choices: Choices) -> Iterator[frozenset[str]]:
    """Every set of executors that leaves each table an option, small ones first."""
    there = [name for name in COLLECTIVES if name in choices.executor_O]
    for count in range(1, len(there) + 1):
        for names in combinations(there, count):
            usable = np.isin(choices.executor_O, names)
            if np.maximum.reduceat(usable, choices.first_T).all():
                yield frozenset(names)


def _solve(problem: Problem, choices: Choices, usable_O: Mask, bound_s: float) -> Packing | Stuck:
    flat = [option for each in problem.options for option in each]
    seen: set[bytes] = set()
    packed: list[Packing] = []
    stuck: Stuck | None = None
    for byte_limit in BYTE_LIMITS:
        for piece_limit in PIECE_LIMITS:
            for picked in _choose(problem, choices, usable_O, piece_limit * bound_s, byte_limit):
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
    """Refine the packings, most promising first, until one is near the bound."""
    packed.sort(key=lambda packing: packing.worst_s)
    limit = 200 + 10 * problem.world_size
    best = packed[0]
    for packing in packed:
        refine(problem, packing, bound_s * TARGET, TARGET_LOOKUP, limit)
        if packing is best or packing.worst_s < best.worst_s * (1 - 1e-9):
            best = packing
        if best.worst_s <= bound_s * TARGET * 1.005 and _lookup_ratio(best) <= TARGET_LOOKUP * 1.01:
            break
    return best


def _lookup_ratio(packing: Packing) -> float:
    mean = float(packing.lookup_R.mean())
    return float(packing.lookup_R.max()) / mean if mean > 0 else 1.0


def _choose(
    problem: Problem, choices: Choices, usable_O: Mask, piece_s: float, byte_limit: float
) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """For each table the option of least work within the limits, with memory free, then at the price that fits."""
    biggest = max(1.0, float(problem.room_R.max()))
    over_s = np.maximum(choices.piece_O / max(piece_s, 1e-30), 1.0) - 1.0
    over_bytes = np.maximum(choices.piece_bytes_O / (byte_limit * biggest), 1.0) - 1.0
    penalty = 1e3 * float(choices.work_O.max()) * (over_s + over_bytes)
    cost_O = np.where(usable_O, choices.work_O + penalty, np.inf)
    room = float(problem.room_R.sum())
    cheapest = choices.best(cost_O)
    if choices.bytes_O[cheapest].sum() <= room:
        yield cheapest
    for fill in (0.98, 0.9, 0.75):
        if choices.bytes_O[cheapest].sum() > fill * room:
            yield _within(choices, cost_O, fill * room)


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
