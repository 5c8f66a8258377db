"""The clock of a table: seconds of event time, the same on all ranks, never the time of day."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayrec.dynamic_ids.config import LATEST

OUTLIERS = 8


def newest_times(times: np.ndarray) -> np.ndarray:
    """What a rank tells the others about a step: its newest event times, at most `OUTLIERS`, the newest first.

    Args:
        times: Seconds since 1970, int64. Negative ones count as unknown and later ones than 2106 as that.
    """
    known = np.minimum(times[times >= 0], LATEST)
    if known.size > OUTLIERS:
        known = np.partition(known, known.size - OUTLIERS)[-OUTLIERS:]
    return np.sort(known)[::-1]


def advance(clock: int, newest_of_ranks: Sequence[np.ndarray]) -> int:
    """The clock of a step: the eighth-newest event time of its rows on all ranks, or the clock before if that is later.

    So seven rows of a step with a wrong time in the future cannot expire a table, and late rows change nothing. Of
    fewer than eight rows the oldest counts; a step without times leaves the clock as it is.
    """
    newest = np.sort(np.concatenate(newest_of_ranks))[::-1][:OUTLIERS]
    return max(clock, int(newest[-1])) if newest.size else clock
