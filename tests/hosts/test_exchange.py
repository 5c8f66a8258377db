"""Bytes and seconds between two hosts of two ranks, on a wire of 100 Mbit/s: measured, and as the planner has them."""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.exchange import LOCAL, WORLD
from tests.hosts.lab import laboratory

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
MBIT = 100


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 of the program on the hosts found."""
    out = tmp_path_factory.mktemp("exchange") / "answer.json"
    with laboratory(WORLD // LOCAL) as lab:
        for host in lab.hosts:
            host.shape(MBIT)
        ranks = []
        for rank in range(WORLD):
            environment = {**os.environ, "RANK": str(rank), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            words = [sys.executable, "-m", "tests.hosts.exchange", str(out)]
            ranks.append(lab.start(lab.hosts[rank // LOCAL], words, environment, f"rank-{rank}.log"))
        codes = [rank.wait(400) for rank in ranks]
        assert codes == [0] * WORLD, lab.logs()
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_rows_cut_on_a_host_move_less_between_hosts(answer: dict[str, Any]) -> None:
    found = answer["found"]
    assert found["table_row_wise"]["bytes"] <= 0.6 * found["row_wise"]["bytes"], found


@pytest.mark.parametrize(
    "kind", ["table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard", "data_parallel", "planner"]
)
def test_the_planner_knows_the_bytes(answer: dict[str, Any], kind: str) -> None:
    one = answer["found"][kind]
    assert one["predicted_bytes"] == pytest.approx(one["bytes"], rel=0.15)


def test_the_wire_is_calibrated_as_it_is(answer: dict[str, Any]) -> None:
    """Two ranks share it."""
    assert answer["speeds"]["inter_host_bw"] * LOCAL * 8 == pytest.approx(MBIT * 1e6, rel=0.15)


def test_the_planner_chooses_nearly_the_best(answer: dict[str, Any]) -> None:
    seconds = {kind: one["seconds"] for kind, one in answer["found"].items()}
    planner = seconds.pop("planner")
    over = {
        kind: statistics.median(own / other for own, other in zip(planner, found, strict=True))
        for kind, found in seconds.items()
    }
    assert max(over.values()) <= 1.1, f"{over} {answer['chosen']} {planner} {seconds}"
