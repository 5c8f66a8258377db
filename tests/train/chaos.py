"""A training run under supervision, on a Ray cluster of its own, and the faults that can be done to it."""

from __future__ import annotations

import errno
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from rayrec.checkpoint import CheckpointStore
from tests.s3 import Door
from tests.train.small import run_folder

ROOT = Path(__file__).resolve().parents[2]
MARK = "RAYREC_CHAOS"
AWAY_S = 20.0
RESTARTS = ("recovered", "resumed", "resized")
Record = dict[str, Any]

# A head and two nodes; starts and loses nodes as it is told on its standard input.
CLUSTER = """
import subprocess
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
print(cluster.address, flush=True)
for word in sys.stdin:
    if word.strip() == "remove":
        cluster.remove_node(nodes.pop(), allow_graceful=False)
    elif word.strip() == "add":
        nodes.append(cluster.add_node(num_cpus=1))
    elif word.strip() == "drain":
        drain = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address, "--node-id",
                 nodes[-1].node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "reclaimed",
                 "--deadline-remaining-seconds", "120"]
        subprocess.run(drain, check=True, stdout=subprocess.DEVNULL)
    print("done", flush=True)
cluster.shutdown()
"""


def marked(mark: str) -> dict[int, str]:
    """Command lines of the processes that were started, directly or not, with this mark in their environment."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


class Supervised:
    """The command `rayrec train`, which is started again whenever a fault has ended it.

    Args:
        config: its config file, of a run that is stored below `storage`.
        log: what the command says.
        patience_s: in all; a wait that goes on for longer fails.
    """

    more_env: ClassVar[dict[str, str]] = {}

    def __init__(self, config: Path, run: Path, log: Path, door: Door | None, patience_s: float) -> None:
        self.config, self.run, self.log, self.door = config, run_folder(run), log, door
        self.until = time.monotonic() + patience_s
        self.mark = secrets.token_hex(8)
        self.statuses: list[int] = []

    @contextmanager
    def on_cluster(self) -> Iterator[None]:
        """The cluster that it runs on, and its first start."""
        with tempfile.TemporaryDirectory(prefix="rr", dir="/tmp") as temporary:  # Ray's socket paths must be short
            env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
            own = {"PYTHONPATH": str(ROOT), "RAY_TMPDIR": temporary, "PYTHONWARNINGS": "ignore", MARK: self.mark}
            quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_METRICS_ENABLED": "0"}
            # Ray would kill processes of this run where the machine's memory is short, whoever took it.
            self.env = {**env, **own, **quiet, "RAY_memory_monitor_refresh_ms": "0", **self.more_env}
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._cluster = subprocess.Popen([sys.executable, "-c", CLUSTER], env=self.env, text=True, **pipes)
            try:
                self.env["RAY_ADDRESS"] = self._answer()
                self.launch()
                yield
            finally:
                if self.command.poll() is None:
                    self.command.kill()
                assert self._cluster.stdin is not None and self._cluster.stdout is not None
                self._cluster.stdin.close()
                with suppress(subprocess.TimeoutExpired):
                    self._cluster.wait(30)
                self._cluster.kill()
                self._cluster.wait()
                self._cluster.stdout.close()

    def tell_cluster(self, word: str) -> None:
        assert self._cluster.stdin is not None
        print(word, file=self._cluster.stdin, flush=True)
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self._cluster.stdout is not None
        return self._cluster.stdout.readline().strip()

    def launch(self) -> None:
        words = [sys.executable, "-m", "rayrec.cli", "train", str(self.config)]
        with open(self.log, "a", encoding="utf-8") as log:
            self.command = subprocess.Popen(words, env=self.env, stdout=log, stderr=log)

    def follow(self, config: Path, run: Path) -> None:
        """Another run on the same cluster, once this one has ended."""
        self.config, self.run = config, run_folder(run)
        self.launch()

    def ended(self) -> int:
        """The command's status, once it has ended."""
        self.statuses.append(self.command.wait(max(1.0, self.until - time.monotonic())))
        return self.statuses[-1]

    def processes(self, name: str) -> list[int]:
        """Processes of this Ray by what Ray calls them."""
        return sorted(pid for pid, words in marked(self.mark).items() if words.startswith(f"ray::{name}"))

    def records(self) -> list[Record]:
        return list(self.run.read_metrics())

    def event(self, names: tuple[str, ...], since: float) -> Record:
        """The first event of one of these names after a time; waits for it."""
        while True:
            for record in self.records():
                if record.get("event") in names and record["time"] > since:
                    return record
            self.must_go_on(f"an event of {names}")
            time.sleep(0.1)

    def must_go_on(self, waiting_for: str) -> None:
        """Fail where the command has ended, or patience has."""
        assert self.command.poll() is None, f"the command ended with {self.command.poll()}, waiting for {waiting_for}"
        assert time.monotonic() < self.until, f"waited in vain for {waiting_for}"

    def said(self) -> str:
        """What the command has said so far, in one line."""
        return " ".join(self.log.read_text(encoding="utf-8", errors="replace").split())

    def restarted(self, since: float, names: tuple[str, ...] = RESTARTS) -> str:
        """What is told of a new worker group, once it has made a checkpoint."""
        began = self.event(names, since)
        self.event(("checkpoint",), began["time"])
        return str(began["message"])


