"""A service for a minute at most of what it can, while what happens in a year happens to it; and five times that."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayrec.serve import ModelSpec, Service
from rayrec.serve.requests import JSON
from rayrec.serve.versions import switch
from tests.serve.server import GOOD
from tests.serve.test_on_ray import ask, until
from tests.serve.test_service import version_of

pytest.importorskip("ray.serve")

HOLDER = """
import os, sys
import ray
from pathlib import Path
from rayrec.serve import ModelSpec, ServeConfig
from rayrec.serve.on_ray import environment
os.environ.update(environment(ServeConfig(models=(ModelSpec(path=Path(sys.argv[1])),), port=int(sys.argv[2]))))
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
SECONDS, AFTER_A_KILL = 60.0, 10.0
CLIENTS, ROWS = 8, 20
BODY = json.dumps({"rows": [{**GOOD, "item": item} for item in range(ROWS)]}).encode()
BAD = json.dumps({"rows": [{**GOOD, "user": -1}]}).encode()


class Client(threading.Thread):
    """Asks `rate` times a second, or as fast as it is answered; every 33rd request is a bad one.

    Args:
        expected: version → the scores of `body`.
    """

    def __init__(self, port: int, expected: dict[str, Any], rate: float | None = None, body: bytes = BODY) -> None:
        super().__init__(daemon=True)
        self._port, self._expected, self._rate, self._body = port, expected, rate, body
        self.wrong, self.failed, self.times, self.refused = list[Any](), list[float](), list[float](), list[float]()
        self.statuses: Counter[int] = Counter()
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
                connection.request("POST", "/score", BAD if number % 33 == 0 else self._body, {"content-type": JSON})
                response = connection.getresponse()
                answer = json.loads(response.read())
            except (OSError, http.client.HTTPException, ValueError):
                self.failed.append(time.monotonic())
                connection.close()
                continue
            self._look(number, response.status, answer, time.monotonic() - begin)
        connection.close()

    def _look(self, number: int, status: int, answer: Any, seconds: float) -> None:
        self.statuses[status] += 1
        if number % 33 == 0 and status in (200, 422):
            self.wrong += [] if status == 422 else [answer]
        elif status == 200:
            self.times.append(seconds)
            expected = self._expected[answer["version"]]
            if not np.allclose(answer["scores"]["label"], expected, rtol=0, atol=1e-6):
                self.wrong.append(answer)
        else:
            self.failed.append(time.monotonic())
            self.refused += [seconds] if status == 503 else []


def load(
    port: int, expected: dict[str, Any], rate: float | None, clients: int = CLIENTS, body: bytes = BODY
) -> list[Client]:
    return [Client(port, expected, None if rate is None else rate / clients, body) for _ in range(clients)]


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


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_service_in_use_is_never_wrong_whatever_dies_around_it(model: Path, tmp_path: Path) -> None:
    """At 80 % of its capacity: 3 % bad requests, a version every 5 s, two replicas and the driver killed."""
    models = tmp_path / "models"
    models.mkdir()
    expected = versions_of(model, models)
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
        driver = subprocess.Popen(command, env=environment)
        assert until(lambda: len(replicas(port)) == 2, 120), "the service does not come up"
        clients = load(port, expected, None)
        time.sleep(4)
        end(clients)
        capacity = sum(len(client.times) for client in clients) / 4
        assert not [one for client in clients for one in client.wrong + client.failed]
        clients = load(port, expected, 0.8 * capacity)
        kept, other = sorted(replicas(port))
        begin, killed, before = time.monotonic(), list[float](), (0, 0)
        plan = [(12.0, "look"), (15.0, "replica"), (30.0, "driver"), (40.0, "replica"), (SECONDS, "end")]
        for number in range(int(SECONDS)):
            time.sleep(max(begin + number - time.monotonic(), 0))
            if number % 5 == 0:
                switch(models, f"v{number // 5 % 4}")
            if plan[0][0] > number:
                continue
            _, what = plan.pop(0)
            if what == "look":
                before = memory(kept), series_of(port, kept)
            elif what == "driver":
                driver.kill()
            elif what == "replica":
                (other,) = until(lambda: replicas(port) - {kept}, 30)
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
        assert until(lambda: len(replicas(port)) == 2, 60), "a replica does not come back"
    finally:
        end(clients)
        for process in (driver, holder):
            if process is not None:
                process.kill()
                process.wait()


ALONE = """
import sys, torch, uvicorn
from pathlib import Path
from rayrec.serve import ModelSpec, Service
from rayrec.serve.http import App
from rayrec.serve.limits import Limits
torch.set_num_threads(1)
app = App(Service([ModelSpec(path=Path(sys.argv[1]))], Limits(queue=4)))
uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
"""
LARGE = json.dumps({"rows": {name: [value] * 2000 for name, value in GOOD.items()}}).encode()


def p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(200)
def test_five_times_its_capacity_slows_no_request_that_it_takes(model: Path) -> None:
    """The rest is refused at once, and after five seconds all is as before."""
    scores = Service([ModelSpec(path=model)]).score(LARGE, JSON)
    expected = {scores.version: scores.scores["label"]}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    server = subprocess.Popen([sys.executable, "-c", ALONE, str(model), str(port)])

    def run(rate: float | None, seconds: float, clients: int) -> tuple[list[float], list[float]]:
        """Times of what was answered, and of what was refused."""
        made = load(port, expected, rate, clients, LARGE)
        time.sleep(seconds)
        end(made)
        assert not [one for client in made for one in client.wrong]
        return [at for one in made for at in one.times], [at for one in made for at in one.refused]

    try:
        assert until(lambda: ask(port, "/healthz"), 60)
        run(None, 1, 2)
        capacity = len(run(None, 4, 2)[0]) / 4
        steady, refused_before = run(0.8 * capacity, 8, CLIENTS)
        accepted, refused = run(5 * capacity, 10, 40)
        time.sleep(5)
        after, refused_after = run(0.8 * capacity, 8, CLIENTS)
        told = {"steady": steady, "accepted": accepted, "refused": refused, "after": after}
        print({name: f"{len(times)}, p99 {p99(times) * 1e3:.0f} ms" for name, times in told.items()})
        assert len(refused) > 2 * len(accepted) and p99(accepted) <= 2 * p99(steady)
        assert p99(refused) < max(p99(accepted), 0.1)
        assert p99(after) <= 1.5 * p99(steady) and statistics.median(after) <= 1.5 * statistics.median(steady)
        assert len(after) >= 0.8 * len(steady) and len(refused_after) <= 1.5 * len(refused_before) + 0.05 * len(after)
    finally:
        server.kill()
        server.wait()
