"""A service at most of what it can, for four minutes, while what happens in a year happens to it.

`RAYREC_SOAK_S` says for how many seconds, 60 at least.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayrec.cli import run
from rayrec.serve import JSON, ModelSpec, Service
from tests.serve.server import GOOD
from tests.serve.test_on_ray import ask, until
from tests.serve.test_service import version_of

pytest.importorskip("ray.serve")

HOLDER = """
import os, sys
import ray, ray.serve
from pathlib import Path
from rayrec.serve import ModelSpec, ServeConfig
from rayrec.serve.on_ray import environment, own_haproxy
os.environ.update(environment(ServeConfig(models=(ModelSpec(path=Path(sys.argv[1])),), port=int(sys.argv[2]))))
with own_haproxy():  # other services of this machine have the default ports
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.serve.shutdown()  # or its balancer outlives it
    ray.shutdown()
"""
SECONDS, AFTER_A_KILL = float(os.environ.get("RAYREC_SOAK_S", "240")), 10.0
SWAP_S = 5 if SECONDS < 300 else 20
CLIENTS, ROWS = 8, 20
BODY = json.dumps({"rows": [{**GOOD, "item": item} for item in range(ROWS)]}).encode()
BAD = json.dumps({"rows": [{**GOOD, "user": -1}]}).encode()


class Client(threading.Thread):
    """Asks `rate` times a second, or as fast as it is answered; every 33rd request is a bad one.

    Args:
        expected: version → the scores of `BODY`.
    """

    def __init__(self, port: int, expected: dict[str, Any], rate: float | None = None) -> None:
        super().__init__(daemon=True)
        self._port, self._expected, self._rate = port, expected, rate
        self.wrong, self.failed, self.times = list[Any](), list[float](), list[float]()
        self.reasons: Counter[str] = Counter()  # of failures
        self.stop = threading.Event()
        self.start()

    def run(self) -> None:
        connection, due, number = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30), time.monotonic(), 0
        while not self.stop.is_set():
            if self._rate is not None:
                due = max(due + 1 / self._rate, time.monotonic() - 1)
                time.sleep(max(due - time.monotonic(), 0))
            number += 1
            begin = time.monotonic()
            try:
                connection.request("POST", "/score", BAD if number % 33 == 0 else BODY, {"content-type": JSON})
                response = connection.getresponse()
                answer = json.loads(response.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._fail(repr(error))
                connection.close()
                continue
            self._look(number, response.status, answer, time.monotonic() - begin)
        connection.close()

    def _look(self, number: int, status: int, answer: Any, seconds: float) -> None:
        if number % 33 == 0 and status in (200, 422):
            self.wrong += [] if status == 422 else [answer]
        elif status == 200:
            self.times.append(seconds)
            expected = self._expected[answer["version"]]
            if not np.allclose(answer["scores"]["label"], expected, rtol=0, atol=1e-6):
                self.wrong.append(answer)
        else:
            self._fail(f"{status} {answer}")

    def _fail(self, reason: str) -> None:
        self.failed.append(time.monotonic())
        self.reasons[reason[:200]] += 1


def load(port: int, expected: dict[str, Any], rate: float | None) -> list[Client]:
    return [Client(port, expected, None if rate is None else rate / CLIENTS) for _ in range(CLIENTS)]


def events() -> list[tuple[float, str]]:
    """What happens, and when; in a run shorter than two minutes, sooner."""
    kills = [15.0, 40.0] if SECONDS < 120 else [60.0 * minute for minute in range(1, int(SECONDS / 60))]
    planned = [*((at, "replica") for at in kills), (12.0, "look"), (SECONDS / 2, "driver"), (SECONDS, "end")]
    return sorted(planned)


def end(clients: list[Client]) -> None:
    for client in clients:
        client.stop.set()
    for client in clients:
        client.join(60)


def versions_of(model: Path, root: Path) -> dict[str, Any]:
    """Four versions below `root` that score differently, and the scores of each."""
    expected = {}
    for number in range(4):
        folder = version_of(model, root / f"v{number}", number / 3)
        expected[folder.name] = Service([ModelSpec(path=folder)]).score(BODY, JSON).scores["label"]
    assert len({float(scores[0]) for scores in expected.values()}) == 4
    return expected


def replicas(port: int) -> set[int]:
    return {ask(port, "/healthz")["pid"] for _ in range(20)}


def memory(pid: int) -> int:
    """Bytes that are the process's own."""
    lines = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(lines[name].split()[0]) << 10 for name in ("Private_Clean", "Private_Dirty"))


