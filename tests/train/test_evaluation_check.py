"""One batch of every evaluation set is read and scored before the first step, and training does not notice."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rayrec.models import DLRM, Batch
from rayrec.train import Trainer, TrainError, parse_config
from rayrec.train.worker.evaluator import Evaluator
from tests.ranks import on_ranks
from tests.train.small import fit_job, fit_on_rank, make_job, raw_config, write_all
from tests.train.test_alone import Told, job_of, stopped

SPREAD = {"name": "spread", "factory": "tests.train.test_own_metrics:Spread", "args": {"fails": True}}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_all(tmp_path, rows=300)


def rewrite(folder: Path, change: Any) -> None:
    for file in folder.glob("*.parquet"):
        pq.write_table(change(pq.read_table(file)), file)


def nothing_passes(data: Path) -> dict[str, Any]:
    """A set without rows, which the statistics of its row groups do not show."""
    folder = shutil.copytree(data / "eval", data / "nothing")
    rewrite(folder, lambda rows: rows.set_column(0, "user", pc.multiply(rows["user"], 2)))
    return {"path": str(folder), "filters": [["user", "==", 21]]}


def failing(group: dist.ProcessGroup, raw: dict[str, Any]) -> str:
    with pytest.raises(TrainError) as caught:
        fit_on_rank(group, raw)
    return str(caught.value)


def broken(case: str, data: Path) -> dict[str, Any]:
    """The changes of a config whose evaluation set is broken in this way, after `make_job` would accept it."""
    match case:
        case "ids out of range":
            rewrite(data / "eval", lambda rows: rows.set_column(0, "user", pc.add(rows["user"], 10_000_000)))
        case "labels that are no labels":
            rewrite(data / "eval", lambda rows: rows.set_column(4, "label", pc.add(rows["label"], 7)))
        case "empty":
            return {"data__eval": nothing_passes(data)}
        case "a metric that fails":
            return {"trainer__metrics": [SPREAD]}
    return {}


@pytest.mark.parametrize("case", ["ids out of range", "labels that are no labels", "empty", "a metric that fails"])
def test_a_broken_set_ends_the_run_on_every_rank_before_the_first_step(data: Path, tmp_path: Path, case: str) -> None:
    raw = raw_config(data, **broken(case, data))
    for message in on_ranks(2, failing, raw):
        assert message.startswith("data.eval cannot be evaluated: "), message
    assert not list((data / "runs").glob("**/step_*")), "nothing was trained"


class Draws(DLRM):
    """Draws random numbers in every forward pass, of training and of evaluation."""

    def forward(self, batch: Batch) -> Any:
        loss, logits = super().forward(batch)
        noise = 1 + 0.01 * nn.functional.dropout(torch.ones_like(logits), 0.5, training=True).mean()
        return loss * noise, logits


def trained(data: Path, folder: Path, check: bool, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    with monkeypatch.context() as patch:
        if not check:
            patch.setattr(Evaluator, "check", lambda self, position: None)
        job = make_job(raw_config(data, storage__path=str(folder), **changes))
        told = Told()
        fit_job(replace(job, factory=Draws), None, told)
    fields = ("kind", "step", "samples", "loss", "auc", "logloss", "event", "skipped")
    return [{name: line.get(name) for name in fields} for line in told.records if line["kind"] in ("train", "eval")]


@pytest.mark.parametrize("ema", [None, 0.9], ids=["", "averaged"])
def test_training_is_the_same_bit_for_bit(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ema: float | None
) -> None:
    """Weights, random numbers, figures and position, also where the model draws in evaluations."""
    changes = {"optimizers__dense": {"kind": "adam", "lr": 0.01, "ema": ema}}
    with_check = trained(data, tmp_path / "with", True, monkeypatch, **changes)
    assert with_check == trained(data, tmp_path / "without", False, monkeypatch, **changes)
    assert [line["step"] for line in with_check if line["kind"] == "eval"] == [5, 10]


def test_an_empty_test_set_is_refused_but_not_an_empty_named_set(data: Path) -> None:
    empty = nothing_passes(data)
    with pytest.raises(TrainError, match=r"data\.test cannot be evaluated: it has no usable rows"):
        Trainer(parse_config(raw_config(data, data__test=empty))).fit()
    # A named set may be empty: its figures are null.
    result = Trainer(parse_config(raw_config(data, name="sets", data__eval_sets={"new": empty}))).fit()
    assert result.eval is not None and result.eval["sets"]["new"]["samples"] == 0


def test_a_stop_during_the_check_is_answered_at_the_first_step(data: Path, tmp_path: Path) -> None:
    stopped(job_of(data, tmp_path), 1, "stopped at step 1 with a complete checkpoint")
