"""fbgemm's enums of device caches and bounds checks, and a base class of cache statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod

from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    CacheAlgorithm,
    MultiPassPrefetchConfig,
)

__all__ = ["BoundsCheckMode", "CacheAlgorithm", "CacheStatistics", "MultiPassPrefetchConfig"]


class CacheStatistics(ABC):
    """Statistics of a table's ids, known before training."""

    @property
    @abstractmethod
    def expected_lookups(self) -> float:
        """Different ids of a step."""

    @abstractmethod
    def expected_miss_rate(self, clf: float) -> float:
        """Share of the lookups that miss a cache of `clf` of the rows."""

    @property
    @abstractmethod
    def cacheability(self) -> float:
        """Area under the curve of miss rates: 0 if a small cache is enough, 1 if none helps."""
