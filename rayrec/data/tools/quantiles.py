"""Boundaries of equal frequency, for `buckets` and `quantile`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def bucket_edges(ascending: npt.NDArray[np.floating], count: int) -> list[float]:
    """Boundaries of buckets of about equal frequency; a value as frequent as a bucket has one of its own."""
    values, counts = np.unique(ascending, return_counts=True)
    own = np.flatnonzero(counts * count >= len(ascending))
    rest = np.repeat(np.delete(values, own), np.delete(counts, own))
    shares = np.linspace(0, 1, max(count - len(own), 1) + 1)[:-1]
    parts = np.quantile(rest, shares, method="lower") if len(rest) else rest
    after = values[np.minimum(own + 1, len(values) - 1)]
    edges = np.unique(np.concatenate([parts, values[own], after]))
    return [float(one) for one in (edges[edges > values[0]] if len(values) > 1 else values)]


def quantiles(ascending: npt.NDArray[np.floating], count: int) -> list[float]:
    """Different values at the ends of so many parts of equal frequency."""
    found = np.unique(np.quantile(ascending, np.linspace(0, 1, count + 1), method="closest_observation"))
    return [float(one) for one in found]
