"""Whole runs of one rank in this process, without Ray: what is told, saved and scored at which step."""

from __future__ import annotations

import math
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayrec.checkpoint import CheckpointStore
from rayrec.models import DLRM, Batch
from rayrec.train import TrainError
from rayrec.train.worker.lockstep import RankError, StopRequested
from tests.train.small import Silent, fit_job, flat, make_job, raw_config, score_job, write_all

ROWS, STEPS = 300, 5  # of an epoch, in steps of 64 rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("alone"), rows=ROWS)


class Told(Silent):
    """What one run has told."""

    def steps(self, kind: str, event: str | None = None) -> list[int]:
        return [r["step"] for r in self.records if r["kind"] == kind and r.get("event") == event]

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]


def job_of(data: Path, folder: Path, **changes: Any) -> Any:
    raw = raw_config(data, storage__background=False, **changes)
    raw["storage"] = {**raw["storage"], "path": str(folder), **changes.get("storage", {})}
    return make_job(raw)


def run(job: Any, stop_at: int | None = None) -> tuple[dict[str, Any], Told]:
    """The outcome; a stop is asked for at the exchange before step `stop_at`."""
    told, asked = Told(), iter(range(1, 10_000))
    return fit_job(job, None, told, lambda: stop_at is not None and next(asked) == stop_at), told


def stopped(job: Any, at: int, message: str = "^stopped at step") -> None:
    """Ask for a stop at the exchange before step `at`, and from then on."""
    asked = iter(range(1, 10_000))
    with pytest.raises(StopRequested, match=message):
        fit_job(job, None, Told(), lambda: next(asked) >= at)


def saved(job: Any) -> list[int]:
    return [checkpoint.step for checkpoint in CheckpointStore(job.checkpoints).all()]


def test_a_run_tells_what_it_does_when(data: Path, tmp_path: Path) -> None:
    schedule = {"kind": "linear", "decay_steps": 10, "end": 0.0}
    dense = {"kind": "adam", "lr": 0.01, "schedule": schedule}
    job = job_of(data, tmp_path, optimizers__dense=dense)
    outcome, told = run(job)
    assert told.records[0] == {"kind": "begin", "resumed_step": None, "world_size": 1, "nodes": [socket.gethostname()]}
    assert told.records[1]["kind"] == "plan" and told.records[1]["plan"].keys() >= {"plan", "memory", "planned_for"}
    lines = told.all("train")
    assert [(r["step"], r["epoch"], r["samples"]) for r in lines] == [
        (4, 0, 256), (5, 0, 300), (8, 1, 300 + 192), (10, 1, 600)
    ]  # fmt: skip
    for line in lines:
        step = line["step"] - 1  # the last one's, counted from 0
        assert line["lr"] == {"dense": pytest.approx(0.01 * (1 - step / 10)), "sparse": 0.1}
        assert line["gradient_norm"] > 0 and 0 <= line["data_wait_fraction"] <= 1 and line["samples_per_second"] > 0
    assert [(r["step"], r["epoch"], r["samples"]) for r in told.all("eval")] == [(5, 0, 301), (10, 1, 301)]
    assert told.steps("event", "checkpoint") == saved(job) == [6, 10]
    assert {(r["epochs"], r["total_steps"]) for r in told.all("progress")} == {(2, 2 * STEPS)}
    wanted = {"world_size": 1, "epochs": 2, "ended": None, "steps": 10}
    assert {key: outcome[key] for key in wanted} == wanted
    train, final = outcome["train"], lines[-1]
    assert {key: train[key] for key in ("loss", "ne", "auc")} == {key: final[key] for key in ("loss", "ne", "auc")}
    assert (train["samples"], train["skipped"]) == (600, 0) and 0 <= train["data_wait_fraction"] <= 1
    assert outcome["samples_per_second"] == pytest.approx(600 / train["seconds"], rel=0.1)
    assert outcome["checkpoint"].endswith("step_00000010-0001") and outcome["eval"] == told_scores(told, -1)
    scores = score_job(job)
    assert (scores["step"], scores["checkpoint"]) == (10, outcome["checkpoint"])
    assert {key: scores[key] for key in outcome["eval"]} == outcome["eval"]


def told_scores(told: Told, place: int) -> dict[str, Any]:
    return {k: v for k, v in told.all("eval")[place].items() if k not in ("kind", "time", "step", "epoch")}


