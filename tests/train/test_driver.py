"""What the driver makes of records: files, text on a terminal and elsewhere, and reasons of failures."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError
from rich.console import Console

from rayrec.train import Display, Interrupted
from rayrec.train.driver import signals as signals_module
from rayrec.train.driver.failures import failure_reason, too_often
from rayrec.train.driver.recorder import Lines, Recorder
from rayrec.train.driver.signals import StopSignals, handling, run_in_background
from rayrec.train.run.folder import RunFolder
from rayrec.train.run.log import Mailbox, Record, handling_records
from rayrec.train.terminal import memory_lines, plan_table
from tests.train.small import Heard

TRAIN = {"kind": "train", "epoch": 0, "samples": 64, "loss": 0.5, "ne": 0.9, "auc": None, "samples_per_second": 1234.5,
         "data_wait_fraction": 0.1, "lr": {"dense": 0.1, "sparse": 0.1}}  # fmt: skip
EVAL = {"kind": "eval", "epoch": 0, "auc": 0.75, "ne": 0.8, "logloss": 0.6, "calibration": 1.0, "samples": 10}


def recorded(folder: Path, records: list[Record], terminal: bool = False) -> tuple[Recorder, str, list[Record]]:
    """Send records through a mailbox to a recorder: (recorder, what is shown, lines of metrics.jsonl)."""
    out = io.StringIO()
    recorder = Recorder(RunFolder(folder), Display(Console(file=out, force_terminal=terminal, width=150)))
    sink = Heard(recorder)
    for record in records:
        if record["kind"] == "begin":
            sink.begin(leader=True)
        sink.put(record)
    recorder.close()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return recorder, out.getvalue(), lines


def begin(step: int | None) -> Record:
    return {"kind": "begin", "resumed_step": step, "world_size": 2}


def test_a_recovery_is_told_once_with_its_reason(tmp_path: Path) -> None:
    recorder, text, lines = recorded(
        tmp_path,
        [
            begin(None),
            {**TRAIN, "step": 10},
            {"kind": "progress", "step": 17, "epoch": 0, "epochs": 1, "total_steps": 40},
            {"kind": "failure", "reason": "worker 1 was lost"},
            {"kind": "failure", "reason": "worker 1 was lost"},
            begin(10),
            {**TRAIN, "step": 20},
            {"kind": "failure", "reason": "worker 0 was lost"},
            begin(None),
            {"kind": "done", "outcome": {}},
        ],
    )
    message = "worker group failed at step 17 (worker 1 was lost); resumed from the checkpoint of step 10"
    again = "worker group failed at step 20 (worker 0 was lost); restarted at step 0"
    assert [line["message"] for line in lines if line["kind"] == "event"] == [message, again]
    assert message in text
    assert (recorder.recoveries, recorder.failures) == (2, [])
    assert [(line["kind"], line["attempt"]) for line in lines] == [
        ("train", 1), ("event", 2), ("train", 2), ("event", 3)
    ]  # fmt: skip


def test_the_first_fatal_record_counts_and_no_attempt_after_it(tmp_path: Path) -> None:
    box = Mailbox(previous_attempts=3)
    assert box.begin(leader=True) is False
    assert box.begin(leader=False) is False
    box.put({"kind": "fatal", "rank": 1, "error": "first"})
    box.put({"kind": "fatal", "rank": 0, "error": "second"})
    assert box.num_failed_ranks() == 2
    assert box.begin(leader=True) is True
    assert [record["attempt"] for record in box.take()] == [4, 4]
    assert box.take() == []
    fatal = [{"kind": "fatal", "rank": rank, "error": text} for rank, text in ((1, "first"), (0, "second"))]
    (tmp_path / "metrics.jsonl").touch()
    assert recorded(tmp_path, fatal)[0].state.fatal == "first"


def test_lines_stay_whole_where_the_disk_is_full_or_a_driver_was_killed(tmp_path: Path) -> None:
    out, path = io.StringIO(), tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n{"half')
    lines = Lines(path, Display(Console(file=out, width=200)))
    lines.add('{"b": 2}')
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 4, hard))
    try:
        lines.add('{"c": 3}')
        lines.add('{"d": 4}')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert out.getvalue().count("The run continues.") == 1
    lines.close()
    assert list(RunFolder(tmp_path).read_metrics()) == [{"a": 1}, {"b": 2}, {"c": 3}, {"d": 4}]


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_on_a_terminal_and_in_a_file(tmp_path: Path, terminal: bool) -> None:
    steps = [{"kind": "progress", "step": 64, "epoch": 0, "epochs": 2, "total_steps": 128}, {**TRAIN, "step": 64}]
    plan = {"kind": "plan", "plan": {"version": 1, "plan": {}, "memory": []}}
    _, text, _ = recorded(tmp_path, [begin(None), plan, *steps, {**EVAL, "step": 64}], terminal)
    for part in ("1,234 samples/s  loss 0.5000  NE 0.9000", "AUC 0.7500", "on 10 rows"):
        assert part in text
    assert ("epoch 1/2" in text) is terminal
    assert ("epoch 1  step 64" in text) is not terminal


def test_what_is_said_at_the_end() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=150))
    scores = {"auc": 0.75, "ne": 0.8, "logloss": 0.6, "calibration": 1.0, "samples": 1000}
    display.evaluation({**scores, "epoch": 1, "step": 32, "skipped": 7})
    display.evaluation({**scores, "epoch": 1, "step": 32, "tasks": {"buy": {**scores, "gauc": 0.7}, "like": scores}})
    display.evaluation({**scores, "epoch": 1, "step": 40, "partial": True})
    figures = {"epochs": 2, "steps": 3200, "world_size": 4, "samples_per_second": 12345.6}
    result = {**figures, "train": {"data_wait_fraction": 0.0521}, "eval": scores}
    display.summary(result, {"report": "runs/a/report.html"})
    display.summary({**result, "eval": {"tasks": {"buy": scores}}}, {})
    display.summary({**result, "eval": None}, {})
    display.close()
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "evaluation after epoch 2 (step 32): AUC 0.7500  NE 0.8000  logloss 0.6000  calibration 1.000  "
        "on 1,000 rows, 7 rows skipped",
        "evaluation after epoch 2 (step 32):",
        "  buy   AUC 0.7500  GAUC 0.7000  NE 0.8000  logloss 0.6000  calibration 1.000  on 1,000 rows",
        "  like  AUC 0.7500  NE 0.8000  logloss 0.6000  calibration 1.000  on 1,000 rows",
        "evaluation at step 40 (in epoch 2, on the first rows): AUC 0.7500  NE 0.8000  logloss 0.6000  "
        "calibration 1.000  on 1,000 rows",
        "evaluation AUC   0.7500",
        "evaluation NE    0.8000",
        "epochs, steps    2, 3,200",
        "workers          4",
        "samples/s        12,346",
        "waited for data  5.2% of the training time",
        "report           runs/a/report.html",
        "evaluation AUC, buy  0.7500",
        "evaluation NE, buy   0.8000",
        "epochs, steps        2, 3,200",
        "workers              4",
        "samples/s            12,346",
        "waited for data      5.2% of the training time",
        "evaluation AUC   –",
        "evaluation NE    –",
        "epochs, steps    2, 3,200",
        "workers          4",
        "samples/s        12,346",
        "waited for data  5.2% of the training time",
    ]


def test_the_plan_table_counts_what_it_leaves_out() -> None:
    shard = {"shard_offsets": [0, 0], "shard_sizes": [500, 8], "placement": "rank:0/cpu"}
    other = {"shard_offsets": [500, 0], "shard_sizes": [400, 8], "placement": "rank:3/cpu"}
    sharding = {"sharding_type": "row_wise", "compute_kernel": "fused", "ranks": [0, 1, 2, 5], "shards": [shard, other]}
    plan: dict[str, Any] = {"plan": {"bags": {f"table {i}": sharding for i in range(7)}}}
    out = io.StringIO()
    Console(file=out, width=150).print(plan_table(plan, limit=3))
    text = out.getvalue()
    for part in ("table 2", "900 × 8", "2 of 500 × 8", "0–2, 5", "and 4 more tables"):
        assert part in text
    assert "table 3" not in text


def test_reasons_name_lost_workers_before_those_that_lost_them() -> None:
    lost = RayActorError(None, "The actor died unexpectedly before finishing this task: SYSTEM_ERROR SIGKILL")
    peer = RuntimeError("Connection closed by peer")
    assert failure_reason({0: peer, 1: lost}) == "worker 1 was lost: its process was killed (SIGKILL, or out of memory)"
    assert failure_reason({0: peer}) == "worker 0: RuntimeError: Connection closed by peer"
    assert failure_reason({2: ValueError("first line\nsecond")}) == "worker 2: first line"


def test_equal_reasons_of_many_workers_are_one() -> None:
    """A storage that is away fails a thousand workers; the line is in console, metrics.jsonl and report."""
    away = failure_reason({rank: OSError("the storage is away") for rank in range(1000) if rank != 7})
    assert away == "workers 0–6, 8–999: OSError: the storage is away"
    lost = RayActorError(None, "The actor died unexpectedly before finishing this task: SYSTEM_ERROR SIGKILL")
    assert failure_reason({3: lost, 4: lost}).startswith("workers 3–4 were lost: its process was killed")
    each = failure_reason({rank: OSError(f"part-{rank:05d} is away") for rank in range(1000)})
    assert each.startswith("worker 0: OSError: part-00000 is away, worker 1: ") and len(each) < 300
    assert each.endswith("and 996 more with other errors")


def test_a_plan_of_many_ranks_has_few_lines() -> None:
    ranks = [
        {"rank": rank, "weights_bytes": (1 + rank % 5) << 30, "optimizer_bytes": 0, "dense_bytes": 1 << 20}
        for rank in range(1000)
    ]
    assert memory_lines({"memory": ranks[:2]})[1] == "rank 1: 2.0 GiB weights, 0 B optimizer, 1.0 MiB dense"
    largest, smallest = memory_lines({"memory": ranks})
    assert largest == "largest rank of 1,000 (999): 5.0 GiB weights, 0 B optimizer, 1.0 MiB dense"
    assert smallest == "smallest rank of 1,000 (0): 1.0 GiB weights, 0 B optimizer, 1.0 MiB dense"


def test_records_left_at_the_end_are_handed_over() -> None:
    box, seen = Mailbox(), []
    with handling_records(box.take, seen.append, every_s=0.01):
        box.put({"kind": "progress", "step": 1})
        until = time.monotonic() + 10
        while not seen and time.monotonic() < until:
            time.sleep(0.01)
        assert [record["step"] for record in seen] == [1]
    with handling_records(box.take, seen.append, every_s=60):
        box.put({"kind": "progress", "step": 2})
    assert [record["step"] for record in seen] == [1, 2]


def test_neither_a_record_that_cannot_be_kept_nor_a_late_answer_ends_recording(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept: list[int] = []

    def breaks(record: Record) -> None:
        if record["step"] <= 3:
            raise (OSError("disk is full"), SystemExit(1), KeyError("auc"))[record["step"] - 1]
        kept.append(record["step"])

    box = Mailbox()
    with handling_records(box.take, breaks, every_s=0.01):
        for step in (1, 4, 2, 5, 3, 6):
            box.put({"kind": "progress", "step": step})
            time.sleep(0.05)
        until = time.monotonic() + 10
        while len(kept) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        assert kept == [4, 5, 6]  # heard while the run goes on
        box.put({"kind": "progress", "step": 3})
        box.put({"kind": "progress", "step": 7})
    assert kept == [4, 5, 6, 7]
    assert (
        capsys.readouterr().err == "rayrec: Could not write a log record (OSError: disk is full). The run continues.\n"
    )

    answers: list[Any] = [TimeoutError("busy"), [{"kind": "x"}]]

    def take() -> list[Record]:
        answer = answers.pop(0) if answers else []
        if isinstance(answer, Exception):
            raise answer
        return answer

    seen: list[Record] = []
    with handling_records(take, seen.append, every_s=0.01):
        until = time.monotonic() + 10
        while not seen and time.monotonic() < until:
            time.sleep(0.01)
    assert seen == [{"kind": "x"}]


def test_metrics_that_cannot_be_written_are_told_and_the_run_goes_on(tmp_path: Path) -> None:
    """A folder in the file's place; the lines are kept and written when it is gone."""
    out = io.StringIO()
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "plan.json").mkdir()
    recorder = Recorder(RunFolder(tmp_path), Display(Console(file=out, width=300)))
    sink = Heard(recorder)
    sink.put({**TRAIN, "step": 1})
    sink.put({**TRAIN, "step": 2})
    sink.put({"kind": "plan", "plan": {"version": 1, "plan": {}, "memory": []}})
    assert out.getvalue().count("metrics.jsonl (Is a directory)") == 1
    assert "plan.json (Is a directory). The run continues." in out.getvalue()
    (tmp_path / "metrics.jsonl").rmdir()
    sink.put({**TRAIN, "step": 3})
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_failures_count_only_until_the_run_gets_further() -> None:
    box = Mailbox()
    assert [box.count_failure(), box.count_failure()] == [1, 2]
    box.put({"kind": "event", "event": "checkpoint", "step": 10})
    assert box.count_failure() == 1
    box.put({"kind": "event", "event": "checkpoint", "step": 10})  # the same again: no progress
    assert box.count_failure() == 2


