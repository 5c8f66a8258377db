"""`ray job submit` to a real cluster of one node, started and ended here."""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.train.small import raw_config, write_all

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
RAY = Path(sys.executable).parent / "ray"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, outside the range from which the system hands them out meanwhile."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20_000, 32_000), 1000):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    pytest.fail("no free ports")


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment in which `ray job submit` finds a fresh head node of 4 CPUs."""
    port, dashboard, agent, agent_grpc, client = free_ports(5)
    temporary = Path(tempfile.mkdtemp(prefix="rr", dir="/tmp"))  # Ray's socket paths must be short
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "PATH": f"{RAY.parent}{os.pathsep}{environment['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_TMPDIR": str(temporary),
        "TMPDIR": str(temporary),  # the dashboard's fork server leaves its socket's folder when it is killed
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_METRICS_ENABLED": "0",
        "PYTHONWARNINGS": "ignore",
    }
    command = [
        str(RAY), "start", "--head", "--block", "--num-cpus=4", f"--port={port}", f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}",
        f"--ray-client-server-port={client}", "--disable-usage-stats", f"--temp-dir={temporary}",
        "--include-dashboard=true",
    ]  # fmt: skip
    log = temporary / "head.log"
    with open(log, "w", encoding="utf-8") as output:
        head = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=temporary
        )
    try:
        environment["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{dashboard}"
        for address in (
            f"{dashboard}/api/jobs/",
            f"{agent}/api/local_raylet_healthz",
        ):  # what takes a job, and starts it
            wait_for_answer(f"http://127.0.0.1:{address}", environment["RAY_AUTH_TOKEN"], head, log)
        yield environment
    finally:
        end_group(head)
        shutil.rmtree(temporary, ignore_errors=True)


def wait_for_answer(address: str, token: str, head: subprocess.Popen[bytes], log: Path) -> None:
    """A command of Ray's that asks would import Ray for seconds, each time."""
    asked = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
    until = time.monotonic() + 180
    while time.monotonic() < until:
        assert head.poll() is None, log.read_text()
        with suppress(OSError), urllib.request.urlopen(asked, timeout=60):
            return
        time.sleep(0.2)
    pytest.fail(f"no answer from {address}:\n{log.read_text()}")


def end_group(head: subprocess.Popen[bytes]) -> None:
    """End the head node and all it started: they are in process groups below its session."""
    session = os.getsid(head.pid) if head.poll() is None else head.pid
    members = [pid for pid in processes() if sid(pid) == session]
    head.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        head.wait(3)
    for pid in members:
        if sid(pid) == session:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    head.wait(10)


def processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def sid(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


Job = subprocess.Popen[str]


def submitted(environment: dict[str, str], *arguments: str) -> Job:
    command = [str(RAY), "job", "submit", "--working-dir", ".", "--", "python", "jobs/train.py", *arguments]
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **output)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def jobs(cluster: dict[str, str], folder: Path) -> Iterator[tuple[Job, Job]]:
    """One that trains and one that cannot run, which run at the same time."""
    options = ["--set", f"storage.path={folder}", "--set", "trainer.epochs=1"]
    trains = submitted(cluster, "--config", "data/movielens/train.yaml", *options)
    write_all(folder, rows=50)
    config = folder / "train.yaml"
    config.write_text(yaml.safe_dump(raw_config(folder)))
    cannot_run = submitted(cluster, "--config", str(config), "--set", "data.train=not/uploaded")
    yield trains, cannot_run
    for job in (trains, cannot_run):
        if job.poll() is None:
            job.kill()
            job.communicate()


def test_the_documented_command_trains_movielens(jobs: tuple[Job, Job], folder: Path) -> None:
    """Git ignores the Parquet files, so the job's copy comes without them and prepares its own."""
    said, _ = jobs[0].communicate(timeout=300)
    assert jobs[0].returncode == 0, said
    for part in ("succeeded", "sharding plan", "evaluation after epoch 1", "evaluation AUC"):
        assert part in said
    folder /= "movielens"
    assert {path.name for path in folder.iterdir() if path.name != ".lock"} == {
        "config.yaml", "given.yaml", "run_id", "plan.json", "metrics.jsonl", "footers.arrow",
        "checkpoints", "tensorboard", "report.html", "result.json",
    }  # fmt: skip
    result = json.loads((folder / "result.json").read_text())
    assert (result["world_size"], result["train"]["samples"], result["eval"]["samples"]) == (2, 80_000, 20_000)
    assert result["eval"]["auc"] > 0.70


def test_a_job_that_cannot_run_says_why(jobs: tuple[Job, Job]) -> None:
    text, _ = jobs[1].communicate(timeout=300)
    assert jobs[1].returncode != 0
    assert "data.train: not/uploaded is not in the job's copy of the working folder" in text, text
    assert "--root" in text
