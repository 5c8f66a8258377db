"""Memory that a plan leaves free, for what the planner cannot know of.

The model's dense part and the batch's ids are counted by the planner itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rayrec.distributed.planner.parts import PlannerError, PlannerErrorType
from rayrec.distributed.planner.topology import Topology

if TYPE_CHECKING:
    from torch import nn


class StorageReservation(ABC):
    """Says how much of a machine a plan may use."""

    @abstractmethod
    def reserve(
        self,
        topology: Topology,
        batch_size: int = 0,
        module: nn.Module | None = None,
        sharders: Sequence[Any] = (),
        constraints: Mapping[str, Any] | None = None,
    ) -> Topology:
        """The machine less what is to stay free.

        Args:
            topology: the machine.
            batch_size, module, sharders, constraints: what is planned for.
        """

    @property
    def last_reserved_topology(self) -> Topology | None:
        """What `reserve` returned last."""
        return self._last

    _last: Topology | None = None


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

    def reserve(
        self,
        topology: Topology,
        batch_size: int = 0,
        module: nn.Module | None = None,
        sharders: Sequence[Any] = (),
        constraints: Mapping[str, Any] | None = None,
    ) -> Topology:
        self._last = topology.with_share(1 - self._percentage)
        return self._last


class FixedAbsoluteStorageReservation(StorageReservation):
    """So many bytes of every rank's device memory stay free.

    Raises:
        ValueError: a negative number.
    """

    def __init__(self, hbm_reserved_bytes: int) -> None:
        if hbm_reserved_bytes < 0:
            raise ValueError(f"hbm_reserved_bytes={hbm_reserved_bytes} must not be negative")
        self._bytes = hbm_reserved_bytes

    @classmethod
    def from_gb(cls, hbm_reserved_gb: float) -> FixedAbsoluteStorageReservation:
        """Of GiB."""
        return cls(int(hbm_reserved_gb * (1 << 30)))

    def reserve(
        self,
        topology: Topology,
        batch_size: int = 0,
        module: nn.Module | None = None,
        sharders: Sequence[Any] = (),
        constraints: Mapping[str, Any] | None = None,
    ) -> Topology:
        smallest = min(host.memory_bytes for host in topology.hosts)
        if self._bytes >= smallest:
            raise PlannerError(
                f"{self._bytes} bytes are to stay free, but a rank has {smallest}",
                PlannerErrorType.INSUFFICIENT_STORAGE,
            )
        self._last = topology.less(self._bytes)
        return self._last


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