def test_a_run_that_is_given_up_says_how_often_and_why() -> None:
    text = too_often(4, 3, "worker 1 was lost")
    assert "failed 4 times without a new checkpoint" in text
    assert "trainer.max_failures=3" in text and text.endswith("Last failure: worker 1 was lost")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_ends(number: int) -> None:
    asked = threading.Event()
    signals = StopSignals(asked.set, grace_s=60)
    release = threading.Event()
    with handling(signals):
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
        threading.Timer(0.9, os.kill, (os.getpid(), number)).start()
        with pytest.raises(Interrupted, match="second interrupt") as caught:
            run_in_background(lambda: release.wait(20), signals)
    release.set()
    assert asked.is_set()
    assert caught.value.signal == number


def test_a_closed_terminal_asks_once_however_often_it_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel and the shell each send a SIGHUP."""
    monkeypatch.setattr(signals_module, "STOP_SIGNALS", (signal.SIGHUP,))
    asked = threading.Event()
    signals = StopSignals(asked.set, grace_s=60)
    with handling(signals):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        run_in_background(lambda: asked.wait(20), signals)
    assert signals.reason_to_exit is None and signals.interrupted("x").signal == signal.SIGHUP
    signals(signal.SIGINT)
    assert signals.reason_to_exit is not None


@pytest.mark.parametrize("ignored", [True, False])
def test_a_hangup_is_heard_unless_it_is_ignored_as_under_nohup(ignored: bool) -> None:
    action = signal.SIG_IGN if ignored else signal.SIG_DFL
    code = "import signal; from rayrec._runtime.stop_signals import STOP_SIGNALS; print(signal.SIGHUP in STOP_SIGNALS)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: signal.signal(signal.SIGHUP, action),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == str(not ignored), done.stderr


def test_a_stop_that_takes_longer_than_its_grace_is_an_end() -> None:
    release = threading.Event()
    signals = StopSignals(lambda: None, grace_s=0.2)
    signals(signal.SIGTERM)
    with pytest.raises(Interrupted, match=r"no final checkpoint was saved within trainer\.grace_s=0\.2 s"):
        run_in_background(lambda: release.wait(20), signals)
    release.set()
