"""What one rank does beside training: how its end is told, when checkpoints are due, what it reads."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from rayrec.checkpoint import FencedError
from rayrec.train import Display, TrainError
from rayrec.train.driver.run_job import run_job
from rayrec.train.worker.entry import attempt, work_alone
from rayrec.train.worker.lockstep import RankError, StopRequested
from tests.ranks import on_ranks
from tests.train.small import (
    Heard,
    Silent,
    fit_job,
    learner_of,
    make_job,
    rank_session,
    raw_config,
    recorder_of,
    write_all,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("worker"), rows=601)


@pytest.fixture(scope="module")
def job(folder: Path) -> Any:
    return make_job(raw_config(folder))


class Driver:
    """A mailbox, and what came into it."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.sink = self.mailbox = Heard(self.records.append)

    def attempt(self, job: Any, error: Exception, rank: int, world_size: int = 1) -> None:
        """One rank's attempt, which meets an error as it joins the others."""

        def join() -> Any:
            raise error

        attempt(job, self.sink, rank, world_size, join)

    @property
    def told(self) -> list[tuple[str, str | None]]:
        return [(record["kind"], record.get("error", record.get("message"))) for record in self.records]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (StopRequested("stopped at step 7"), [("stopped", "stopped at step 7")]),
        (RankError("rank 1: a label is 2"), [("fatal", "rank 1: a label is 2")]),
    ],
)
def test_what_all_ranks_know_is_told_by_the_first(job: Any, error: Exception, told: list[tuple[str, str]]) -> None:
    driver = Driver()
    driver.attempt(job, error, rank=1, world_size=2)
    assert driver.told == []
    driver.attempt(job, error, rank=0, world_size=2)
    assert driver.told == told


@pytest.mark.parametrize("error", [RankError("a peer was lost", retry=True), OSError("disk"), FencedError("newer")])
def test_what_another_attempt_may_not_meet_goes_up_to_ray_untold(job: Any, error: Exception) -> None:
    driver = Driver()
    for rank in (0, 1):
        with pytest.raises(type(error)):
            driver.attempt(job, error, rank, world_size=2)
    assert driver.told == []


def test_an_error_of_its_own_is_told_and_ends_the_ranks_that_wait_for_this_one(job: Any) -> None:
    driver = Driver()
    with pytest.raises(ValueError, match="wrong"):
        driver.attempt(job, ValueError("wrong"), rank=1, world_size=2)
    assert driver.told == [("fatal", "wrong")]
    assert "ValueError: wrong" in driver.records[0]["traceback"] and driver.records[0]["rank"] == 1
    driver.attempt(job, ValueError("late"), rank=0, world_size=2)  # the run has failed: nothing is begun
    assert len(driver.told) == 1


def test_where_all_ranks_have_one_they_just_end(job: Any) -> None:
    driver = Driver()
    driver.attempt(job, KeyError("wrong"), rank=0, world_size=1)
    assert driver.told == [("fatal", "KeyError: 'wrong'")]


def test_the_end_of_a_run_is_told_with_its_outcome_and_progress_a_few_times_a_second(tmp_path: Path) -> None:
    job, driver = make_job(raw_config(write_all(tmp_path, rows=601))), Driver()
    attempt(job, driver.sink, 0, 1, lambda: rank_session(None, driver.sink))
    kinds = [record["kind"] for record in driver.records]
    assert kinds[0] == "begin" and kinds[-1] == "done"
    outcome = driver.records[-1]["outcome"]
    assert (outcome["steps"], outcome["epochs"], outcome["train"]["samples"]) == (20, 2, 1202)
    first, *others = [record for record in driver.records if record["kind"] == "progress"]
    assert (first["epochs"], first["total_steps"], first["step"]) == (2, 20, 1)
    assert all(b["time"] - a["time"] > 0.1 for a, b in pairwise([first, *others]))


def test_a_run_that_is_over_has_nothing_left_to_do(tmp_path: Path) -> None:
    job = make_job(raw_config(write_all(tmp_path, rows=100), trainer__epochs=1))
    first = fit_job(job)
    again = fit_job(job)
    assert (first["steps"], again["steps"], again["checkpoint"]) == (2, 2, first["checkpoint"])
    assert first["train"]["samples"] == again["train"]["samples"] == 100


def test_a_stop_that_was_asked_for_before_the_first_step_comes_after_it(folder: Path, tmp_path: Path) -> None:
    driver, job = Driver(), make_job(raw_config(folder, storage__path=str(tmp_path)))
    driver.mailbox.request_stop()
    work_alone(job, driver.sink)
    assert driver.told[-1] == ("stopped", "stopped at step 1 with a complete checkpoint")


def test_what_another_attempt_might_mend_is_told_where_there_is_none(folder: Path, tmp_path: Path) -> None:
    def away(**_: Any) -> Any:
        raise OSError("disk is away")

    job = replace(make_job(raw_config(folder, storage__path=str(tmp_path))), factory=away)
    job.files.create()
    display = Display(Console(quiet=True))
    with pytest.raises(TrainError, match=r"^OSError: disk is away$"):
        recorder = recorder_of(job.folder, display)
        run_job(job, recorder.state, recorder, display, previous_attempts=0)


def test_a_run_of_one_step_is_evaluated(tmp_path: Path) -> None:
    job = make_job(raw_config(write_all(tmp_path, rows=60), trainer__epochs=1))
    outcome = fit_job(job)
    assert outcome["steps"] == 1 and outcome["eval"]["samples"] == 301


def test_steps_that_are_left_are_counted_without_the_rows_that_filters_leave_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayrec.train.worker.reporter.PROGRESS_EVERY_S", 0.0)
    train = {"path": str(write_all(tmp_path, rows=600) / "train"), "filters": [["row", "<", 150]]}
    sink = Silent()
    job = make_job(raw_config(tmp_path, data__train=train, trainer__epochs=3, trainer__batch_size=30))
    outcome = fit_job(job, None, sink)
    told = {record["step"]: record["total_steps"] for record in sink.records if record["kind"] == "progress"}
    assert outcome["steps"] == 15 == told[5] == told[10] == told[15]


def seeds(group: dist.ProcessGroup, raw: dict[str, Any]) -> list[int]:
    """Of what a rank draws after its model was made, in two runs of unlike seeds."""
    found = []
    for seed in (0, 1):
        raw["trainer"]["seed"] = seed
        learner_of(make_job(raw), rank_session(group))
        found.append(torch.initial_seed())
    return found


def test_no_two_ranks_nor_runs_draw_alike(folder: Path) -> None:
    (zero, one), (zero_of_1, one_of_1) = on_ranks(2, seeds, raw_config(folder))
    assert len({zero, one, zero_of_1, one_of_1}) == 4


@pytest.mark.parametrize(("changes", "says"), [({}, True), ({"trainer__use_gpu": False}, False)])
def test_a_run_in_this_process_says_that_it_leaves_a_gpu(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: bool
) -> None:
    job, out = make_job(raw_config(folder, storage__path=str(tmp_path), **changes)), io.StringIO()
    job.files.create()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    done: dict[str, Any] = {"kind": "done", "outcome": {}}
    monkeypatch.setattr("rayrec.train.worker.entry.work_alone", lambda job, sink: sink.put(done))
    display = Display(Console(file=out, width=200))
    recorder = recorder_of(job.folder, display)
    assert run_job(job, recorder.state, recorder, display, 0) == {}
    assert ("Set trainer.num_workers=1 to use this machine's GPU" in out.getvalue()) == says
