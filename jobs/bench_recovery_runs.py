"""How long a run takes to begin, to stop, and to go on after it has lost or got workers: real runs on this machine.

`data/movielens/train.yaml`, two workers, every step logged; each figure ends with a step that was trained.

    start_s    from the command to the first step
    sigterm_s  from SIGTERM to the command's end, with a checkpoint of the last step
    kill_s     from the SIGKILL of a worker to the first step of the new group, on as many workers
    shrink_s   from the loss of a node to the first step on the one that is left (`num_workers: [1, 2]`)
    grow_s     from the start of a node to the first step on both; Ray counts nodes every 20 s at most
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 180.0
Record = dict[str, Any]

# Starts and stops nodes as it is told on its standard input, and trains on them.
ELASTIC = """
import os, sys, threading
import ray
from ray.cluster_utils import Cluster
from rayrec.train import Trainer
from rayrec.train.config.file import load_config

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
trainer = Trainer(load_config(sys.argv[1], sys.argv[2:]))
threading.Thread(target=trainer.fit, daemon=True).start()
for word in sys.stdin:
    if word.strip() == "remove":
        cluster.remove_node(nodes[1], allow_graceful=False)
    elif word.strip() == "add":
        cluster.add_node(num_cpus=1)
    else:
        break
for node in [*cluster.worker_nodes, cluster.head_node]:  # in mid-run: Ray has no gentle way to end a driver's cluster
    node.kill_all_processes(check_alive=False, allow_graceful=False)
os._exit(0)
"""


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Fields of whole runs: medians over `args.rounds` of them."""
    rounds = [{**_one_run(args.folder), **_elastic_run(args.folder)} for _ in range(args.rounds)]
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def _settings(folder: str, **more: object) -> list[str]:
    settings = {"storage.path": folder, "name": "run", "trainer.log_every": 1, "trainer.epochs": 500, **more}
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


class _Run:
    """The records of a run as they are written."""

    def __init__(self, folder: str) -> None:
        self._file = Path(folder) / "run" / "metrics.jsonl"

    def records(self) -> list[Record]:
        if not self._file.exists():
            return []
        return [json.loads(line) for line in self._file.read_text().splitlines() if line.endswith("}")]

    def wait_for(self, what: Callable[[Record], bool]) -> Record:
        """The first record that is so, once it is there."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            for record in self.records():
                if what(record):
                    return record
            time.sleep(0.05)
        raise SystemExit(f"no such record within {PATIENCE_S:.0f} s; the last one: {self.records()[-1:]}")

    def step_after(self, event: str) -> float:
        """When the first step after an event was trained."""
        when = self.wait_for(lambda record: record.get("event") == event)["time"]
        return float(self.wait_for(lambda record: record["kind"] == "train" and record["time"] > when)["time"])

    def trains(self) -> float:
        """When the first step was trained."""
        return float(self.wait_for(lambda record: record["kind"] == "train")["time"])


def _one_run(where: str | None) -> dict[str, float]:
    """A run from the command line: its start, a killed worker, SIGTERM."""
    with tempfile.TemporaryDirectory(prefix="rayrec-recovery-", dir=where) as folder:
        run, began = _Run(folder), time.time()
        words = [sys.executable, "-m", "rayrec.cli", "train", "data/movielens/train.yaml", *_settings(folder)]
        with open(Path(folder) / "log", "wb") as log:
            process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
        try:
            found = {"start_s": run.trains() - began}
            run.wait_for(lambda record: record.get("step", 0) >= 150)
            killed = time.time()
            os.kill(_a_worker(process.pid), signal.SIGKILL)
            found["kill_s"] = run.step_after("recovered") - killed
            stopped = time.time()
            process.send_signal(signal.SIGTERM)
            status = process.wait(PATIENCE_S)
            found["sigterm_s"] = time.time() - stopped
            if status != 128 + signal.SIGTERM:
                raise SystemExit(f"SIGTERM ended the run with status {status}, not 143")
        except BaseException:
            print((Path(folder) / "log").read_text()[-4000:], file=sys.stderr)
            process.kill()
            raise
        return found


def _a_worker(driver: int) -> int:
    """A process of the run's worker group."""
    parents, words = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            words[int(folder.name)] = (folder / "cmdline").read_bytes()
    for process, command in words.items():
        above = process
        while above in parents and above != driver:
            above = parents[above]
        if above == driver and b"RayTrainWorker" in command:
            return process
    raise SystemExit("no worker process found")


def _elastic_run(where: str | None) -> dict[str, float]:
    """A run on a cluster of two nodes, of which one is lost, and another comes."""
    with tempfile.TemporaryDirectory(prefix="rayrec-recovery-", dir=where) as folder:
        run = _Run(folder)
        more = {"trainer.num_workers": "[1, 2]", "trainer.cpus_per_worker": 1, "data.read.cpus_per_read": 0}
        settings = _settings(folder, **more)[1::2]
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", ELASTIC, "data/movielens/train.yaml", *settings],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdin is not None
        try:
            run.trains()
            run.wait_for(lambda record: record.get("step", 0) >= 150)
            lost = time.time()
            print("remove", file=process.stdin, flush=True)
            found = {"shrink_s": run.step_after("recovered") - lost}
            came = time.time()
            print("add", file=process.stdin, flush=True)
            found["grow_s"] = run.step_after("resized") - came
            print("end", file=process.stdin, flush=True)
            process.wait(PATIENCE_S)
        finally:
            process.kill()
        return found
