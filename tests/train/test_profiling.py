"""What steps are spent on: the clocks of exchanges and of stops."""

from __future__ import annotations

import pytest

from rayrec.distributed.comm.trace import EXCHANGE, LOOKUP
from rayrec.train.worker.profiling import ExchangeClock, Stalls


def test_only_exchanges_count() -> None:
    clock = ExchangeClock()
    for name, began, ended in ((EXCHANGE, 1.0, 1.5), (LOOKUP, 2.0, 9.0), (EXCHANGE, 3.0, 3.25)):
        clock(name, began, ended)
    assert clock.seconds == 0.75


def test_a_stop_within_a_stop_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 2.0, 4.0, 5.0, 8.0, 10.0])
    monkeypatch.setattr("rayrec.train.worker.profiling.time.perf_counter", lambda: next(clock))
    stalls = Stalls()
    with stalls.measured(), stalls.measured():  # from 1 to 5, and from 2 to 4
        pass
    assert stalls.close() == 0.5
    assert stalls.close() == 0.0
