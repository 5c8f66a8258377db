"""What the driver makes of records: files, text on a terminal and elsewhere, and reasons of failures."""

from __future__ import annotations

import io
import json
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError
from rich.console import Console
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from rayrec.train import (
    Display,
    TrainError,
)
from rayrec.train.driver.failures import failure_reason, line_of, too_often
from rayrec.train.driver.recorder import Lines, Recorder
from rayrec.train.run.log import Mailbox, Record, RunState, handling_records
from tests.train.small import Heard, recorder_of, run_folder

TRAIN = {"kind": "train", "epoch": 0, "samples": 64, "loss": 0.5, "ne": 0.9, "auc": None, "samples_per_second": 1234.5,
         "data_wait_fraction": 0.1, "lr": {"dense": 0.1, "sparse": 0.1}}  # fmt: skip
EVAL = {"kind": "eval", "epoch": 0, "auc": 0.75, "ne": 0.8, "logloss": 0.6, "calibration": 1.0, "samples": 10}


def recorded(folder: Path, records: list[Record], terminal: bool = False) -> tuple[Recorder, str, list[Record]]:
    """Send records through a mailbox to a recorder: (recorder, what is shown, lines of metrics.jsonl)."""
    out = io.StringIO()
    recorder = recorder_of(folder, Display(Console(file=out, force_terminal=terminal, width=150)))
    sink = Heard(recorder)
    for record in records:
        if record["kind"] == "begin":
            sink.begin(leader=True)
        sink.put(record)
    recorder.close()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return recorder, out.getvalue(), lines


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
    assert list(run_folder(tmp_path).read_metrics()) == [{"a": 1}, {"b": 2}, {"c": 3}, {"d": 4}]


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_on_a_terminal_and_in_a_file(tmp_path: Path, terminal: bool) -> None:
    steps = [{"kind": "progress", "step": 64, "epoch": 0, "epochs": 2, "total_steps": 128}, {**TRAIN, "step": 64}]
    plan = {"kind": "plan", "plan": {"version": 1, "plan": {}, "memory": []}}
    _, text, _ = recorded(tmp_path, [begin(None), plan, *steps, {**EVAL, "step": 64}], terminal)
    for part in ("1,234 samples/s  loss 0.5000  NE 0.9000", "AUC 0.7500", "on 10 rows"):
        assert part in text
    assert ("epoch 1/2" in text) is terminal
    assert ("epoch 1  step 64" in text) is not terminal


def test_equal_reasons_of_many_workers_are_one() -> None:
    """A storage that is away fails a thousand workers; the line is in console, metrics.jsonl and report."""
    away = failure_reason({rank: OSError("the storage is away") for rank in range(1000) if rank != 7})
    assert away == "workers 0–6, 8–999: OSError: the storage is away"
    lost = RayActorError(None, "The actor died unexpectedly before finishing this task: SYSTEM_ERROR SIGKILL")
    assert failure_reason({3: lost, 4: lost}).startswith("workers 3–4 were lost: its process was killed")
    each = failure_reason({rank: OSError(f"part-{rank:05d} is away") for rank in range(1000)})
    assert each.startswith("worker 0: OSError: part-00000 is away, worker 1: ") and len(each) < 300
    assert each.endswith("and 996 more with other errors")


def test_records_left_at_the_end_are_handed_over() -> None:
    box, seen = Mailbox(), []
    with handling_records(box.take, seen.append, every_s=0.01):
        box.put({"kind": "progress", "step": 1})
        until = time.monotonic() + 120
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
        until = time.monotonic() + 120
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
        until = time.monotonic() + 120
        while not seen and time.monotonic() < until:
            time.sleep(0.01)
    assert seen == [{"kind": "x"}]


def test_metrics_that_cannot_be_written_are_told_and_the_run_goes_on(tmp_path: Path) -> None:
    """A folder in the file's place; the lines are kept and written when it is gone."""
    out = io.StringIO()
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "plan.json").mkdir()
    recorder = recorder_of(tmp_path, Display(Console(file=out, width=300)))
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


