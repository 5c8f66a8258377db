"""Which ids keep a row when there are more ids than rows: policies that score them, and filters of rare newcomers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

Filter = Callable[[torch.Tensor], tuple[torch.Tensor, float | torch.Tensor]]
COUNTS = "counts"
LAST_SEEN = "last_access_iter"


class MCHEvictionPolicyMetadataInfo(NamedTuple):
    """A number that is kept of every id.

    Args:
        metadata_name: `counts` or `last_access_iter`.
        is_mch_metadata: it is kept of ids that have a row.
        is_history_metadata: it is kept of ids that wait for one.
    """

    metadata_name: str
    is_mch_metadata: bool
    is_history_metadata: bool


_COUNTS = MCHEvictionPolicyMetadataInfo(COUNTS, True, False)
_LAST_SEEN = MCHEvictionPolicyMetadataInfo(LAST_SEEN, True, True)


class MCHEvictionPolicy(ABC):
    """Scores ids; those of the highest scores keep or get a row, of equal ones those that have it.

    Args:
        metadata_info: what is kept of every id.
        threshold_filtering_func: of the counts of different ids `[n]`, which of them may get a row (a mask or places),
            and the threshold that says so.
    """

    def __init__(
        self, metadata_info: list[MCHEvictionPolicyMetadataInfo], threshold_filtering_func: Filter | None = None
    ) -> None:
        self.metadata_info = metadata_info
        self.threshold_filtering_func = threshold_filtering_func

    @abstractmethod
    def scores(self, iteration: int, known: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A score for each id.

        Args:
            iteration: training steps so far.
            known: int64 `[n]` of each number that `metadata_info` names.
        """


class LFU_EvictionPolicy(MCHEvictionPolicy):
    """Least frequently used: the count of an id since it got its row."""

    def __init__(self, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__([_COUNTS], threshold_filtering_func)

    def scores(self, iteration: int, known: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return known[COUNTS]


class LRU_EvictionPolicy(MCHEvictionPolicy):
    """Least recently used: the age of an id to the power of `decay_exponent`, the older the lower."""

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__([_LAST_SEEN], threshold_filtering_func)
        self._decay_exponent = decay_exponent

    def scores(self, iteration: int, known: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return -_age(iteration, known, self._decay_exponent)


class DistanceLFU_EvictionPolicy(MCHEvictionPolicy):
    """The count of an id, divided by its age to the power of `decay_exponent`."""

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
    """Ids that came more often than the mean times `threshold_skew_multiplier`; and that threshold."""
    threshold = threshold_skew_multiplier / max(1, id_counts.numel()) * id_counts.sum()
    return id_counts > threshold, threshold


def average_threshold_filter(id_counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids that came more often than the mean; and the mean."""
    threshold = id_counts.float().mean()
    return id_counts > threshold, threshold


def probabilistic_threshold_filter(
    id_counts: torch.Tensor, per_id_probability: float = 0.01
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids pass with this probability for each time that they came; and the numbers that were drawn."""
    drawn = torch.rand(id_counts.size(), device=id_counts.device)
    return 1 - (1 - per_id_probability) ** id_counts.float() > drawn, drawn
