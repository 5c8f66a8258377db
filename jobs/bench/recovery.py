"""Times how fast a run starts, stops, and resumes after it loses or gains workers: real runs on this machine.

    python jobs/bench/recovery.py --json

It trains `data/movielens/train.yaml` with two workers and logs every step. Each time ends with a trained step:

    start_s    from the command to the first step
    sigterm_s  from SIGTERM to the exit, with a checkpoint of the last step
    kill_s     from the SIGKILL of a worker to the first step of the new worker group
    shrink_s   from the loss of a node to the first step on the remaining one (`num_workers: [1, 2]`)
    grow_s     from the start of a node to the first step on both
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

from harness import ROOT, arguments, descendants, machine, print_json, require

PATIENCE_S = 180.0
GOALS_S = {"start_s": 12, "kill_s": 20, "shrink_s": 30, "grow_s": 30}
Record = dict[str, Any]

# Trains on two nodes; removes and adds one on command from standard input.
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
for node in [*cluster.worker_nodes, cluster.head_node]:  # Ray cannot end a cluster whose driver still trains
    node.kill_all_processes(check_alive=False, allow_graceful=False)
os._exit(0)
"""


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Medians over `args.rounds` pairs of runs."""
    rounds = [{**_one_run(args.folder), **_elastic_run(args.folder)} for _ in range(args.rounds)]
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def _settings(folder: str, **more: object) -> list[str]:
    settings = {"storage.path": folder, "name": "run", "trainer.log_every": 1, "trainer.epochs": 500, **more}
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


class _Run:
    """The records of `metrics.jsonl` as the run writes them."""

    def __init__(self, folder: str) -> None:
        self._file = Path(folder) / "run" / "metrics.jsonl"

    def records(self) -> list[Record]:
        if not self._file.exists():
            return []
        return [json.loads(line) for line in self._file.read_text().splitlines() if line.endswith("}")]

    def wait_for(self, matches: Callable[[Record], bool]) -> Record:
        """Waits for the first record that matches."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            for record in self.records():
                if matches(record):
                    return record
            time.sleep(0.05)
        raise SystemExit(f"no matching record within {PATIENCE_S:.0f} s; the last record: {self.records()[-1:]}")

    def step_after(self, event: str) -> float:
        """The time of the first step after an event."""
        when = self.wait_for(lambda record: record.get("event") == event)["time"]
        return float(self.wait_for(lambda record: record["kind"] == "train" and record["time"] > when)["time"])

    def trains(self) -> float:
        """The time of the first step."""
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
    """The id of a worker process of the run."""
    for process in descendants(driver):
        with suppress(OSError):  # the process has ended
            if b"RayTrainWorker" in Path(f"/proc/{process}/cmdline").read_bytes():
                return process
    raise SystemExit("no worker process found")


def _elastic_run(where: str | None) -> dict[str, float]:
    """A run on a cluster of two nodes: one is lost, then another is added."""
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


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind; the result is the median")
    parser.add_argument("--folder", help="folder for the runs; default: a temporary folder")
    args = parser.parse_args()
    require((ROOT / "data/movielens/parquet").exists(), "needs MovieLens in data/movielens/parquet: run make data")
    print(machine(), flush=True)
    results = measure(args)
    for name, seconds in results.items():
        goal = GOALS_S.get(name)
        print(f"{name:12} {seconds:6.1f}" + (f"  goal ≤ {goal}{', missed' * (seconds > goal)}" if goal else ""))
    print_json(args, results)


if __name__ == "__main__":
    main()
