"""A Ray cluster on the hosts of a laboratory, with token authentication on: a head that only schedules, and workers."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosts.lab import Host, Lab, laboratory

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).parent / "ray")
DASHBOARD = "http://127.0.0.1:8265"
# What an address answers. A command of Ray's would import Ray for seconds, each time that it is asked.
ASK = """
import sys, urllib.request
asked = urllib.request.Request(sys.argv[1], headers={"Authorization": f"Bearer {sys.argv[2]}"})
print(urllib.request.urlopen(asked, timeout=30).read().decode())
"""
# A dead node is noticed after seconds instead of a minute; fewer processes a node.
SETTINGS = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "6",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONWARNINGS": "ignore",
}


@dataclass
class RayHosts:
    """Args:
    lab: the hosts; the first is the head.
    environment: of every command, with the token.
    """

    lab: Lab
    environment: dict[str, str]

    @property
    def head(self) -> Host:
        return self.lab.hosts[0]

    def join(self, host: Host, cpus: int) -> None:
        """Start Ray on a host, as a head or to the head that is there."""
        role = ["--head"] if host is self.head else [f"--address={self.head.address}:6379"]
        start = [RAY, "start", *role, "--block", f"--node-ip-address={host.address}", f"--num-cpus={cpus}"]
        start += ["--object-store-memory=100000000", "--disable-usage-stats"]
        self.lab.start(host, start, self.environment, f"ray-{host.name}-{time.time():.0f}.log")

    def await_nodes(self, count: int, timeout_s: float = 300) -> None:
        """Wait until the cluster has so many nodes that are alive."""
        until, alive = time.monotonic() + timeout_s, 0
        while time.monotonic() < until:
            asked = self.ask("/api/v0/nodes")
            alive = asked.stdout.count('"state": "ALIVE"')
            if alive == count:
                return
            time.sleep(0.5)
        pytest.fail(f"{count} nodes are wanted, there are {alive}\n{asked.stderr}\n{self.lab.logs()}")

    def on_head(self, *words: str, timeout_s: float = 120, **changes: str) -> subprocess.CompletedProcess[str]:
        return self.head.run(*words, timeout_s=timeout_s, cwd=ROOT, env=self.environment | changes)

    def ask(self, path: str) -> subprocess.CompletedProcess[str]:
        """What the dashboard answers to whoever has the token."""
        return self.on_head(sys.executable, "-S", "-c", ASK, DASHBOARD + path, self.environment["RAY_AUTH_TOKEN"])

    def submission(self, *arguments: str) -> list[str]:
        """The guide's command."""
        return [RAY, "job", "submit", "--address", DASHBOARD, "--working-dir", ".", "--", "python", *arguments]


@contextmanager
def ray_hosts(workers: int, cpus: int = 2) -> Iterator[RayHosts]:
    """A head without CPUs and `workers` hosts with `cpus` each."""
    with laboratory(workers + 1) as lab:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RAYREC_"))}
        environment |= SETTINGS | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}",
            "HOME": str(lab.folder),
            "RAY_TMPDIR": str(lab.folder / "tmp"),
            "TMPDIR": str(lab.folder / "tmp"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        cluster = RayHosts(lab, environment)
        cluster.join(cluster.head, 0)
        until = time.monotonic() + 300
        while cluster.ask("/api/jobs/").returncode:
            if time.monotonic() > until:
                pytest.fail(f"the head does not answer\n{lab.logs()}")
            time.sleep(0.5)
        for host in lab.hosts[1:]:
            cluster.join(host, cpus)
        cluster.await_nodes(workers + 1)
        yield cluster
