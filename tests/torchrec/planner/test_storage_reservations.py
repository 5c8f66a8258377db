"""Memory that a plan leaves free."""

from __future__ import annotations

import pytest

from rayrec.torchrec.distributed.planner import Topology
from rayrec.torchrec.distributed.planner.storage_reservations import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
)
from rayrec.torchrec.distributed.planner.types import PlannerError


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_share_of_memory_stays_free(share: float) -> None:
    topology = Topology(2, "cpu", ddr_cap=1000)
    reservation = FixedPercentageStorageReservation(share)
    assert reservation.last_reserved_topology is None
    reserved = reservation.reserve(topology)
    assert [host.memory_bytes for host in reserved.hosts] == [1000 * (1 - share)]
    assert reservation.last_reserved_topology is reserved


def test_what_cannot_stay_free_is_refused() -> None:
    for share in (-0.01, 1.01):
        with pytest.raises(ValueError, match="must be from 0 to 1"):
            FixedPercentageStorageReservation(share)
    with pytest.raises(ValueError, match="must not be negative"):
        FixedAbsoluteStorageReservation(-1)
    topology = Topology(2, "cpu", ddr_cap=1000)
    assert FixedAbsoluteStorageReservation(0).reserve(topology).hosts[0].memory_bytes == 1000
    assert FixedAbsoluteStorageReservation(999).reserve(topology).hosts[0].memory_bytes == 1
    with pytest.raises(PlannerError, match="hbm_reserved_bytes=1000 must be less than the 1000 bytes of a rank"):
        FixedAbsoluteStorageReservation(1000).reserve(topology)
    assert FixedAbsoluteStorageReservation.from_gb(0.5)._bytes == 1 << 29
