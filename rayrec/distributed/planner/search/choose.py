"""Picking one option for each table, before any is placed: least work within limits, and mixtures of two picks."""

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
    piece_limit: float,
    byte_limit: float,
    with_lookups: bool,
) -> Iterator[Ints]:
    """For each table the option of least work within the limits, with memory free, then at the price that fits.

    Args:
        bound_s: lower bound of the worst rank.
        piece_limit: how much of `bound_s` one piece may cost.
        byte_limit: how much of a rank's room one piece may take.
        with_lookups: whether one piece may cost only `piece_limit` of the mean lookup load, too.
    """
    biggest = max(1.0, float(problem.room_R.max()))
    over_s = np.maximum(choices.piece_O / max(piece_limit * bound_s, 1e-30), 1.0) - 1.0
    mean_lookup_s = _mean_lookup(choices, usable_O) / problem.world_size
    over_lookup = np.maximum(choices.piece_lookup_O / max(piece_limit * mean_lookup_s, 1e-30), 1.0) - 1.0
    over_bytes = np.maximum(choices.piece_bytes_O / (byte_limit * biggest), 1.0) - 1.0
    penalty = 1e3 * float(choices.work_O.max()) * (over_s + with_lookups * over_lookup + over_bytes)
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


def _within(choices: Choices, cost_O: Floats, room: float) -> Ints:
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


def mixtures(choices: Choices, picks: Sequence[Ints], ranks: int) -> Iterator[Ints]:
    """The first pick with some tables' options taken from the others.

    Few whole tables a rank leave ranks unequal; some tables in small pieces fill the gaps. Those that lose least by it
    are cut, as many as are left over when whole tables are dealt out evenly, and larger shares.
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
