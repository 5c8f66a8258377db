"""The lower bound: no plan has a slowest rank below these seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rayrec.distributed.planner.search.problem import Bools, Floats, Ints, Problem

BISECTIONS = 40


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The options of all tables as arrays (O), table by table; `first_T` is the index of each table's first option."""

    table_O: Ints
    first_T: Ints
    work_O: Floats
    unit_O: Floats
    least_work_O: Floats  # with the largest caches; for the lower bound
    least_unit_O: Floats
    unit_lookup_O: Floats
    bytes_O: Floats
    unit_bytes_O: Floats
    extra_O: Floats  # seconds on every rank above the minimum over the table's options
    shared_s: float  # sum of these minima: seconds on every rank under any plan
    executor_O: np.ndarray[tuple[int], np.dtype[np.str_]]

    def least(self, score_O: Floats) -> Floats:
        """The minimum score of each table."""
        return np.asarray(np.minimum.reduceat(score_O, self.first_T))

    def best(self, score_O: Floats) -> Ints:
        """Each table's first option with the minimum score."""
        hit = score_O == self.least(score_O)[self.table_O]
        matches = np.flatnonzero(hit)
        return np.asarray(matches[np.searchsorted(matches, self.first_T)])


def make_choices(problem: Problem) -> Choices:
    """The options of `problem` as arrays."""
    flat = [option for options in problem.options for option in options]
    counts = [len(options) for options in problem.options]
    first_T = np.cumsum([0, *counts[:-1]])
    table_O = np.repeat(np.arange(len(counts)), counts)
    shared_O = np.array([option.shared_s for option in flat])
    least_shared_O = np.array([option.least_shared_s for option in flat])
    least_T = np.minimum.reduceat(least_shared_O, first_T)
    extra_O, least_extra_O = shared_O - least_T[table_O], least_shared_O - least_T[table_O]
    return Choices(
        table_O=table_O,
        first_T=first_T,
        work_O=np.array([option.work for option in flat]) + extra_O * problem.world_size,
        extra_O=extra_O,
        shared_s=float(least_T.sum()),
        unit_O=np.array([option.unit_s for option in flat]),
        least_work_O=np.array([option.least_work for option in flat]) + least_extra_O * problem.world_size,
        least_unit_O=np.array([option.least_unit_s for option in flat]),
        unit_lookup_O=np.array([option.unit_lookup_s for option in flat]),
        bytes_O=np.array([option.device_bytes for option in flat]),
        unit_bytes_O=np.array([option.unit_bytes for option in flat]),
        executor_O=np.array([option.executor for option in flat]),
    )


def lower_bound(problem: Problem, choices: Choices, usable_O: Bools, room: float) -> float:
    """The largest lower bound T of three arguments, without `shared_s`; infinite without usable options.

    1. Work: with options of units that all cost at most T, all ranks together do at least the minimum total work that
       fits into memory, so T >= work / ranks. Memory enters by Lagrange duality: for every price p >= 0 per byte,
       sum over tables of min(work + p * bytes) - p * room is at most the work of any plan that fits.
    2. Units: every table places at least its smallest unit on some rank, so T is at least the largest of these.
    3. Pigeonhole: of the k * ranks + 1 tables with the largest of these units, k + 1 share a rank.

    Args:
        room: bytes of all ranks together for shards; infinite to ignore memory.
    """
    ranks = problem.world_size
    work_O = np.where(usable_O, choices.least_work_O, np.inf)
    unit_O = np.where(usable_O, choices.least_unit_O, np.inf)
    smallest_T = choices.least(unit_O)
    low = _pigeonhole(smallest_T, ranks)
    if not np.isfinite(low):
        return float("inf")

    def work_at(limit_s: float) -> float:
        return _dual_work(choices, np.where(unit_O <= limit_s, work_O, np.inf), room) / ranks

    high = max(low, work_at(low))
    if high <= low:
        return low
    for _ in range(BISECTIONS):  # work_at decreases with the limit; the bound is the crossing
        middle = (low + high) / 2
        if work_at(middle) > middle:
            low = middle
        else:
            high = middle
        if high - low < 1e-6 * high:
            break
    return low


def _pigeonhole(smallest_T: Floats, ranks: int) -> float:
    sizes = np.sort(smallest_T)[::-1]
    sums = [sizes[k * ranks] * (k + 1) for k in range((len(sizes) - 1) // ranks + 1)]
    return float(max(sums, default=0.0))


def _dual_work(choices: Choices, work_O: Floats, room: float) -> float:
    """A lower bound of the total work of options that fit into `room` bytes."""
    cheapest = choices.best(work_O)
    total = float(work_O[cheapest].sum())
    if choices.bytes_O[cheapest].sum() <= room:
        return total
    best, low, high = total, 0.0, total / max(room, 1.0) * 1e3
    for _ in range(BISECTIONS):  # the dual is concave in the price; its slope is bytes needed minus room
        price = (low + high) / 2
        priced = work_O + price * choices.bytes_O
        picked = choices.best(priced)
        best = max(best, float(priced[picked].sum()) - price * room)
        if choices.bytes_O[picked].sum() > room:
            low = price
        else:
            high = price
    return best