def test_a_run_that_is_given_up_says_how_often_and_why() -> None:
    text = too_often(4, 3, "worker 1 was lost")
    assert "failed 4 times without a new checkpoint" in text
    assert "trainer.max_failures=3" in text and text.endswith("Last failure: worker 1 was lost")


def begin(step: int | None, workers: int = 2) -> Record:
    return {"kind": "begin", "resumed_step": step, "world_size": workers}


def events(lines: Sequence[Record]) -> list[tuple[str, int, str]]:
    return [(line["event"], line["step"], line["message"]) for line in lines if line["kind"] == "event"]


def test_each_start_after_the_first_says_why_and_where_it_goes_on(tmp_path: Path) -> None:
    recorder, _, lines = recorded(
        tmp_path,
        [
            begin(None, 2),
            {**TRAIN, "step": 7},
            {"kind": "restart", "reason": "there is room"},
            begin(6, 3),
            {"kind": "failure", "reason": "worker 1 was lost"},
            {"kind": "failure", "reason": "worker 2 was lost"},
            begin(6, 2),
            {"kind": "failure", "reason": "worker 0 was lost"},
            begin(6, 2),
            begin(8, 2),
        ],
    )
    resumed = "resumed from the checkpoint of step 6"
    assert events(lines) == [
        ("resized", 6, f"there is room: {resumed} with 3 instead of 2 workers"),
        (
            "recovered",
            6,
            "worker group failed at step 6 (worker 1 was lost; worker 2 was lost); "
            f"{resumed} with 2 instead of 3 workers",
        ),
        ("recovered", 6, f"worker group failed at step 6 (worker 0 was lost); {resumed}"),
        ("resumed", 8, "resumed from the checkpoint of step 8"),
    ]
    course = recorder.state
    assert (recorder.recoveries, course.world_size, course.step, course.attempt) == (2, 2, 8, 5)


def test_a_run_that_is_taken_up_again_says_where(tmp_path: Path) -> None:
    _, text, lines = recorded(tmp_path, [begin(0)])
    assert events(lines) == [("resumed", 0, "resumed from the checkpoint of step 0")]
    assert "resumed from the checkpoint of step 0" in text
    (tmp_path / "new").mkdir()
    _, _, lines = recorded(tmp_path / "new", [begin(None), {**TRAIN, "step": 1}])
    assert events(lines) == []


def test_the_recorder_remembers_how_it_went(tmp_path: Path) -> None:
    saved: list[int] = []
    recorder = recorder_of(tmp_path, Display(Console(file=io.StringIO())), lambda: saved.append(1))
    sink = Heard(recorder)
    assert (recorder.state, recorder.recoveries) == (RunState(), 0)
    for record in (
        {"kind": "progress", "step": 17, "epoch": 0, "epochs": 1, "total_steps": 40},
        {**TRAIN, "step": 12},
        {"kind": "event", "event": "note", "message": "x", "step": None},
        {"kind": "event", "event": "checkpoint", "message": "x", "step": 12},
        {"kind": "failure", "reason": "b"},
        {"kind": "failure", "reason": "a"},
        {"kind": "failure", "reason": "b"},
        {"kind": "stopped", "message": "stopped at step 12"},
        {"kind": "done", "outcome": {"steps": 3}},
    ):
        sink.put(record)
    assert (recorder.state.step, saved, recorder.failures) == (17, [1], ["b", "a", "b"])
    assert recorder.state.stopped == "stopped at step 12"
    assert recorder.state.done is not None and recorder.state.done["outcome"] == {"steps": 3}
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["train", "event", "event"]


