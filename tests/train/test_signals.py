"""Ctrl-C, SIGTERM and a closed terminal, as a user or Kubernetes sends them, to real runs on Ray: while they start,
save and evaluate."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.train.chaos import MARK, ROOT, marked
from tests.train.small import raw_config, run_folder, whole_checkpoints, write_all

pytestmark = [pytest.mark.long, pytest.mark.timeout(800)]

MODEL = """
import time
from pathlib import Path
from rayrec.models import DLRM

class Slow(DLRM):
    def __init__(self, mark, **arguments):
        super().__init__(**arguments)
        self.mark = Path(mark)

    def forward(self, batch):
        if not self.training:
            self.mark.touch()
        time.sleep(0.05)
        return super().forward(batch)
"""


class Command:
    """`rayrec train` in a process of its own, on a Ray of its own."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        write_all(folder, rows=2000)
        (folder / "slow_model.py").write_text(MODEL)
        args = {"mark": str(folder / "evaluates"), "dense_arch": [16, 8], "over_arch": [16, 1]}
        model = {"factory": "slow_model:Slow", "args": args}
        raw = raw_config(folder, model=model, trainer__num_workers=2, trainer__epochs=50, **changes)
        self.folder, self.config = folder, folder / "c.yaml"
        self.config.write_text(yaml.safe_dump(raw))
        self.run, self.mark = run_folder(folder / "runs" / "small"), secrets.token_hex(8)

    def start(self, *more: str) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        env |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", MARK: self.mark}
        self.log = self.folder / "log"
        with open(self.log, "w", encoding="utf-8") as log:
            words = [sys.executable, "-m", "rayrec.cli", "train", str(self.config), *more]
            return subprocess.Popen(
                words, cwd=self.folder, env=env, stdout=log, stderr=log, text=True, start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            )  # fmt: skip


def early(command: Command) -> bool:
    """Ray is being started while the command imports: an exception that a signal raises in a fork would be lost."""
    return any("gcs_server" in words for words in marked(command.mark).values())


def starting_workers(command: Command) -> bool:
    return "Starting 2 workers" in command.log.read_text()


def creating_workers(command: Command) -> bool:
    return any("RayTrainWorker" in words for words in marked(command.mark).values())


def saving(command: Command) -> bool:
    """A checkpoint is being written."""
    return any(not (path / "manifest.json").exists() for path in Path(command.run.checkpoints).glob("step_*"))


def evaluating(command: Command) -> bool:
    return (command.folder / "evaluates").exists()


def training(command: Command) -> bool:
    return "epoch 1  step" in command.log.read_text()


def wait_for(command: Command, process: subprocess.Popen[str], when: Callable[[Command], bool]) -> None:
    until = time.monotonic() + 240
    while not when(command):
        assert process.poll() is None and time.monotonic() < until, command.log.read_text()
        time.sleep(0.005)


def left_after(command: Command, seconds: float) -> dict[int, str]:
    """Processes that the command started and that still run."""
    until = time.monotonic() + seconds
    while (left := marked(command.mark)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


LARGE = [
    {"name": "user", "rows": 2_000_000, "dim": 8, "features": ["user"]},
    {"name": "item", "rows": 80, "dim": 8, "features": ["item"]},
    {"name": "tag", "rows": 7, "dim": 8, "features": ["tags"]},
]


@pytest.mark.parametrize(
    ("when", "number", "saved"),
    [
        (early, signal.SIGINT, False),
        (early, signal.SIGTERM, False),
        (starting_workers, signal.SIGTERM, False),
        (saving, signal.SIGTERM, True),
        (evaluating, signal.SIGHUP, True),
    ],
)
def test_a_stop_ends_the_run_whole_and_leaves_nothing_running(
    tmp_path: Path, when: Callable[[Command], bool], number: signal.Signals, saved: bool
) -> None:
    command = Command(tmp_path, tables=LARGE, storage__background=False)
    process = command.start()
    try:
        wait_for(command, process, when)
        running = marked(command.mark).values()
        if number == signal.SIGHUP:  # which reaches all processes of a terminal
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        status = process.wait(200)
    finally:
        process.kill()
        process.wait()
    if saved:
        unneeded = ("dashboard.py", "monitor.py", "TrainController")
        assert not [words for words in running if any(name in words for name in unneeded)], running
    told = command.log.read_text()
    assert status == 128 + number, told
    assert "Traceback" not in told and "Fatal" not in told, told
    assert not left_after(command, 60)
    if saved:
        assert "with a complete checkpoint" in told and "run the same command again to resume from it" in told
        assert whole_checkpoints(command.run.path)
        end = [record for record in command.run.read_metrics() if record.get("event") == "interrupted"]
        assert len(end) == 1
    again = command.start("--set", "trainer.num_workers=0", "--set", "trainer.epochs=1", "--set", "trainer.eval_rows=1")
    assert again.wait(300) == 0, command.log.read_text()
    assert json.loads(command.run.result.read_text())["steps"] >= 32


@pytest.mark.parametrize("when", [creating_workers, training])
def test_a_second_ctrl_c_ends_the_command_and_its_ray(tmp_path: Path, when: Callable[[Command], bool]) -> None:
    """The run is abandoned while Ray Train's controller still works in a thread, which may wait for a worker."""
    command = Command(tmp_path)
    process = command.start()
    try:
        wait_for(command, process, when)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, command.log.read_text()
    finally:
        process.kill()
        process.wait()
    told = command.log.read_text()
    assert "Exited on the second interrupt" in told
    assert not any(word in told for word in ("Traceback", "Fatal", "WARNING", "ERROR")), told
    assert not left_after(command, 60)
