"""Whole runs in this process: what they leave behind, going on after an interruption, and wrong input of every kind."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console
from torch import nn

from rayrec.checkpoint import CheckpointStore
from rayrec.models import DLRM, Batch
from rayrec.train import Display, Interrupted, Result, StorageError, Trainer, TrainError, evaluate_run, parse_config
from tests.train.small import raw_config, run_folder, table, write, write_all

SHOWN: dict[Path, io.StringIO] = {}


def trainer(folder: Path, *, factory: Any = None, fresh: bool = False, **changes: Any) -> Trainer:
    display = Display(Console(file=SHOWN.setdefault(folder, io.StringIO()), width=150))
    return Trainer(parse_config(raw_config(folder, **changes)), factory=factory, fresh=fresh, display=display)


def shown(folder: Path) -> str:
    return SHOWN[folder].getvalue()


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in run_folder(run).read_metrics() if record["kind"] == kind]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A run of 2 epochs of 1000 rows in steps of 64."""
    folder = write_all(tmp_path_factory.mktemp("finished"))
    return folder, trainer(folder).fit()


def test_a_run_leaves_everything_that_was_promised(finished: tuple[Path, Result]) -> None:
    folder, result = finished
    run = folder / "runs" / "small"
    assert result.folder == run
    assert {path.name for path in run.iterdir() if path.name != ".lock"} == {
        "config.yaml", "given.yaml", "run_id", "plan.json", "metrics.jsonl", "footers.arrow",
        "checkpoints", "tensorboard", "report.html", "result.json",
    }  # fmt: skip
    raw = json.loads((run / "result.json").read_text())
    assert raw == json.loads(json.dumps(result.to_dict()))
    assert (raw["epochs"], raw["steps"], raw["world_size"], raw["train"]["samples"]) == (2, 32, 1, 2000)
    assert raw["eval"]["samples"] == 301
    assert raw["eval"]["auc"] > 0.8
    assert raw["checkpoint"] == str(run / "checkpoints" / "step_00000032-0001")
    plan = json.loads((run / "plan.json").read_text())
    assert set(plan["plan"]["embedding_bags"]) == {"user", "item", "tag"}
    assert plan["memory"][0]["weights_bytes"] == 4 * 8 * (40 + 80 + 7)
    assert [rank["rank"] for rank in plan["time"]] == [0] and plan["time"][0]["lookup_s"] > 0
    assert "Predicted time by rank" in (run / "report.html").read_text()
    assert list((run / "tensorboard").iterdir())


def test_metrics_have_a_line_for_every_logging_step(finished: tuple[Path, Result]) -> None:
    _, result = finished
    train = records(result.folder, "train")
    steps = [record["step"] for record in train]
    assert steps == sorted(set(steps))
    assert steps == [4, 8, 12, 16, 20, 24, 28, 32]
    assert train[-1]["samples"] == 2000
    assert {"loss", "ne", "auc", "lr", "attempt", "time"} <= set(train[0])
    ends = [0, *(record["samples"] for record in train)]
    rates = zip(pairwise(ends), (record["samples_per_second"] for record in train), strict=True)
    seconds = sum((stop - start) / rate for (start, stop), rate in rates)
    assert seconds == pytest.approx(result.train["seconds"], abs=2e-3)
    waited = [record["data_wait_fraction"] for record in train]
    assert all(0 < fraction < 1 for fraction in waited)
    assert 0 < result.train["data_wait_fraction"] < 1
    assert result.samples_per_second == pytest.approx(2000 / result.train["seconds"], rel=0.01)
    assert [record["step"] for record in records(result.folder, "eval")] == [16, 32]


def test_what_the_user_sees(finished: tuple[Path, Result]) -> None:
    text = shown(finished[0])
    for part in ["sharding plan", "user", "samples/s", "NE", "evaluation after epoch 1", "evaluation after epoch 2"]:
        assert part in text
    assert "evaluation AUC" in text
    assert str(finished[1].folder / "report.html") in text


def test_only_the_newest_checkpoints_are_kept(finished: tuple[Path, Result]) -> None:
    store = CheckpointStore(finished[1].folder / "checkpoints")
    assert [checkpoint.step for checkpoint in store.all()] == [24, 30, 32]


