"""Memory that a plan leaves free. The planner already counts the dense part of the model and the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rayrec.torchrec.distributed.planner.bases import StorageReservation
from rayrec.torchrec.distributed.planner.parts import PlannerError, PlannerErrorType
from rayrec.torchrec.distributed.planner.topology import Topology
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "FixedAbsoluteStorageReservation",
    "FixedPercentageStorageReservation",
    "HeuristicalStorageReservation",
    "InferenceStorageReservation",
    "StorageReservation",
]


class FixedPercentageStorageReservation(StorageReservation):
    """Reserves a fraction of the device memory of every rank.

    Args:
        percentage: the fraction, from 0 to 1.

    Raises:
        ValueError: the fraction is out of range.
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
        share = 1 - self._percentage
        self._last = topology._copy(
            hosts=[(host.num_ranks, int(host.memory_bytes * share), host.host_bytes) for host in topology.hosts]
        )
        return self._last


class FixedAbsoluteStorageReservation(StorageReservation):
    """Reserves a number of bytes of the device memory of every rank.

    Raises:
        ValueError: a negative number.
    """

    def __init__(self, hbm_reserved_bytes: int) -> None:
        if hbm_reserved_bytes < 0:
            raise ValueError(f"hbm_reserved_bytes={hbm_reserved_bytes} must not be negative")
        self._bytes = hbm_reserved_bytes

    @classmethod
    def from_gb(cls, hbm_reserved_gb: float) -> FixedAbsoluteStorageReservation:
        """Reserve a number of GiB."""
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
                f"hbm_reserved_bytes={self._bytes} must be less than the {smallest} bytes of a rank",
                PlannerErrorType.INSUFFICIENT_STORAGE,
            )
        self._last = topology.less(self._bytes)
        return self._last


class HeuristicalStorageReservation(FixedPercentageStorageReservation):
    """Reserves a fraction; the planner counts dense parameters and ids, which TorchRec estimates here.

    Args:
        percentage: the fraction, from 0 to 1.
        parameter_multiplier, dense_tensor_estimate: ignored.
    """

    def __init__(
        self, percentage: float, parameter_multiplier: float = 6.0, dense_tensor_estimate: int | None = None
    ) -> None:
        super().__init__(percentage)


class InferenceStorageReservation(HeuristicalStorageReservation):
    """Alias of `HeuristicalStorageReservation` for inference."""

    def __init__(self, percentage: float, **unused: Any) -> None:
        super().__init__(percentage)
