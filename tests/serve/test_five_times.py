"""A service that is asked for five times what it can."""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rayrec.serve import JSON
from tests.serve import open_loop
from tests.serve.open_loop import Sent
from tests.serve.server import GOOD
from tests.serve.test_on_ray import ask, until

pytest.importorskip("ray.serve")

ALONE = """
import sys, uvicorn
from pathlib import Path
from rayrec.serve import ModelSpec, ServeConfig
from rayrec.serve import Limits
from rayrec.serve.app import application
app = application(ServeConfig(models=(ModelSpec(path=Path(sys.argv[1])),), limits=Limits(queue=4), watch_s=0.0))
uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
"""
OVERLOAD_S = min(60, int(os.environ.get("RAYREC_SOAK_S", "600")) // 3)
LARGE = json.dumps({"rows": {name: [value] * 2000 for name, value in GOOD.items()}}).encode()


def p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_five_times_its_capacity_slows_no_request_that_it_takes(model: Path, tmp_path: Path) -> None:
    """For a minute, or a third of the soak; the rest is refused at once, and after five seconds all is as before.

    Requests come when they are due, however long earlier ones take.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    server = subprocess.Popen([sys.executable, "-c", ALONE, str(model), str(port)])
    body = tmp_path / "body"
    body.write_bytes(LARGE)

    def times(sent: list[Sent], status: int) -> list[float]:
        return [one.seconds for one in sent if one.status == status]

    try:
        assert until(lambda: ask(port, "/healthz"), 60)
        open_loop.run(port, 5, 2, body)
        rate = capacity(port, 4)
        phases = {
            "steady": open_loop.run(port, 0.8 * rate, 20, body),
            "five": open_loop.run(port, 5 * rate, OVERLOAD_S, body),
        }
        open_loop.run(port, 0.8 * rate, 5, body)
        again = capacity(port, 4)  # of the machine as it is now: its speed changes within a minute
        later = phases["after"] = open_loop.run(port, 0.8 * again, 15, body)
        told = {(name, status): times(sent, status) for name, sent in phases.items() for status in (200, 503, 0)}
        told = {key: values for key, values in told.items() if values}
        late = max(p99([one.late for one in sent]) for sent in phases.values())
        print(f"capacity {rate:.0f}/s, later {again:.0f}/s; requests were sent up to {late * 1e3:.0f} ms late (p99)")
        print({key: f"{len(values)}, p99 {p99(values) * 1e3:.0f} ms" for key, values in told.items()})
        assert all(one.status in (200, 503) for sent in phases.values() for one in sent)
        assert len(told["five", 503]) > 2 * len(told["five", 200]) > rate * OVERLOAD_S
        assert p99(told["five", 200]) <= 2 * p99(told["steady", 200])
        assert p99(told["five", 503]) < max(p99(told["five", 200]), 0.1)
        assert again > 0.5 * rate
        assert p99(times(later, 200)) <= 1.5 * p99(told["steady", 200])
        refused = len(times(phases["steady"], 503)) / len(phases["steady"])
        assert len(times(later, 503)) <= (1.5 * refused + 0.05) * len(later)
        assert statistics.median(times(later, 200)) <= 1.5 * statistics.median(told["steady", 200])
    finally:
        server.kill()
        server.wait()


def capacity(port: int, seconds: float) -> float:
    """Requests a second of two clients that ask as fast as they are answered."""
    counts = [0, 0]

    def run(number: int) -> None:
        connection, end = http.client.HTTPConnection("127.0.0.1", port, timeout=30), time.monotonic() + seconds
        while time.monotonic() < end:
            connection.request("POST", "/score", LARGE, {"content-type": JSON})
            counts[number] += connection.getresponse().read() is not None
        connection.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds
