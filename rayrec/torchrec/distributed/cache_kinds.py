"""fbgemm's names for device caches and checks of ids, for those who import them from here; and a cache's statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod

from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    CacheAlgorithm,
    MultiPassPrefetchConfig,
)

__all__ = ["BoundsCheckMode", "CacheAlgorithm", "CacheStatistics", "MultiPassPrefetchConfig"]


class CacheStatistics(ABC):
    """What is known of a table's traffic before training."""

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
        """Area under the miss rates: 0 for a table whose traffic a small cache takes, 1 for none."""