def series_of(port: int, pid: int) -> int:
    """How many series a replica has; a balancer stands in front."""
    for _ in range(200):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        if f':{pid}"' in text:
            return sum(line[0] != "#" for line in text.splitlines())
    raise AssertionError(f"replica {pid} does not answer")


@pytest.mark.long(minutes=5)
@pytest.mark.timeout(340 + int(SECONDS))
def test_a_service_in_use_is_never_wrong_whatever_dies_around_it(model: Path, tmp_path: Path) -> None:
    """At 80 % of its capacity: 3 % bad requests, a version every 5 s, a replica killed every minute, the driver
    once."""
    models = tmp_path / "models"
    models.mkdir()
    expected = versions_of(model, models)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})  # clients and service, which inherits it: other tests have the other cores
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment["RAY_AUTH_MODE"] = "disabled"  # the token of a local Ray is its process's own
    words = [sys.executable, "-c", HOLDER, str(models), str(port)]
    holder = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    clients: list[Client] = []
    driver = None
    try:
        assert holder.stdout is not None and holder.stdin is not None
        environment["RAY_ADDRESS"] = holder.stdout.readline().strip()
        command = [sys.executable, "-m", "rayrec.cli", "serve", f"ctr={models}", "--port", str(port)]
        command += ["--replicas", "2", "--watch", "0.5"]
        driver = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert driver.stdout is not None
        assert "serving ctr at" in driver.stdout.readline(), "the service does not come up"
        clients = load(port, expected, None)
        time.sleep(4)
        end(clients)
        capacity = sum(len(client.times) for client in clients) / 4
        assert not [one for client in clients for one in client.wrong + client.failed], [c.reasons for c in clients]
        clients = load(port, expected, 0.8 * capacity)
        kept, other = sorted(replicas(port))
        begin, killed, before, plan = time.monotonic(), list[float](), (0, 0), events()
        for number in range(int(SECONDS)):
            time.sleep(max(begin + number - time.monotonic(), 0))
            if number % SWAP_S == 0:
                assert run(["service", "rollback", str(models), "--to", f"v{number // SWAP_S % 4}"]) == 0
            if plan[0][0] > number:
                continue
            _, what = plan.pop(0)
            if what == "look":
                before = memory(kept), series_of(port, kept)
            elif what == "driver":
                driver.kill()
            elif what == "replica":
                (other,) = until(lambda: replicas(port) - {kept}, 120)
                os.kill(other, signal.SIGKILL)
                killed.append(time.monotonic())
        end(clients)
        answered = sum(len(client.times) for client in clients)
        failed = [at for client in clients for at in client.failed]
        after = memory(kept), series_of(port, kept)
        late = [min(at - kill for kill in killed if at >= kill) for at in failed if at >= killed[0]]
        print(f"capacity {capacity:.0f}/s, {answered} answered, {len(failed)} failed at most", end=" ")
        print(f"{max(late, default=0):.1f} s after a kill; bytes and series {before}, {after}")
        assert not [one for client in clients for one in client.wrong], "a score of no version"
        assert answered > 0.5 * 0.8 * capacity * SECONDS
        assert all(any(0 <= at - kill < AFTER_A_KILL for kill in killed) for at in failed), "only at a kill"
        assert len(failed) < 0.05 * answered
        assert after[0] < before[0] + (32 << 20) and after[1] < before[1] + 60, (before, after)
        assert until(lambda: len(replicas(port)) == 2, 180), "a replica does not come back"
    finally:
        os.sched_setaffinity(0, cores)
        end(clients)
        if driver is not None:
            driver.kill()
            driver.wait()
        try:
            holder.communicate(timeout=60)
        finally:
            holder.kill()
