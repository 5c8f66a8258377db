"""What a run calls in its driver: callbacks in their order, those that fail, and MLflow's client on a file store."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rayrec.train import Callback, Display, RunInfo, Trainer, TrainError, parse_config
from rayrec.train.config.difference import flat
from rayrec.train.driver.trackers import MLflow, tracker
from rayrec.train.run.log import metrics_of
from tests.train.small import raw_config, write_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("callbacks"), rows=256)


def trainer(folder: Path, name: str, *callbacks: Callback, **changes: Any) -> tuple[Trainer, io.StringIO]:
    out = io.StringIO()
    config = parse_config(raw_config(folder, name=name, **changes))
    return Trainer(config, callbacks=callbacks, display=Display(Console(file=out, width=300))), out


class Heard(Callback):
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_start(self, run: RunInfo) -> None:
        self.calls.append(("start", run.name))

    def on_step(self, record: Mapping[str, Any]) -> None:
        self.calls.append(("step", record["step"]))

    def on_evaluation(self, record: Mapping[str, Any]) -> None:
        self.calls.append(("evaluation", (record["step"], record["auc"])))

    def on_checkpoint(self, record: Mapping[str, Any]) -> None:
        self.calls.append(("checkpoint", record["step"]))

    def on_end(self, result: Any, error: Exception | None) -> None:
        written = None if result is None else json.loads((result.folder / "result.json").read_text())
        self.calls.append(("end", (written, error)))


class Fails(Callback):
    """Raises wherever it is called."""

    def on_start(self, run: RunInfo) -> None:
        raise ValueError("no room")

    def on_step(self, record: Mapping[str, Any]) -> None:
        raise SystemExit(3)

    def on_end(self, result: Any, error: Exception | None) -> None:
        raise RuntimeError("late")


def test_callbacks_hear_the_run_in_its_order(folder: Path) -> None:
    heard = Heard()
    result = trainer(folder, "heard", heard)[0].fit()
    kinds = [kind for kind, _ in heard.calls]
    assert kinds[0] == "start" and kinds[-1] == "end" and kinds.count("evaluation") == 2
    assert [at for kind, at in heard.calls if kind == "step"] == [4, 8]
    assert {6, 8} <= {at for kind, at in heard.calls if kind == "checkpoint"}
    assert result.eval is not None and ("evaluation", (8, result.eval["auc"])) in heard.calls
    written, error = heard.calls[-1][1]
    assert written == json.loads(json.dumps(result.to_dict())) and error is None


def test_a_callback_that_fails_is_reported_and_the_others_go_on(folder: Path) -> None:
    heard = Heard()
    made, out = trainer(folder, "fails", Fails(), heard)
    result = made.fit()
    texts = ["on_start failed (ValueError: no room)", "on_step failed (SystemExit: 3)", "on_end failed (RuntimeError: "]
    assert len(result.warnings) == 3
    for text, warning in zip(texts, result.warnings, strict=True):
        assert f"Callback Fails.{text}" in warning and text in out.getvalue()
    assert json.loads((result.folder / "result.json").read_text())["warnings"] == list(result.warnings)
    assert [kind for kind, _ in heard.calls].count("step") == 2


def test_the_end_is_heard_of_a_run_that_fails_too(folder: Path) -> None:
    heard = Heard()
    guards = {"min_auc": 0.999, "patience": 1}
    with pytest.raises(TrainError, match="min_auc") as caught:
        trainer(folder, "failed", heard, trainer__guards=guards)[0].fit()
    assert heard.calls[-1] == ("end", (None, caught.value))


def test_what_is_no_callback_is_refused(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"callbacks: list is not a rayrec\.train\.Callback"):
        trainer(folder, "refused", [])  # type: ignore[arg-type]
    with pytest.raises(TrainError, match="must be one of mlflow, wandb, comet"):
        tracker("mlfow", "x")


def test_figures_of_a_record_have_names_of_their_own() -> None:
    record = {"kind": "eval", "step": 3, "auc": 0.5, "partial": True, "tasks": {"like": {"ne": 1}}, "lr": {"dense": 2}}
    record["tables"] = {"user": {"ids": 3}}
    assert metrics_of(record) == {"eval/auc": 0.5, "eval/tasks/like/ne": 1.0, "eval/lr/dense": 2.0}
    assert flat({"a": {"b": 1, "c": [2]}, "d": None}) == {"a.b": 1, "a.c": [2], "d": None}


def test_mlflow_has_the_figures_of_the_run_and_of_its_second_part(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    uri = (tmp_path / "mlruns").as_uri()
    results = []
    for epochs in (1, 2):
        made = trainer(folder, "tracked", MLflow("tries", uri), trainer__epochs=epochs)[0]
        results.append(made.fit())
    assert [result.warnings for result in results] == [(), ()]
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tries").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "tracked")
    assert run.data.params["optimizers.dense.lr"] == "0.01"
    assert results[1].eval is not None
    history = client.get_metric_history(run.info.run_id, "eval/auc")
    assert [point.step for point in history] == [4, 8] and history[-1].value == results[1].eval["auc"]
    assert "train/loss" in run.data.metrics
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["report.html"]