def test_curves_have_the_figures_of_each_label_at_their_steps(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path, Display(Console(file=io.StringIO())))
    tasks = {"buy": {"auc": 0.25, "ne": None}, "like": {"ne": 0.5, "other": 1.0}}
    recorder({**TRAIN, "step": 3, "auc": 0.0, "tasks": tasks, "time": 70.0, "attempt": 1})
    recorder({**EVAL, "step": 4, "ndcg@10": 0.125, "time": 80.0, "attempt": 1})
    recorder.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    found = {
        value.tag: (event.step, event.wall_time, round(value.tensor.float_val[0], 4))
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert found == {
        "train/loss": (3, 70.0, 0.5),
        "train/ne": (3, 70.0, 0.9),
        "train/auc": (3, 70.0, 0.0),
        "train/samples_per_second": (3, 70.0, 1234.5),
        "train/data_wait_fraction": (3, 70.0, 0.1),
        "train/tasks/buy/auc": (3, 70.0, 0.25),
        "train/tasks/like/ne": (3, 70.0, 0.5),
        "train/tasks/like/other": (3, 70.0, 1.0),
        "train/epoch": (3, 70.0, 0.0),
        "train/samples": (3, 70.0, 64.0),
        "train/lr/dense": (3, 70.0, 0.1),
        "train/lr/sparse": (3, 70.0, 0.1),
        "eval/epoch": (4, 80.0, 0.0),
        "eval/samples": (4, 80.0, 10.0),
        "eval/auc": (4, 80.0, 0.75),
        "eval/ne": (4, 80.0, 0.8),
        "eval/logloss": (4, 80.0, 0.6),
        "eval/calibration": (4, 80.0, 1.0),
        "eval/ndcg@10": (4, 80.0, 0.125),
    }


def test_failures_are_told_in_a_line() -> None:
    assert [line_of(text) for text in ("", " \n\n", "\n  first \nsecond")] == ["no reason given"] * 2 + ["first"]
    assert line_of("a" * 200) == "a" * 200 and line_of("a" * 201) == "a" * 199 + "…"
    assert too_often(1, 0, "why").startswith("The workers failed once without")
    gone = RayActorError(None, "The actor died because its node was lost. More words")
    code = RayActorError(None, "Worker exits: connection error code 2. End of file")
    late = RuntimeError("no answer")
    late.health_check_failure = gone  # type: ignore[attr-defined]
    assert failure_reason({3: late, 1: gone, 0: ValueError("peer")}) == (
        "workers 1, 3 were lost: The actor died because its node was lost"
    )
    assert failure_reason({0: code}) == "worker 0 was lost: its process was killed (SIGKILL, or out of memory)"
    assert failure_reason({0: RayActorError(None, "odd")}) == "worker 0 was lost: odd"
    assert failure_reason({2: OSError("b"), 1: KeyError("a")}) == "worker 1: KeyError: 'a', worker 2: OSError: b"


def test_a_mailbox_that_replaces_a_lost_one_goes_on_with_its_attempt() -> None:
    lost, state = Mailbox(previous_attempts=1), RunState()
    for _ in range(3):
        lost.begin(leader=True)
    lost.put({"kind": "begin", "world_size": 1, "resumed_step": 0})
    for record in lost.take(state.attempt):
        state.update(record)
    replacement = Mailbox(previous_attempts=1)
    replacement.put({"kind": "progress", "step": 5})
    assert [record["attempt"] for record in replacement.take(state.attempt)] == [state.attempt] == [4]
    replacement.begin(leader=True)
    replacement.put({"kind": "begin", "world_size": 2, "resumed_step": 5})
    for record in replacement.take(state.attempt):
        state.update(record)
    assert (state.attempt, state.world_size) == (5, 2), "what is decided once per attempt is decided again"


def test_a_mailbox_that_replaces_a_lost_one_is_asked_again() -> None:
    replacement = Mailbox(previous_attempts=1)
    replacement.take(4, restart="there is room for more workers")
    assert replacement.stop_requested() and replacement.restart_reason() == "there is room for more workers"
    replacement.begin(leader=True)  # the restart; its record has not been taken
    replacement.take(4, restart="there is room for more workers")
    assert not replacement.stop_requested(), "the restart has happened"
    replacement.take(5, stop=True)
    assert replacement.stop_requested() and replacement.restart_reason() is None
    replacement.take(5)
    assert replacement.stop_requested()


def test_a_mailbox_counts_attempts_and_what_was_asked() -> None:
    box = Mailbox(previous_attempts=3)
    assert not box.begin(leader=False) and not box.begin(leader=True)
    box.put({"kind": "x"})
    (record,) = box.take()
    assert record["attempt"] == 4 and box.take() == []
    box.request_restart("room")
    assert box.stop_requested() and box.restart_reason() == "room"
    box.begin(leader=False)
    assert box.restart_reason() == "room", "until the next attempt's leader is there"
    box.begin(leader=True)
    assert box.restart_reason() is None and not box.stop_requested()
    box.request_restart("room")
    box.request_stop()
    assert box.stop_requested() and box.restart_reason() is None
    here, there = (7, "here"), (8, "there")
    box.report_waiting(0, here)
    box.report_waiting(1, there)
    assert box.waiting_ranks() == {0: here, 1: there}
    box.report_waiting(0, None)
    assert box.waiting_ranks() == {1: there}
    box.begin(leader=False)
    assert box.waiting_ranks() == {}
    for rank in (2, 2, 0):
        box.put({"kind": "fatal", "rank": rank})
    assert box.num_failed_ranks() == 2
    assert box.begin(leader=True), "the run has failed"
    box.put({"kind": "x"})
    assert box.take()[-1]["attempt"] == 5, "and no attempt is counted any more"
    box.put({"kind": "event", "event": "checkpoint", "step": 5})
    assert box.count_failure() == 1
    box.put({"kind": "event", "event": "other", "step": 9})
    assert box.count_failure() == 2
    box.put({"kind": "event", "event": "checkpoint", "step": 6})
    assert box.count_failure() == 1


class Says:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str, style: str | None = None) -> None:
        self.lines.append(text)