def test_a_finished_run_says_so_and_raised_epochs_go_on(tmp_path: Path) -> None:
    write_all(tmp_path, rows=300)
    first = trainer(tmp_path, trainer__epochs=1).fit()
    again = trainer(tmp_path, trainer__epochs=1).fit()
    assert again == first
    assert "is already finished" in shown(tmp_path)
    on = trainer(tmp_path, trainer__epochs=2).fit()
    straight = trainer(tmp_path, trainer__epochs=2, name="straight").fit()
    assert (on.steps, on.train["samples"], on.eval) == (straight.steps, 600, straight.eval)
    assert "resumed from the checkpoint of step 5" in shown(tmp_path)
    assert [record["event"] for record in records(on.folder, "event")].count("resumed") == 1
    assert [record["step"] for record in records(on.folder, "eval")] == [5, 10]
    fresh = trainer(tmp_path, trainer__epochs=1, fresh=True).fit()
    assert (fresh.steps, fresh.eval) == (first.steps, first.eval)
    assert len(list((tmp_path / "runs").glob("small.before-*"))) == 1


class Stops(nn.Module):
    """A model that raises in its n-th training step."""

    def __init__(self, steps: int, error: Callable[[], BaseException], **arguments: Any) -> None:
        super().__init__()
        self.inner = DLRM(**arguments)
        self.steps, self.error = steps, error

    def forward(self, batch: Batch) -> Any:
        self.steps -= self.training
        if self.steps < 0:
            raise self.error()
        return self.inner(batch)


def stops(steps: int, error: Callable[[], BaseException]) -> Callable[..., nn.Module]:
    return lambda **arguments: Stops(steps, error, **arguments)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, finished: tuple[Path, Result]) -> None:
    write_all(tmp_path)
    with pytest.raises(Interrupted, match="the checkpoint of step 18 is intact"):
        trainer(tmp_path, factory=stops(20, KeyboardInterrupt)).fit()
    run = tmp_path / "runs" / "small"
    assert records(run, "event")[-1]["event"] == "interrupted"
    assert (run / "report.html").exists()
    assert not (run / "result.json").exists()
    on = trainer(tmp_path, factory=stops(1000, KeyboardInterrupt)).fit()
    straight = finished[1]
    assert on.steps == straight.steps == 32
    assert on.train["samples"] == straight.train["samples"] == 2000
    assert on.eval == straight.eval
    assert {record["attempt"] for record in records(run, "train")} == {1, 2}


def test_an_error_in_the_model_is_told_and_checkpoints_stay(tmp_path: Path) -> None:
    write_all(tmp_path)
    with pytest.raises(TrainError, match=r"IndexError: layer 7 is missing\nthe checkpoint of step 12 is intact"):
        trainer(tmp_path, factory=stops(13, lambda: IndexError("layer 7 is missing"))).fit()
    run = tmp_path / "runs" / "small"
    assert records(run, "event")[-1]["event"] == "failed"
    assert CheckpointStore(run / "checkpoints").latest().step == 12  # type: ignore[union-attr]


def test_a_loss_that_is_not_finite_ends_the_run_before_a_checkpoint_has_it(tmp_path: Path) -> None:
    write_all(tmp_path, rows=300)
    with pytest.raises(TrainError, match=r"not finite.*lower optimizers\.dense\.lr"):
        trainer(tmp_path, optimizers__dense={"kind": "sgd", "lr": 1e30}, trainer__checkpoint_every=3).fit()
    assert CheckpointStore(tmp_path / "runs" / "small" / "checkpoints").latest() is None


@pytest.mark.parametrize("at", ["step", "evaluation"])
def test_a_stop_signal_takes_a_last_checkpoint_and_the_run_goes_on_from_it(
    tmp_path: Path, finished: tuple[Path, Result], at: str
) -> None:
    """SIGTERM in the 8th step, or in the first evaluation, whose training has ended at step 16."""
    write_all(tmp_path)
    calls = {"step": 9, "evaluation": 19}  # one more, before the first step, checks the evaluation set

    class Signals(Stops):
        def forward(self, batch: Batch) -> Any:
            calls[at] -= 1
            if calls[at] == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.5)
            return super().forward(batch)

    with pytest.raises(Interrupted, match="the checkpoint of step") as caught:
        trainer(tmp_path, factory=lambda **given: Signals(1000, KeyboardInterrupt, **given)).fit()
    assert caught.value.signal == signal.SIGTERM
    step = {"step": 9, "evaluation": 16}[at]  # asked in step 8, heard at the next
    assert f"stopped at step {step} with a complete checkpoint" in str(caught.value)
    on = trainer(tmp_path, factory=stops(1000, KeyboardInterrupt)).fit()
    straight = finished[1]
    assert on.train["samples"] == straight.train["samples"] == 2000
    assert on.eval == straight.eval


