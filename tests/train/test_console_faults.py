"""A console or a record that fails: real pipes, a full device, a terminal that is not UTF-8. The run does not end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.train.chaos import ROOT
from tests.train.small import raw_config, run_folder, whole_checkpoints, write_all

pytestmark = pytest.mark.timeout(300)

LOST = "rayrec: Could not write a log record"

# Everything that a driver shows and keeps, then what it knows, on stderr.
RECORDS = """
import json, sys
from pathlib import Path
from rayrec.train import RunFolder
from rayrec.train.driver.console import Display
from rayrec.train.driver.recorder import Recorder
from rayrec.train.run.log import Mailbox, handling_records

display, checkpoints = Display(), []
recorder = Recorder(RunFolder(Path(sys.argv[1])), display, on_checkpoint=lambda: checkpoints.append(1))
box = Mailbox()
with handling_records(box.take, recorder, display.tolerance, every_s=0.01):
    box.put({"kind": "begin", "resumed_step": None, "world_size": 2})
    for step in range(3):
        display.say("…")
        box.put({"kind": "event", "event": "odd", "step": step, "message": "…" * 5000})
    box.put({"kind": "eval", "step": 3, "epoch": 0})  # no figures: cannot be shown
    box.put({"kind": "event", "event": "checkpoint", "step": 4, "message": "complete"})
    box.put({"kind": "done", "outcome": {}})
recorder.close()
known = [recorder.state.world_size, recorder.state.step, recorder.state.done is not None, len(checkpoints)]
print(json.dumps(known), file=sys.stderr)
"""


def stdout_of(kind: str) -> int:
    """A file descriptor to write to that fails."""
    if kind == "full disk":
        return os.open("/dev/full", os.O_WRONLY)
    if kind == "closed pipe":
        reading, writing = os.pipe()
        os.close(reading)
        return writing
    return os.open(os.devnull, os.O_WRONLY)


@pytest.mark.parametrize("kind", ["closed pipe", "full disk", "not UTF-8"])
def test_a_console_that_fails_costs_no_record(kind: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii" if kind == "not UTF-8" else "utf-8"}
    out = stdout_of(kind)
    try:
        done = subprocess.run(
            [sys.executable, "-c", RECORDS, str(tmp_path)], stdout=out, stderr=subprocess.PIPE, text=True, env=env
        )
    finally:
        os.close(out)
    told = [line for line in done.stderr.splitlines() if "Exception ignored" not in line]
    assert "[2, 4, true, 1]" in told, done.stderr
    assert sum(LOST in line for line in told) == 1, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]


def test_a_terminal_that_is_not_utf8_shows_what_it_can() -> None:
    words = "from rayrec.train.driver.console import Display; Display().say('starting … R²')"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "starting ? R?\n", "")


MODEL = """
import time
from rayrec.models import DLRM

class Slow(DLRM):
    def forward(self, batch):
        time.sleep(0.01)
        return super().forward(batch)
"""


def command(folder: Path, **changes: Any) -> tuple[list[str], dict[str, str], Any]:
    """`rayrec train` for a small run."""
    write_all(folder, rows=600)
    (folder / "slow_model.py").write_text(MODEL)
    model = {"factory": "slow_model:Slow", "args": {"dense_arch": [16, 8], "over_arch": [16, 1]}}
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(raw_config(folder, model=model, **changes)))
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    return [sys.executable, "-m", "rayrec.cli", "train", str(path)], env, run_folder(folder / "runs" / "small")


def test_a_run_whose_console_is_gone_is_trained_to_its_end(tmp_path: Path) -> None:
    """`rayrec train … | head -1`"""
    words, env, run = command(tmp_path)
    head = subprocess.Popen(["head", "-1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert head.stdin is not None and head.stdout is not None
    out = os.dup(head.stdin.fileno())
    head.stdin.close()
    try:
        done = subprocess.run(words, cwd=tmp_path, env=env, stdout=out, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(out)
    assert head.stdout.read().startswith("run small: training on 600 rows")
    head.stdout.close()
    head.wait(10)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(LOST) == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert json.loads(run.result.read_text())["steps"] == 20
    assert run.report.exists()
    kept = [(record["kind"], record["step"]) for record in run.read_metrics() if record["kind"] != "event"]
    assert ("train", 20) in kept and ("eval", 20) in kept


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_ctrl_c_with_tee_beside_takes_a_last_checkpoint(workers: int, tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole process group, and so `tee` ends first."""
    changes = {"trainer__num_workers": workers, "trainer__epochs": 500, "trainer__checkpoint_every": 10_000}
    words, env, run = command(tmp_path, **changes)
    log = tmp_path / "log"
    tee = subprocess.Popen(
        ["tee", str(log)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=tmp_path, process_group=0
    )
    assert tee.stdin is not None
    # stderr as well, as in `rayrec train … |& tee log`
    train = subprocess.Popen(
        words, cwd=tmp_path, env=env, stdout=tee.stdin, stderr=subprocess.STDOUT, process_group=tee.pid
    )
    tee.stdin.close()
    try:
        until = time.monotonic() + 120
        while not run.metrics.exists() or '"kind": "train"' not in run.metrics.read_text():
            assert train.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        os.killpg(tee.pid, signal.SIGINT)
        status = train.wait(200)
    finally:
        train.kill()
        tee.kill()
        train.wait()
        tee.wait()
    assert status == 130, log.read_text()
    (end,) = [record for record in run.read_metrics() if record.get("event") == "interrupted"]
    assert "with a complete checkpoint" in end["message"]
    assert len(whole_checkpoints(run.path)) == 1
