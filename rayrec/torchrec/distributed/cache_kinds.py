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
    """Statistics of the ids of a table, collected before training."""

    @property
    @abstractmethod
    def expected_lookups(self) -> float:
        """Unique ids per step."""

    @abstractmethod
    def expected_miss_rate(self, clf: float) -> float:
        """Fraction of lookups that miss a cache that holds the fraction `clf` of the rows."""

    @property
    @abstractmethod
    def cacheability(self) -> float:
        """Area under the miss rate curve: 0 if a small cache suffices, 1 if no cache helps."""
