"""What the driver keeps, copies and says, word by word: restarts, curves, lines of progress, summaries, the mirror."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from rayrec.train import Display, ResourceError, StorageError
from rayrec.train.driver.console import MIN_S_BETWEEN_LINES, WIDTH_OF_FILES, evaluation_lines
from rayrec.train.driver.recorder import Recorder
from rayrec.train.driver.resources import Demand, Supply, refuse_if_short
from rayrec.train.run.folder import RunFolder, newest_checkpoint
from rayrec.train.run.log import Record, RunState
from rayrec.train.run.mirror import FILES, Mirror
from rayrec.train.terminal import format_metric, plan_table
from tests.train.small import Heard
from tests.train.test_driver import EVAL, TRAIN, recorded


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
    recorder = Recorder(RunFolder(tmp_path), Display(Console(file=io.StringIO())), lambda: saved.append(1))
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
    recorder = Recorder(RunFolder(tmp_path), Display(Console(file=io.StringIO())))
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


def test_what_cannot_be_written_is_told_with_its_reason() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=200))
    errors = StorageError("too far"), OSError(28, "No space left on device"), OSError("odd"), KeyError("auc")
    for number, error in enumerate(errors):
        for _ in range(2):  # reported once
            with display.writing(Path(f"a/{number}")):
                raise error
    assert out.getvalue().splitlines() == [
        "Could not write a/0 (StorageError: too far). The run continues.",
        "Could not write a/1 (No space left on device). The run continues.",
        "Could not write a/2 (OSError: odd). The run continues.",
        "Could not write a/3 (KeyError: 'auc'). The run continues.",
    ]


def test_lines_of_progress_come_at_most_once_a_second() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=200))
    display.train({**TRAIN, "step": 1})
    display.train({**TRAIN, "step": 2})
    assert MIN_S_BETWEEN_LINES == 1.0
    display._last_line_at = time.monotonic() - MIN_S_BETWEEN_LINES
    display.train({"epoch": 2, "step": 3, "samples_per_second": None, "loss": None, "rmse": 0.25})
    display.progress({"step": 4, "total_steps": 9, "epoch": 0, "epochs": 1})
    assert out.getvalue().splitlines() == [
        "epoch 1  step 1  1,234 samples/s  loss 0.5000  NE 0.9000",
        "epoch 3  step 3  0 samples/s  loss –  RMSE 0.2500",
    ]
    assert (format_metric(None), format_metric(0.0), format_metric(1.25, 1)) == ("–", "0.0000", "1.2")


def test_a_long_line_stays_one_line() -> None:
    out = io.StringIO()
    Display(Console(file=out, width=40)).say("one two three " * 20)
    assert out.getvalue() == "one two three " * 20 + "\n"


def test_a_file_is_as_wide_as_its_lines_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert Display().console.width == WIDTH_OF_FILES == 120
    assert Display(Console(file=io.StringIO(), width=50)).console.width == 50
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, to rich
    assert Display().console.width == 40


def test_checkpoints_are_shown_to_who_asks_and_stacks_to_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(record: Record) -> str:
        out = io.StringIO()
        Display(Console(file=out, width=200)).event(record)
        return out.getvalue()

    saved = {"event": "checkpoint", "message": "checkpoint of step 3 is complete"}
    hang = {"event": "hang", "message": "rank 1 has not moved", "stacks": "thread a:\n  at [red]x"}
    for value, seen in [("", False), ("0", False), ("no", False), ("False", False), ("1", True)]:
        monkeypatch.setenv("RAYREC_DEBUG", value)
        assert shown(saved) == ("checkpoint of step 3 is complete\n" if seen else "")
        assert shown(hang) == "rank 1 has not moved\nthread a:\n  at [red]x\n"
    monkeypatch.delenv("RAYREC_DEBUG")
    assert shown(saved) == ""


def test_evaluations_of_numbers_in_words() -> None:
    stars = {"rmse": 0.5, "mae": 0.25, "r2": None, "samples": 1234, "skipped": 0}
    assert evaluation_lines("head", stars) == ["head: RMSE 0.5000  MAE 0.2500  R² –  on 1,234 rows"]
    like = {"auc": 0.5, "ne": 1.0, "logloss": 0.5, "calibration": 1.25, "samples": 7}
    assert evaluation_lines("head", {**stars, "skipped": 1200, "tasks": {"stars": stars, "b": like}}) == [
        "head, 1,200 rows skipped:",
        "  stars  RMSE 0.5000  MAE 0.2500  R² –  on 1,234 rows",
        "  b      AUC 0.5000  NE 1.0000  logloss 0.5000  calibration 1.250  on 7 rows",
    ]
    out = io.StringIO()
    result = {"epochs": 1, "steps": 2, "world_size": 1, "samples_per_second": 3.0, "train": {"data_wait_fraction": 0}}
    Display(Console(file=out, width=200)).summary({**result, "eval": {"tasks": {"stars": stars, "b": like}}}, {})
    assert out.getvalue().splitlines()[:4] == [
        "evaluation AUC, b       0.5000",
        "evaluation NE, b        1.0000",
        "evaluation RMSE, stars  0.5000",
        "evaluation R², stars    –",
    ]


def test_a_plan_of_just_as_many_tables_is_shown_whole() -> None:
    shard = {"shard_offsets": [0, 0], "shard_sizes": [5, 8], "placement": "rank:0/cpu"}
    one = {"sharding_type": "row_wise", "compute_kernel": "fused", "ranks": [0], "shards": [shard]}
    for count, caption in [(60, None), (61, "and 1 more tables")]:
        table = plan_table({"plan": {"bags": {f"t{i}": one for i in range(count)}}})
        assert (table.row_count, table.caption) == (60, caption)
        assert [(column.header, column.justify) for column in table.columns] == [
            ("table", "left"), ("rows × dim", "right"), ("sharding", "left"), ("kernel", "left"), ("shards", "right"),
            ("ranks", "right"),
        ]  # fmt: skip


def test_enough_gpus_and_too_few_cpus_is_a_lack_of_cpus() -> None:
    need = Demand(num_workers=2, cpus_per_worker=2.0, use_gpu=True, reader_cpus=0.0)
    with pytest.raises(ResourceError) as caught:
        refuse_if_short(need, Supply(cpus=2.0, gpus=2), "x has")
    assert str(caught.value) == (
        "the run needs 4 CPUs (2 workers × 2), but x has 2; lower trainer.num_workers to 1, or lower "
        "trainer.cpus_per_worker to at most 1, or use a larger cluster"
    )


def far(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunFolder, Path]:
    """A run folder that stands for a URI, and the folder that the URI means."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return RunFolder.at(f"file://{folder}/there", "a"), folder / "there" / "a"