def kill(run: Supervised, name: str, number: int) -> None:
    os.kill(random.choice(run.processes(name)), number)


def worker_killed(run: Supervised, now: float) -> None:
    kill(run, "RayTrainWorker", signal.SIGKILL)
    run.restarted(now)


def driver_killed(run: Supervised, now: float) -> None:
    run.command.kill()
    assert run.ended() == -signal.SIGKILL
    run.launch()
    run.restarted(now)


def stopped_by_sigterm(run: Supervised, now: float) -> None:
    run.command.send_signal(signal.SIGTERM)
    assert run.ended() == 128 + signal.SIGTERM
    run.launch()
    run.restarted(now)


def node_removed(run: Supervised, now: float) -> None:
    run.tell_cluster("remove")
    assert "with 1 instead of 2 workers" in run.restarted(now)


def node_added(run: Supervised, now: float) -> None:
    run.tell_cluster("add")
    grown(run, now)


def grown(run: Supervised, since: float) -> None:
    """Wait for a group of two workers. On a busy machine Ray may not start both in time: the run goes on with one, and
    tries again later."""
    event = run.event(("resized",), since)
    while "with 2 instead of 1 workers" not in event["message"]:
        event = run.event(("resized",), event["time"] + 0.001)
    run.event(("checkpoint",), event["time"])


def mailbox_killed(run: Supervised, now: float) -> None:
    kill(run, "Mailbox", signal.SIGKILL)
    run.event(("checkpoint",), time.time() + 1.0)


def checkpoint_damaged(run: Supervised, now: float) -> None:
    """Bytes of the newest one are flipped, and the run must go on from it."""
    run.event(("checkpoint",), now)
    newest = CheckpointStore(run.run.checkpoints).latest()
    assert newest is not None
    path = max(Path(newest.path).glob("data-*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))
    kill(run, "RayTrainWorker", signal.SIGKILL)
    run.restarted(now)
    run.event(("damaged",), now)


def disk_full(run: Supervised, now: float) -> None:
    """Until a checkpoint has failed; also metrics cannot be written meanwhile, so that it is told on the screen."""
    filler, said_before = run.run.path / "filler", len(run.said())
    with open(filler, "wb", buffering=0) as file:
        while "Earlier ones are intact." not in run.said()[said_before:]:
            run.must_go_on("a checkpoint that failed")
            try:
                while file.write(b"\0" * 4096):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC
            time.sleep(0.02)
    filler.unlink()
    run.event(("save_failed",), now)
    run.event(("checkpoint",), time.time())


def store_away(run: Supervised, now: float) -> None:
    assert run.door is not None
    run.door.shut()
    time.sleep(AWAY_S)
    run.door.reopen()
    run.event(("checkpoint",), time.time() + 1.0)


def rank_frozen(run: Supervised, now: float) -> None:
    """A rank that waits for it tells, or, where there is none, Ray's controller notices."""
    kill(run, "RayTrainWorker", signal.SIGSTOP)
    run.restarted(now)


def node_preempted(run: Supervised, now: float) -> None:
    """Ray announces that a node goes; the run is off it, with a checkpoint, before it does, and takes the next one."""
    run.tell_cluster("drain")
    left = run.restarted(now, ("resized",))
    assert left.startswith("Ray removes node") and "with 1 instead of 2 workers" in left
    gone = time.time()
    run.tell_cluster("remove")
    run.event(("checkpoint",), gone + 1.0)
    assert not [record for record in run.records() if record.get("event") == "recovered" and record["time"] > now]
    run.tell_cluster("add")
    grown(run, gone)


def second_driver(run: Supervised, now: float) -> None:
    """The same command again, beside the one that trains: refused at its start, and the first one goes on."""
    words = [sys.executable, "-m", "rayrec.cli", "train", str(run.config)]
    second = subprocess.run(words, env=run.env, capture_output=True, text=True, timeout=120)
    assert second.returncode == 1 and "is in use by a run" in second.stderr + second.stdout, second
    run.event(("checkpoint",), time.time())


def storage_read_only(run: Supervised, now: float) -> None:
    """Checkpoints cannot be written for a while, and a worker is lost meanwhile: the new ones wait for the storage."""
    place = str(run.run.checkpoints)
    subprocess.run(["mount", "--bind", place, place], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
        run.event(("save_failed",), now)
        kill(run, "RayTrainWorker", signal.SIGKILL)
        time.sleep(AWAY_S / 2)
        run.must_go_on("the storage")
    finally:
        subprocess.run(["umount", "-l", place], check=True)
    run.restarted(now)


FAULTS: tuple[Callable[[Supervised, float], None], ...] = (
    worker_killed,
    driver_killed,
    stopped_by_sigterm,
    node_removed,
    node_added,
    mailbox_killed,
    checkpoint_damaged,
    disk_full,
    store_away,
    rank_frozen,
    node_preempted,
    second_driver,
    storage_read_only,
)