def test_evaluations_by_steps_keep_the_best_checkpoint(data: Path, tmp_path: Path) -> None:
    storage = {"keep": 1, "keep_best": "logloss"}
    job = job_of(
        data, tmp_path, trainer__eval_every=2, trainer__eval_rows=64, trainer__checkpoint_every=None, storage=storage
    )
    outcome, told = run(job)
    parts = [(r["step"], r.get("partial"), r["samples"]) for r in told.all("eval")]
    assert parts == [
        (2, True, 64), (4, True, 64), (5, None, 301), (6, True, 64), (8, True, 64), (10, True, 64), (10, None, 301)
    ]  # fmt: skip
    assert told.steps("event", "checkpoint") == [5, 10], "none for an evaluation that scores no checkpoint"
    whole = {r["step"]: r["logloss"] for r in told.all("eval") if "partial" not in r}
    best = min(whole, key=lambda step: whole[step])
    assert set(saved(job)) == {best, 10}
    assert outcome["eval"]["samples"] == 301


def test_several_best_checkpoints_are_kept(data: Path, tmp_path: Path) -> None:
    storage = {"keep": 1, "keep_best": {"metric": "logloss", "count": 3}}
    job = job_of(data, tmp_path, trainer__eval_every=2, trainer__checkpoint_every=None, storage=storage)
    _, told = run(job)
    by_score = sorted(told.all("eval"), key=lambda record: record["logloss"])
    assert [r["step"] for r in told.all("eval")] == [2, 4, 5, 6, 8, 10]
    assert set(saved(job)) == {10, *(record["step"] for record in by_score[:3])}


class Dies(DLRM):
    """Its process dies in the first evaluation of a test, after the check of one batch before the first step."""

    scored = 0

    def forward(self, batch: Batch) -> Any:
        if not self.training:
            Dies.scored += 1
            if Dies.scored == 2:
                raise OSError("a lost worker")
        return super().forward(batch)


@pytest.mark.parametrize("every", [3, 5], ids=["within an epoch", "at its end"])
def test_an_evaluation_that_a_crash_cut_short_is_made_again(data: Path, tmp_path: Path, every: int) -> None:
    """Else the checkpoint that was made for it has no score, and is removed though it is the best."""
    Dies.scored = 0
    storage = {"keep": 1, "keep_best": "logloss"}
    changes = {"trainer__eval_every": every, "trainer__checkpoint_every": None, "storage": storage}
    job = replace(job_of(data, tmp_path, **changes), factory=Dies)
    with pytest.raises(OSError, match="a lost worker"):
        run(job)
    assert saved(job) == [every]
    told = run(job)[1]
    assert told.steps("eval")[0] == every
    scored = CheckpointStore(job.checkpoints).root.read("scores.json").decode()
    assert f"step_{every:08d}-0001" in scored or saved(job) == [10]
    best = min(told.all("eval"), key=lambda line: line["logloss"])["step"]
    assert set(saved(job)) == {best, 10}


def test_a_run_that_gets_no_better_ends_early(data: Path, tmp_path: Path) -> None:
    early = {"metric": "logloss", "patience": 2, "min_delta": 10.0}
    job = job_of(data, tmp_path, trainer__eval_every=1, trainer__eval_rows=64, trainer__early_stopping=early)
    outcome, told = run(job)
    assert told.steps("event", "ended") == [3] and outcome["steps"] == 3 == saved(job)[-1]
    assert "logloss is best at step 1" in outcome["ended"] and outcome["epochs"] == 1
    assert [r["step"] for r in told.all("eval")] == [1, 2, 3, 3]


def test_figures_of_a_part_of_the_rows_are_not_compared_with_those_of_all(data: Path, tmp_path: Path) -> None:
    """Evaluations of 64 rows at steps 3, 6 and 9 count; those of all rows at steps 5 and 9, ends of epochs, do not."""
    early = {"metric": "logloss", "patience": 2, "min_delta": 10.0}
    job = job_of(data, tmp_path, trainer__eval_every=3, trainer__eval_rows=64, trainer__early_stopping=early)
    outcome, told = run(job)
    assert [(r["step"], r.get("partial", False)) for r in told.all("eval")] == [
        (3, True), (5, False), (6, True), (9, True), (9, False)
    ]  # fmt: skip
    assert told.steps("event", "ended") == [9] and "is best at step 3 " in outcome["ended"]


