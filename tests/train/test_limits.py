"""Limits of a run: it ends properly at a step or after a time, on all ranks at once; a larger limit continues it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rayrec.train import Result, Trainer, parse_config
from rayrec.train.worker.limits import is_raised, planned_steps, reached, reason
from tests.ranks import on_ranks
from tests.train.small import config_of, fit_on_rank, flat, raw_config, write_all
from tests.train.test_alone import job_of, run, saved

ROWS, STEPS = 300, 5  # of an epoch


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("limits"), rows=ROWS)


def fitted(data: Path, folder: Path, **limits: Any) -> Result:
    raw = raw_config(data, storage={"path": str(folder), "background": False, "keep": 20})
    raw["trainer"] |= limits
    return Trainer(parse_config(raw)).fit()


def test_which_limit_is_reached() -> None:
    both = config_of(trainer__max_steps=10, trainer__max_minutes=0.5).trainer
    assert reached(config_of().trainer, 10**9, 1e9) is None
    assert [reached(both, *at) for at in ((9, 29.9), (10, 0.0), (9, 30.0))] == [
        None, {"max_steps": 10}, {"max_minutes": 0.5}
    ]  # fmt: skip
    assert reason({"max_minutes": 0.5}) == "reached trainer.max_minutes: 0.5"
    assert [
        is_raised(limit, config_of(trainer__max_steps=now).trainer) for limit, now in (
            (None, 10), ({}, 10), ({"max_steps": 10}, 10), ({"max_steps": 10}, 9), ({"max_steps": 10}, 11),
            ({"max_steps": 10}, None), ({"max_minutes": 1.0}, 10),
        )
    ] == [False, False, False, False, True, True, True]  # fmt: skip


def test_shares_of_a_run_are_of_the_steps_that_it_will_have() -> None:
    steps = [planned_steps(config_of(trainer__max_steps=most).trainer, 300) for most in (None, 7, 70)]
    assert steps == [10, 7, 10]


def test_a_run_with_a_larger_limit_goes_on_as_if_there_had_been_none(data: Path, tmp_path: Path) -> None:
    whole = fitted(data, tmp_path / "whole")
    first = fitted(data, tmp_path / "parts", max_steps=3)
    assert (first.steps, first.ended, first.limit) == (3, "reached trainer.max_steps: 3", {"max_steps": 3})
    assert first.checkpoint is not None and "step_00000003" in first.checkpoint
    assert first.eval is not None and first.eval["samples"] == 301 and (first.folder / "report.html").exists()
    assert fitted(data, tmp_path / "parts", max_steps=3) == first, "it is finished"
    assert fitted(data, tmp_path / "parts", max_steps=2) == first, "a smaller limit changes nothing"
    assert fitted(data, tmp_path / "parts", max_steps=STEPS).steps == STEPS, "at the end of an epoch"
    last = fitted(data, tmp_path / "parts")
    assert (last.steps, last.ended, last.limit) == (2 * STEPS, None, None)
    assert last.eval is not None and whole.eval is not None
    assert flat(last.eval) == pytest.approx(flat(whole.eval)) and last.train["samples"] == whole.train["samples"]


def test_a_run_without_its_result_scores_its_last_checkpoint_and_trains_no_step(data: Path, tmp_path: Path) -> None:
    """The driver may die between the last checkpoint and the result."""
    job = job_of(data, tmp_path, trainer__max_steps=3)
    outcome, told = run(job)
    assert told.steps("event", "ended") == [3] and saved(job) == [3]
    again, told = run(job)
    assert (again["steps"], again["ended"]) == (3, outcome["ended"])
    assert flat(again["eval"]) == pytest.approx(flat(outcome["eval"]))
    assert told.all("train") == []
    shorter, _ = run(job_of(data, tmp_path, trainer__max_steps=2))
    assert shorter["steps"] == 3


def test_time_is_summed_over_launches(data: Path, tmp_path: Path) -> None:
    outcome, _ = run(job_of(data, tmp_path, trainer__max_minutes=1e-9))
    assert (outcome["steps"], outcome["limit"]) == (1, {"max_minutes": 1e-9})
    again, _ = run(job_of(data, tmp_path, trainer__max_minutes=1e-9))
    assert again["steps"] == 1, "the time is over already"
    more, _ = run(job_of(data, tmp_path, trainer__max_minutes=1e9))
    assert (more["steps"], more["ended"]) == (2 * STEPS, None)


def _with_a_clock_of_its_own(group: dist.ProcessGroup, raw: dict[str, Any]) -> dict[str, Any]:
    clock, ahead_s = time.monotonic, 1e6 * group.rank()
    with mock.patch("time.monotonic", lambda: clock() + ahead_s):
        return fit_on_rank(group, raw)


@pytest.mark.parametrize("limits", [{"max_steps": 3}, {"max_minutes": 1e-9}, {"max_minutes": 60.0}])
def test_ranks_end_at_the_same_step_whatever_their_clocks(data: Path, tmp_path: Path, limits: dict[str, Any]) -> None:
    raw = raw_config(data, storage={"path": str(tmp_path), "background": False})
    raw["trainer"] |= limits
    first, second = on_ranks(2, _with_a_clock_of_its_own, raw)
    wanted = {"max_steps": 3}.get(next(iter(limits)), 1 if limits.get("max_minutes") == 1e-9 else 2 * STEPS)
    assert first["steps"] == second["steps"] == wanted
    assert first["eval"] == second["eval"] and not torch.tensor(first["eval"]["auc"]).isnan()
