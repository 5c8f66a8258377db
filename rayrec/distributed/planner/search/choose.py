"""Chooses one option per table before placement: least work under limits, and mixtures of two choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rayrec.distributed.planner.search.bound import Choices
from rayrec.distributed.planner.search.problem import Bools, Floats, Ints, Problem


def choose(
    problem: Problem,
    choices: Choices,
    usable_O: Bools,
    bound_s: float,
    unit_limit: float,
    byte_limit: float,
    with_lookups: bool,
) -> Iterator[Ints]:
    """Yields choices of least work under the limits: first with memory free, then at memory prices that make them fit.

    Args:
        bound_s: lower bound of the slowest rank.
        unit_limit: maximum cost of one unit, as a share of `bound_s`.
        byte_limit: maximum bytes of one unit, as a share of a rank's room.
        with_lookups: apply `unit_limit` to the mean lookup load, too.
    """
    biggest = max(1.0, float(problem.room_R.max()))
    over_s = np.maximum(choices.unit_O / max(unit_limit * bound_s, 1e-30), 1.0) - 1.0
    mean_lookup_s = _mean_lookup(choices, usable_O) / problem.world_size
    over_lookup = np.maximum(choices.unit_lookup_O / max(unit_limit * mean_lookup_s, 1e-30), 1.0) - 1.0
    over_bytes = np.maximum(choices.unit_bytes_O / (byte_limit * biggest), 1.0) - 1.0
    penalty = 1e3 * float(choices.work_O.max()) * (over_s + with_lookups * over_lookup + over_bytes)
    cost_O = np.where(usable_O, choices.work_O + penalty, np.inf)
    total_room = float(problem.room_R.sum())
    cheapest = choices.best(cost_O)
    if choices.bytes_O[cheapest].sum() <= total_room:
        yield cheapest
    for fill in (0.98, 0.9, 0.75):
        if choices.bytes_O[cheapest].sum() > fill * total_room:
            yield _cheapest_that_fit(choices, cost_O, fill * total_room)


def _mean_lookup(choices: Choices, usable_O: Bools) -> float:
    """The lookup seconds of all ranks together if every table takes its option of least work."""
    cheapest = choices.best(np.where(usable_O, choices.work_O, np.inf))
    units = choices.work_O[cheapest] / np.maximum(choices.unit_O[cheapest], 1e-30)
    return float((choices.unit_lookup_O[cheapest] * units).sum())


def _cheapest_that_fit(choices: Choices, cost_O: Floats, room: float) -> Ints:
    """The options of least cost plus price times bytes, at the lowest price that makes them (nearly) fit."""
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


def mixtures(choices: Choices, picks: Sequence[Ints], ranks: int) -> Iterator[Ints]:
    """Yields the first choice with some tables' options replaced by options of the other choices.

    With few whole tables per rank the load is uneven; some tables in smaller units even it out. The tables that lose
    least are replaced: the remainder after equal numbers of whole tables per rank, and larger shares.
    """
    if not picks:
        return
    base, tables = picks[0], len(picks[0])
    for fine in picks[:0:-1]:
        loss = choices.work_O[fine] / np.maximum(choices.work_O[base], 1e-30)
        order = np.lexsort((np.arange(tables), choices.work_O[base], loss))
        order = order[fine[order] != base[order]]
        for count in sorted({tables % ranks, len(order) // 8, len(order) // 4, len(order) // 2} - {0, len(order)}):
            mixed = base.copy()
            mixed[order[:count]] = fine[order[:count]]
            yield mixed
