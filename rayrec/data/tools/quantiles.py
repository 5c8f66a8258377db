"""Boundaries of equal frequency, for `buckets` and `quantile`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def bucket_edges(ascending: npt.NDArray[np.floating], count: int) -> list[float]:
    """Boundaries of about `count` buckets of equal frequency. A value as frequent as a bucket gets its own bucket."""
    values, counts = np.unique(ascending, return_counts=True)
    own_bucket = np.flatnonzero(counts * count >= len(ascending))
    remaining = np.repeat(np.delete(values, own_bucket), np.delete(counts, own_bucket))
    shares = np.linspace(0, 1, max(count - len(own_bucket), 1) + 1)[:-1]
    quantile_values = np.quantile(remaining, shares, method="lower") if len(remaining) else remaining
    next_values = values[np.minimum(own_bucket + 1, len(values) - 1)]
    edges = np.unique(np.concatenate([quantile_values, values[own_bucket], next_values]))
    return [float(edge) for edge in (edges[edges > values[0]] if len(values) > 1 else values)]


def quantiles(ascending: npt.NDArray[np.floating], count: int) -> list[float]:
    """The distinct quantiles that bound `count` intervals of equal frequency."""
    edges = np.unique(np.quantile(ascending, np.linspace(0, 1, count + 1), method="closest_observation"))
    return [float(edge) for edge in edges]
