"""`simulate.py --check`: predicted and measured steps, on this host and on two that share a slow wire."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.lab import laboratory

pytestmark = [pytest.mark.long, pytest.mark.timeout(1000)]
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
CHECK = [str(ROOT / "jobs/experiments/simulate.py"), "--check", "--json"]
LOCAL, MBIT = 2, 100


def test_one_host_is_told_as_one_line() -> None:
    """How far off it is depends on what else the machine does; `jobs/RESULTS.md` has figures of an idle one."""
    run = subprocess.run(
        [sys.executable, *CHECK, "--ranks", "2"], env=ENVIRONMENT, capture_output=True, text=True, timeout=400
    )
    found = json.loads(run.stdout.splitlines()[-1])["checked"]
    assert [one["world"] for one in found] == ["1x2"], run.stderr
    for one in found:
        assert one["error"] == pytest.approx(one["predicted_s"] / one["measured_s"] - 1)
        assert one["measured_s"] == statistics.median(one["visits_s"]) and one["good"] is (abs(one["error"]) <= 0.2)
    assert run.returncode == int(not all(one["good"] for one in found))


@pytest.mark.alone
def test_two_hosts_are_predicted_within_a_fifth() -> None:
    """On a wire so slow that a busy machine hardly matters; of twice its speed, where ranks compute while others send,
    a step was told a quarter too long. Up to twice more where it was disturbed while it calibrated.
    """
    tries = [_two_hosts()]
    while not tries[-1]["good"] and len(tries) < 3:
        tries.append(_two_hosts())
    assert [one["world"] for one in tries] == [f"2x{LOCAL}"] * len(tries)
    assert tries[-1]["good"], tries


def _two_hosts() -> dict[str, Any]:
    """What `--check` finds on two hosts."""
    words = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(LOCAL)),
        *("--rdzv-backend", "static", "--master-port", "29541"),
    ]
    with laboratory(2) as lab:
        for host in lab.hosts:
            host.shape(MBIT)
        runs = []
        for number, host in enumerate(lab.hosts):
            environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            where = ["--node-rank", str(number), "--master-addr", lab.hosts[0].address]
            check = [*CHECK[:-1], "--cpus", "1", "--json", str(lab.folder / "found.json")]
            runs.append(lab.start(host, [*words, *where, *check], environment, f"host-{number}.log"))
        codes = [run.wait(400) for run in runs]
        assert (lab.folder / "found.json").exists(), lab.logs()
        found: dict[str, Any] = json.loads((lab.folder / "found.json").read_text())
    (one,) = found["checked"]
    assert codes == [int(not one["good"])] * len(codes)
    return dict(one)