def test_the_mirror_takes_what_is_there_and_sends_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = far(tmp_path, monkeypatch)
    there.mkdir(parents=True)
    (there / "config.yaml").write_text("a: 1")
    (there / "other").write_text("x")
    here.plan.write_text("of an earlier run")
    here.config.write_text("a: 0")
    mirror = Mirror(here)
    mirror.pull()
    here.metrics.write_text("{}")
    mirror.push([].append)
    assert (there / "metrics.jsonl").read_text() == "{}", "also where a file before it is not there"
    (there / "metrics.jsonl").unlink()
    assert here.config.read_text() == "a: 1" and not here.plan.exists() and not (here.path / "other").exists()
    assert sorted(path.name for path in there.iterdir()) == ["config.yaml", "other"], "no probe is left"
    said: list[str] = []
    for name in FILES:
        (here.path / name).write_text(name)
    (here.path / "other").write_text("y")
    mirror.push(said.append)
    assert {path.name: path.read_text() for path in there.iterdir()} == {**{name: name for name in FILES}, "other": "x"}
    (there / "plan.json").write_text("kept")
    (there / "report.html").write_text("to go")
    here.report.write_text("new report")
    mirror.push(said.append)
    assert (there / "plan.json").read_text() == "kept", "it has not changed here"
    assert (there / "report.html").read_text() == "new report" and said == []
    written = here.config.stat().st_mtime_ns
    (there / "config.yaml").write_text("config.yaml")
    mirror.pull()
    assert here.config.stat().st_mtime_ns == written, "what is alike is left as it is"