def test_a_stopped_run_goes_on_where_it_was(data: Path, tmp_path: Path) -> None:
    whole, told = run(job_of(data, tmp_path / "whole"))
    job = job_of(data, tmp_path / "parts", trainer__checkpoint_every=None)
    with pytest.raises(StopRequested, match="stopped at step 3 with a complete checkpoint"):
        run(job, stop_at=3)
    assert saved(job) == [3]
    outcome, again = run(job)
    assert again.records[0]["resumed_step"] == 3
    assert [line["step"] for line in again.all("train")] == [4, 5, 8, 10]
    for key in ("loss", "ne", "auc", "samples"):
        assert outcome["train"][key] == pytest.approx(whole["train"][key])
    assert flat(outcome["eval"]) == pytest.approx(flat(whole["eval"]))
    assert [line["loss"] for line in again.all("train")] == pytest.approx([r["loss"] for r in told.all("train")])
    done, last = run(job)  # nothing is left to do but to score
    assert (done["steps"], done["train"]["loss"], last.all("train")) == (10, None, [])
    assert saved(job) == [3, 10] and done["checkpoint"].endswith("step_00000010-0002")
    scored = replace(job, evaluated_steps=frozenset({10}))
    assert [r["step"] for r in run(scored)[1].all("eval")] == [10], "the last evaluation is the result's"


def test_evaluations_of_an_earlier_launch_are_repeated_only_for_steps_that_are_trained_again(
    data: Path, tmp_path: Path
) -> None:
    job = job_of(data, tmp_path, trainer__checkpoint_every=None)
    with pytest.raises(StopRequested):
        run(job, stop_at=5)
    told = run(replace(job, evaluated_steps=frozenset({5})))[1]
    assert [r["step"] for r in told.all("eval")] == [10]

    again = job_of(data, tmp_path / "again", trainer__checkpoint_every=None)
    with pytest.raises(StopRequested):
        run(again, stop_at=3)
    told = run(replace(again, evaluated_steps=frozenset({5})))[1]
    assert [r["step"] for r in told.all("eval")] == [5, 10]


def test_workers_that_are_to_be_more_are_started_again(data: Path, tmp_path: Path) -> None:
    class Growing(Told):
        def restart_reason(self) -> str | None:
            return "room for more"

    job = job_of(data, tmp_path)
    with pytest.raises(RankError, match="stopped at step 2 to restart: room for more") as caught:
        asked = iter([False, True])
        fit_job(job, None, Growing(), lambda: next(asked))
    assert caught.value.retry and saved(job) == [2]


def test_lines_are_told_by_time_where_steps_do_not_say(data: Path, tmp_path: Path) -> None:
    often = run(job_of(data, tmp_path / "often", trainer__log_every="0.000001s", trainer__eval_every=3))[1]
    assert [line["step"] for line in often.all("train")] == list(range(1, 11))
    told = run(job_of(data, tmp_path / "rarely", trainer__log_every="100h", trainer__eval_every=3))[1]
    lines = told.all("train")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 8, 10], "the first steps, and the end of an epoch"
    stalls = {line["step"]: line["stall_fraction"] for line in lines}
    assert min(stalls[4], stalls[8]) > 0 and max(stalls.values()) < 1, "for the evaluations and checkpoints between"


def test_guards_count_no_early_lines(data: Path, tmp_path: Path) -> None:
    guards = {"max_ne": 1e-6, "patience": 2}
    job = job_of(data, tmp_path, trainer__log_every="100h", trainer__guards=guards)
    with pytest.raises(RankError, match="ended early at step 10 after 2 logging lines in a row"):
        run(job)


def test_time_decides_too(data: Path, tmp_path: Path) -> None:
    """Hardly any time has passed at the first step, by which the others are counted."""
    tiny = "0.000001s"
    job = job_of(data, tmp_path, trainer__eval_every=tiny, trainer__eval_rows=64, trainer__checkpoint_every=tiny)
    told = run(job)[1]
    assert told.steps("event", "checkpoint") == list(range(2, 11))
    assert [r["step"] for r in told.all("eval") if "partial" in r] == [2, 4, 6, 8, 10]


def test_a_rate_that_is_too_high_is_halved_from_the_last_checkpoint(data: Path, tmp_path: Path) -> None:
    high = {"kind": "sgd", "lr": 1e30}
    guards = {"halvings": 2}
    job = job_of(data, tmp_path, optimizers__dense=high, trainer__guards=guards, trainer__log_every=1)
    told = Told()
    with pytest.raises(TrainError, match="the loss is not finite"):
        fit_job(job, None, told)
    texts = [r["message"] for r in told.all("event") if r["event"] == "halved"]
    assert [text.rpartition(" ")[2] for text in texts] == ["0.5", "0.25"]
    rates = {line["lr"]["dense"] for line in told.all("train")}
    assert rates <= {1e30, 5e29, 2.5e29} and saved(job) == []
    assert len([r for r in told.records if r["kind"] == "begin"]) == 3
    assert all(math.isfinite(line["loss"]) for line in told.all("train"))
