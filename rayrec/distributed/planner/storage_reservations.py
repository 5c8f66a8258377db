"""Memory that a plan leaves free, for what the planner cannot know of.

The model's dense part and the batch's ids are counted by the planner itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from rayrec.distributed.planner.topology import Topology


class StorageReservation(ABC):
    """Says how much of a machine a plan may use."""

    @abstractmethod
    def reserve(self, topology: Topology) -> Topology:
        """The machine less what is to stay free."""


class FixedPercentageStorageReservation(StorageReservation):
    """A share of every rank's device memory stays free.

    Args:
        percentage: the share, from 0 to 1.

    Raises:
        ValueError: a share outside.
    """

    def __init__(self, percentage: float) -> None:
        if not 0 <= percentage <= 1:
            raise ValueError(f"percentage={percentage} must be from 0 to 1")
        self._percentage = percentage

    def reserve(self, topology: Topology) -> Topology:
        return topology.with_share(1 - self._percentage)


class HeuristicalStorageReservation(FixedPercentageStorageReservation):
    """As `FixedPercentageStorageReservation`: dense parameters and ids, which TorchRec guesses at, are counted.

    Args:
        percentage: the share, from 0 to 1.
        parameter_multiplier, dense_tensor_estimate: taken and not needed.
    """

    def __init__(
        self, percentage: float, parameter_multiplier: float = 6.0, dense_tensor_estimate: int | None = None
    ) -> None:
        super().__init__(percentage)


class InferenceStorageReservation(HeuristicalStorageReservation):
    """The same under the name that inference uses."""

    def __init__(self, percentage: float, **unused: Any) -> None:
        super().__init__(percentage)