@pytest.mark.parametrize("has_id", [True, False])
def test_lines_that_a_killed_driver_did_not_copy_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_id: bool
) -> None:
    here, there = far(tmp_path, monkeypatch)
    lines = [f'{{"step": {step}}}\n' for step in range(30)]
    here.metrics.write_text("".join(lines[:10]))
    here.tensorboard.mkdir()
    (here.tensorboard / "events.1").write_text("curve")
    if has_id:
        here.run_id()
    Mirror(here).push(pytest.fail)
    here.metrics.write_text("".join(lines))
    (here.tensorboard / "events.1").write_text("longer curve")
    Mirror(here, writes_records=False).pull()  # `rayrec report`, which copies no records back
    Mirror(here, writes_records=False).push(pytest.fail)
    assert (there / "metrics.jsonl").read_text() == "".join(lines[:10])
    relaunched = Mirror(here)
    relaunched.pull()
    assert here.metrics.read_text() == "".join(lines)
    relaunched.push(pytest.fail)
    assert (there / "tensorboard" / "events.1").read_text() == "longer curve"
    shutil.rmtree(here.path)
    here = far(tmp_path, monkeypatch)[0]  # as on another machine
    Mirror(here).pull()
    assert here.metrics.read_text() == "".join(lines)
    assert (here.tensorboard / "events.1").read_text() == "longer curve"


def test_lines_of_a_run_that_another_machine_went_on_with_or_started_over_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = far(tmp_path, monkeypatch)
    here.metrics.write_text("1\n")
    run_id = here.run_id()
    Mirror(here).push(pytest.fail)
    here.metrics.write_text("1\n2 here\n")
    (there / "metrics.jsonl").write_text("1\n2 there\n")
    Mirror(here).pull()
    assert here.metrics.read_text() == "1\n2 there\n"
    here.metrics.write_text("1\n2 there\n3\n")
    here.tensorboard.mkdir()
    (there / "metrics.jsonl").unlink()
    (there / "run_id").write_text("another\n")
    Mirror(here).pull()
    assert not here.metrics.exists() and not here.tensorboard.exists() and here.run_id() == "another" != run_id


def test_a_mirror_that_cannot_be_reached_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = far(tmp_path, monkeypatch)
    there.parent.write_text("a file")
    said: list[str] = []
    mirror = Mirror(here)
    with pytest.raises(StorageError, match=r"storage\.path: the run folder .*there/a cannot be read and written"):
        mirror.pull()
    here.config.write_text("a: 0")
    mirror.push(said.append)
    assert said == [f"cannot write files of the run to {there} (Not a directory); training continues"]
    near = Mirror(RunFolder(tmp_path))
    near.pull()
    near.push(said.append)
    assert len(said) == 1, "a folder needs no copy"
    (here.path / ".storage").write_text("xyz://somewhere/a")
    with pytest.raises(StorageError, match=r"storage\.path: cannot open .*xyz://somewhere/a"):
        Mirror(here)


def test_no_checkpoint_is_not_one_that_cannot_be_read(tmp_path: Path) -> None:
    assert newest_checkpoint(RunFolder(tmp_path)) is None
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(StorageError, match=r"checkpoints cannot be read \(Not a directory\); nothing was started"):
        newest_checkpoint(RunFolder(tmp_path))


def attempts(folder: Path, *texts: str) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(texts))
    return RunFolder(folder).last_attempt()


def test_what_a_run_folder_holds_may_be_odd(tmp_path: Path) -> None:
    assert (
        attempts(tmp_path, '{"attempt": 1}', '{"attempt": 3}', '{"a": 1}', '{"attempt": 2}', '{"attempt": null}') == 3
    )
    folder = RunFolder(tmp_path)
    for text in ("[1]", "3"):
        folder.result.write_text(text)
        folder.config.write_text(text)
        assert folder.read_result() is None and folder.read_config() is None