def test_lines_that_were_never_written_are_counted(tmp_path: Path) -> None:
    for count, told in [(1, "1 line could not be written"), (2, "2 lines could not be written")]:
        display: Any = Says()
        lines = Lines(tmp_path / "none" / "x", display)
        for number in range(count):
            lines.add(str(number))
        lines.close()
        assert len(display.lines) == 2 and display.lines[1].endswith(told)
    display = Says()
    lines = Lines(tmp_path / "x", display)
    (tmp_path / "x").write_bytes(b"half")  # of a driver that was killed
    lines.add("a")
    lines.add("b")
    lines.close()
    assert (tmp_path / "x").read_bytes() == b"half\na\nb\n" and display.lines == []


def test_a_mailbox_of_this_process_is_its_own_sink() -> None:
    box, seen = Mailbox(), []  # type: ignore[var-annotated]
    with handling_records(box.take, seen.append, every_s=0.001):
        assert not box.begin(leader=True) and not box.stop_requested()
        for number in range(2000):
            box.put({"kind": "a", "number": number})
        box.flush({"kind": "fatal", "rank": 1})
    assert [record.get("number") for record in seen] == [*range(2000), None] and box.num_failed_ranks() == 1
    assert all(abs(record["time"] - time.time()) < 600 and record["attempt"] == 1 for record in seen)


def test_records_that_cannot_be_had_at_the_end_are_an_error() -> None:
    def gone() -> list[Record]:
        raise TimeoutError("the mailbox is gone")

    text = r"mailbox \(TimeoutError: the mailbox is gone\); run the same command again"
    with pytest.raises(TrainError, match=text), handling_records(gone, list, every_s=0.01, last_s=0.1):
        pass
    with pytest.raises(ValueError, match="the run's own"), handling_records(gone, list, every_s=0.01):
        raise ValueError("the run's own")


def test_the_last_records_are_asked_for_until_they_come() -> None:
    answers = iter([TimeoutError("busy"), TimeoutError("busy")])
    handled: list[Record] = []

    def take() -> list[Record]:
        if (error := next(answers, None)) is not None:
            raise error
        return [{"kind": "done"}]

    with handling_records(take, handled.append, every_s=0.01):
        pass
    assert handled[:1] == [{"kind": "done"}]
