"""Which of several ways to do the same work is the fastest here: timed in turns on the first batches.

fbgemm's CPU kernels may see tables apart or as one (see `stacking.py`). Which is faster hangs on the ids that a table
gets in a step, their skew, the width, caches, threads and number of tables: no rule holds everywhere, a stopwatch does.
All ways give the same results to the last bit, so ranks need not agree, and a choice may change at any time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch

WARM_UP = 1  # rounds that are not counted: caches, and kernels that are compiled on first use
ROUNDS = 15  # counted rounds of each way
MOST_ROUNDS = 60  # where the ways are close, or the machine is busy
CLEAR = 1.05  # a way is slower without doubt when it takes this many times as long
AGAIN = 1000  # batches after which all ways are timed again: the skew of ids may have changed

Way = Callable[[], tuple[torch.Tensor, torch.autograd.graph.Node | None]]  # the result, and its backward's last node


class LayoutChoice:
    """The fastest of `num_ways`, for each order of magnitude of a batch's ids.

    Args:
        num_ways: how many there are; the first is taken where nothing was timed.
        clock: seconds.
    """

    def __init__(self, num_ways: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._num_ways, self._clock = num_ways, clock
        self._times: dict[int, list[list[float]]] = {}  # of every way, by bits of the number of ids
        self._chosen: dict[int, int] = {}
        self._runs: Counter[int] = Counter()  # of what is chosen, since it was

    def __repr__(self) -> str:
        return f"LayoutChoice({self._chosen or 'nothing timed'})"

    def run(self, num_ids: int, ways: Sequence[Way]) -> torch.Tensor:
        """The result of the way that is chosen, or whose turn it is; then its backward is timed with it."""
        if self._num_ways == 1 or not torch.is_grad_enabled():
            return ways[0]()[0]
        size = num_ids.bit_length()
        self._runs[size] += 1
        if self._runs[size] > AGAIN:
            self._chosen.pop(size, None)
        chosen = self._chosen.get(size)
        return self._timed(size, ways) if chosen is None else ways[chosen]()[0]

    def _timed(self, size: int, ways: Sequence[Way]) -> torch.Tensor:
        times = self._times.setdefault(size, [[] for _ in ways])
        turn = min(range(len(ways)), key=lambda way: len(times[way]))
        start = self._clock()
        out, last = ways[turn]()
        forward = self._clock() - start
        if out.grad_fn is not None and last is not None:
            watch = _Backward(self._clock, partial(self._note, size, turn, forward))
            out.grad_fn.register_prehook(watch.begins)
            last.register_hook(watch.ends)
        return out

    def _note(self, size: int, way: int, forward: float, backward: float) -> None:
        times = self._times.get(size)
        if times is None:  # decided while this batch was under way
            return
        times[way].append(forward + backward)
        found = fastest([of_way[WARM_UP:] for of_way in times])
        if found is not None:
            self._chosen[size], self._runs[size] = found, 0
            del self._times[size]


def fastest(times: Sequence[Sequence[float]]) -> int | None:
    """The fastest way; None while more must be timed.

    Two measures have to agree, for each errs where the other does not: the lower quartiles, as what else the machine
    does only adds to a time, and the median of the ratios of neighbours, which were disturbed alike. Where they do
    not, their product tells after `MOST_ROUNDS`; ways that are as good as each other may take turns as long.

    Args:
        times: seconds of each way; the n-th of all ways were taken one after the other.
    """
    rounds = min(map(len, times))
    if rounds < ROUNDS:
        return None
    ways = range(len(times))
    best = min(ways, key=lambda way: math.prod(_ratios(times[way][:rounds], times[0][:rounds])))
    others = [_ratios(times[way][:rounds], times[best][:rounds]) for way in ways if way != best]
    clear = all(min(ratios) > CLEAR for ratios in others)
    return best if clear or rounds >= MOST_ROUNDS else None


def _ratios(mine: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """How many times as long: by the lower quartiles, and by neighbours."""
    quarter = len(mine) // 4
    by_quartile = sorted(mine)[quarter] / sorted(other)[quarter]
    return by_quartile, statistics.median(one / two for one, two in zip(mine, other, strict=True))


class _Backward:
    """Times one autograd node, and tells it once."""

    def __init__(self, clock: Callable[[], float], tell: Callable[[float], None]) -> None:
        self._clock, self._tell = clock, tell
        self._start: float | None = None

    def begins(self, *_: object) -> None:
        self._start = self._clock()

    def ends(self, *_: object) -> None:
        if self._start is not None:
            self._tell(self._clock() - self._start)
            self._start = None