def test_another_config_is_refused_and_named(finished: tuple[Path, Result]) -> None:
    folder, _ = finished
    for changes in ({}, {"trainer__epochs": 3}):
        with pytest.raises(StorageError, match=r"trainer\.seed: 0 → 5.*--fresh"):
            trainer(folder, trainer__seed=5, **changes).fit()


def test_evaluating_a_run_gives_its_own_figures(finished: tuple[Path, Result], tmp_path: Path) -> None:
    _, result = finished
    scores = evaluate_run(result.folder, display=Display(Console(quiet=True)))
    assert result.eval is not None
    assert {name: scores[name] for name in result.eval} == result.eval
    assert scores["step"] == 32
    assert json.loads((result.folder / "evaluation.json").read_text()) == scores
    (result.folder / "evaluation.json").unlink()
    other = write(tmp_path / "other", 50, seed=9)
    assert evaluate_run(result.folder, data=str(other), display=Display(Console(quiet=True)))["samples"] == 50
    (result.folder / "evaluation.json").unlink()
    with pytest.raises(TrainError, match="is not a run folder"):
        evaluate_run(tmp_path)


def test_a_run_on_gpus_is_evaluated_in_this_process(finished: tuple[Path, Result], tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished[1].folder, copy)
    raw = yaml.safe_load((copy / "config.yaml").read_text())
    raw["trainer"] |= {"num_workers": [2, 8], "use_gpu": True, "resources": {"memory": "64GB"}}
    raw["storage"]["path"] = str(tmp_path)
    (copy / "config.yaml").write_text(yaml.safe_dump(raw))
    assert evaluate_run(copy, display=Display(Console(quiet=True)))["step"] == 32


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path: Path) -> None:
    write_all(tmp_path, rows=300)
    runs = [
        trainer(tmp_path, name=f"r{i}", trainer__seed=seed, data__eval=None).fit() for i, seed in enumerate([3, 3, 4])
    ]
    losses = [[record["loss"] for record in records(run.folder, "train")] for run in runs]
    assert losses[0] == losses[1] != losses[2]
    assert runs[0].eval is None


def with_column(name: str, values: Any, at: int | None = None) -> pa.Table:
    """The small table with one column replaced, or one value of it."""
    whole = table(300)
    if at is not None:
        column = whole[name].to_pylist()
        column[at] = values
        values = column
    return whole.set_column(whole.column_names.index(name), name, pa.array(values))


def missing_file(folder: Path) -> None:
    pq.write_table(table(10), folder / "train" / "x.parquet")
    (folder / "train").rename(folder / "elsewhere")


def empty_folder(folder: Path) -> None:
    return None


def written(make: Callable[[], pa.Table]) -> Callable[[Path], None]:
    return lambda folder: pq.write_table(make(), folder / "train" / "part.parquet", row_group_size=100)


def corrupt(folder: Path) -> None:
    file = folder / "train" / "part.parquet"
    pq.write_table(table(300), file)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])


def corrupt_inside(folder: Path) -> None:
    file = folder / "train" / "part.parquet"
    pq.write_table(table(300), file, compression="zstd")
    whole = bytearray(file.read_bytes())
    whole[40:400] = b"\xff" * 360
    file.write_bytes(bytes(whole))


WRONG: list[tuple[str, Callable[[Path], None], list[str]]] = [
    ("missing file", missing_file, ["train"]),
    ("empty folder", empty_folder, ["train"]),
    ("missing column", written(lambda: table(300).drop_columns(["user"])), ["user", "part.parquet"]),
    ("wrong column type", written(lambda: with_column("user", ["a"] * 300)), ["user", "part.parquet"]),
    ("label 2", written(lambda: with_column("label", 2, at=150)), ["label", "part.parquet", "2", "row 150"]),
    ("null id", written(lambda: with_column("user", None, at=7)), ["user", "part.parquet", "row 7"]),
    ("id out of range", written(lambda: with_column("user", 40, at=9)), ["user", "part.parquet", "40", "row 9"]),
    ("NaN", written(lambda: with_column("age", float("nan"), at=11)), ["age", "part.parquet", "row 11"]),
    ("corrupt file", corrupt, ["part.parquet"]),
    ("corrupt inside", corrupt_inside, ["part.parquet"]),
]


