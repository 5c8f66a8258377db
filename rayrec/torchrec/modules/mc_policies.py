"""Eviction policies, which score ids if there are more ids than rows, and filters of rare new ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

Filter = Callable[[torch.Tensor], tuple[torch.Tensor, float | torch.Tensor]]
COUNTS = "counts"
LAST_SEEN = "last_access_iter"


class MCHEvictionPolicyMetadataInfo(NamedTuple):
    """A number stored for each id.

    Args:
        metadata_name: `counts` or `last_access_iter`.
        is_mch_metadata: stored for ids with a row.
        is_history_metadata: stored for ids without a row.
    """

    metadata_name: str
    is_mch_metadata: bool
    is_history_metadata: bool


_COUNTS = MCHEvictionPolicyMetadataInfo(COUNTS, True, False)
_LAST_SEEN = MCHEvictionPolicyMetadataInfo(LAST_SEEN, True, True)


class MCHEvictionPolicy(ABC):
    """Scores ids. The highest scores keep or get a row; among equal scores, ids with a row come first.

    Args:
        metadata_info: the numbers stored for each id.
        threshold_filtering_func: takes the counts `[n]` of unique ids; returns the ids that may get a row (as a mask or
            indices), and the threshold.
    """

    def __init__(
        self, metadata_info: list[MCHEvictionPolicyMetadataInfo], threshold_filtering_func: Filter | None = None
    ) -> None:
        self.metadata_info = metadata_info
        self.threshold_filtering_func = threshold_filtering_func

    @abstractmethod
    def scores(self, iteration: int, known: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the score of each id.

        Args:
            iteration: number of training steps.
            known: the numbers that `metadata_info` names, int64 `[n]` each.
        """


class LFU_EvictionPolicy(MCHEvictionPolicy):
    """Least frequently used: the score is the count of an id since it got its row."""

    def __init__(self, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__([_COUNTS], threshold_filtering_func)

    def scores(self, iteration: int, known: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return known[COUNTS]


class LRU_EvictionPolicy(MCHEvictionPolicy):
    """Least recently used: the score is the negative age of an id to the power of `decay_exponent`."""

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__([_LAST_SEEN], threshold_filtering_func)
        self._decay_exponent = decay_exponent

    def scores(self, iteration: int, known: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return -_age(iteration, known, self._decay_exponent)


class DistanceLFU_EvictionPolicy(MCHEvictionPolicy):
    """The score is the count of an id, divided by its age to the power of `decay_exponent`."""

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__([_COUNTS, _LAST_SEEN], threshold_filtering_func)
        self._decay_exponent = decay_exponent

    def scores(self, iteration: int, known: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return known[COUNTS] / _age(iteration, known, self._decay_exponent)


def _age(iteration: int, known: Mapping[str, torch.Tensor], exponent: float) -> torch.Tensor:
    return torch.pow(iteration - known[LAST_SEEN] + 1, exponent)


def dynamic_threshold_filter(
    id_counts: torch.Tensor, threshold_skew_multiplier: float = 10.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects ids with counts above `threshold_skew_multiplier` times the mean; also returns the threshold."""
    threshold = threshold_skew_multiplier / max(1, id_counts.numel()) * id_counts.sum()
    return id_counts > threshold, threshold


def average_threshold_filter(id_counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects ids with counts above the mean; also returns the mean."""
    threshold = id_counts.float().mean()
    return id_counts > threshold, threshold


def probabilistic_threshold_filter(
    id_counts: torch.Tensor, per_id_probability: float = 0.01
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects ids with this probability per occurrence; also returns the random thresholds."""
    thresholds = torch.rand(id_counts.size(), device=id_counts.device)
    return 1 - (1 - per_id_probability) ** id_counts.float() > thresholds, thresholds