@pytest.mark.parametrize(("make", "parts"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_wrong_data_is_named_and_leaves_checkpoints_intact(
    tmp_path: Path, make: Callable[[Path], None], parts: list[str]
) -> None:
    (tmp_path / "train").mkdir()
    make(tmp_path)
    kept = CheckpointStore(tmp_path / "runs" / "small" / "checkpoints")
    write(tmp_path / "eval", 50)
    with pytest.raises(ValueError) as caught:
        trainer(tmp_path).fit()
    for part in parts:
        assert part in str(caught.value)
    assert kept.latest() is None or kept.latest().step % 6 == 0  # type: ignore[union-attr]


def test_bad_rows_of_the_evaluation_leave_the_checkpoints(tmp_path: Path) -> None:
    write_all(tmp_path)
    first = trainer(tmp_path, trainer__epochs=1).fit()
    pq.write_table(with_column("label", 3, at=5), tmp_path / "eval" / "bad.parquet")
    with pytest.raises(TrainError, match=r"(?s)label.*bad\.parquet.*is intact"):
        trainer(tmp_path).fit()
    latest = CheckpointStore(first.folder / "checkpoints").latest()
    assert latest is not None
    assert latest.step == 16, "they are noticed before the first step"
    (tmp_path / "eval" / "bad.parquet").unlink()
    assert trainer(tmp_path).fit().steps == 32


def test_a_storage_path_below_a_file_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"storage\.path: the run folder .* cannot be written"):
        trainer(tmp_path, storage__path=str(tmp_path / "file" / "runs"), data__train="nowhere").fit()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model__name": "dlmr"}, "no built-in model is named 'dlmr'; did you mean 'dlrm'?"),
        ({"model": {}}, "or `factory` (a custom model)"),
        (
            {"model__args": {"over_arch": [1], "dense_arch": [8], "depth": 3}},
            "model.args.depth: model dlrm does not accept it (accepted: dense_arch",
        ),
        ({"model": {"factory": "nowhere_at_all:make"}}, "'nowhere_at_all' cannot be imported"),
        ({"model": {"factory": "json:make"}}, "module 'json' has no function 'make'"),
        ({"model": {"factory": "builtins:dict"}}, "returned dict; an nn.Module is needed"),
        ({"sharding": {"plan": "/nowhere/plan.json"}}, "sharding.plan: /nowhere/plan.json cannot be read"),
    ],
)
def test_a_model_or_plan_that_cannot_be_is_refused_before_any_work(
    tmp_path: Path, changes: dict[str, Any], part: str
) -> None:
    write_all(tmp_path, rows=50)
    with pytest.raises(ValueError) as caught:
        trainer(tmp_path, **changes).fit()
    assert part in str(caught.value)
    assert not (tmp_path / "runs" / "small" / "checkpoints").exists()


def test_a_plan_from_a_file_is_checked_and_used(tmp_path: Path, finished: tuple[Path, Result]) -> None:
    write_all(tmp_path, rows=100)
    plan = json.loads((finished[1].folder / "plan.json").read_text())
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    assert trainer(tmp_path, sharding={"plan": str(file)}, trainer__epochs=1).fit().steps == 2
    kept = json.loads((tmp_path / "runs" / "small" / "plan.json").read_text())
    assert kept["plan"] == plan["plan"]
    del plan["plan"]["embedding_bags"]["tag"]
    file.write_text(json.dumps(plan))
    with pytest.raises(TrainError, match=r"table 'tag' is \(7, 8\).*does not have it"):
        trainer(tmp_path, sharding={"plan": str(file)}, name="b").fit()


def test_numbers_that_json_cannot_hold_do_not_reach_the_files(tmp_path: Path) -> None:
    """Evaluation rows of one class have no AUC."""
    write_all(tmp_path, rows=100)
    one_class = with_column("label", np.ones(300, dtype=np.int64))
    pq.write_table(one_class, tmp_path / "one.parquet")
    result = trainer(tmp_path, data__eval=str(tmp_path / "one.parquet"), trainer__epochs=1).fit()
    assert result.eval is not None
    assert result.eval["auc"] is None
    assert "NaN" not in (result.folder / "metrics.jsonl").read_text()
    assert "AUC –" in shown(tmp_path)
