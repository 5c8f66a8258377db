"""What a run calls in its driver: callbacks in their order, those that fail, and MLflow's client on a file store."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import shutil
import threading
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rayrec.checkpoint import CheckpointStore
from rayrec.models import DLRM
from rayrec.train import Callback, ConfigError, Display, Interrupted, RunInfo, Trainer, TrainError, parse_config
from rayrec.train.driver.callbacks import Callbacks
from rayrec.train.driver.trackers import tracker, trackers_of, with_trackers
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


class Stops(Callback):
    """Stops the run after its first steps."""

    def on_start(self, run: RunInfo) -> None:
        self.run = run

    def on_step(self, record: Mapping[str, Any]) -> None:
        self.run.stop()

    def on_end(self, result: Any, error: Exception | None) -> None:
        self.error = error


def test_a_callback_stops_the_run(folder: Path) -> None:
    stops = Stops()
    run, _ = trainer(folder, "stops", stops, trainer__epochs=100_000, data__eval=None)
    with pytest.raises(Interrupted, match="with a complete checkpoint"):
        run.fit()
    assert isinstance(stops.error, Interrupted)
    newest = CheckpointStore(str(run.folder.checkpoints)).latest()
    assert newest is not None and newest.step > 0


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


class Waits(Callback):
    """A tracker whose server does not answer."""

    def on_step(self, record: Mapping[str, Any]) -> None:
        threading.Event().wait()


def test_a_callback_that_does_not_return_holds_nothing_up(folder: Path) -> None:
    heard = Heard()
    made, out = trainer(folder, "waits", Waits(), heard, trainer__grace_s=3)
    result = made.fit()
    assert result.steps == 8 and [step for kind, step in heard.calls if kind == "step"] == [4, 8]
    lines = map(json.loads, (result.folder / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line["kind"] == "train"] == [4, 8]
    (warning,) = result.warnings
    assert warning.startswith("Callback Waits is too slow") and warning in out.getvalue()
    assert json.loads((result.folder / "result.json").read_text())["warnings"] == [warning]


class Counts(Callback):
    def __init__(self, started: threading.Event) -> None:
        self.started, self.steps = started, list[int]()

    def on_step(self, record: Mapping[str, Any]) -> None:
        self.started.wait(60)
        self.steps.append(record["step"])


def test_of_calls_that_wait_the_oldest_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrec.train.driver.callbacks.MAX_QUEUED_CALLS", 10)
    counts = Counts(threading.Event())
    callbacks = Callbacks([counts], list)
    for step in range(100):
        callbacks.handle({"kind": "train", "step": step})
    counts.started.set()
    callbacks.close(60)
    assert counts.steps[-9:] == list(range(91, 100)) and len(counts.steps) <= 11
    assert len(callbacks.warnings) == 1 and "the oldest of 10 waiting calls" in callbacks.warnings[0]
    callbacks.handle({"kind": "train", "step": 100})
    callbacks.close(60)
    assert counts.steps[-1] == 100, "a second run of the same trainer"


class Blocks(Callback):
    """Makes a folder where the result is to be written."""

    def on_checkpoint(self, record: Mapping[str, Any]) -> None:
        (self.result / "blocked").mkdir(parents=True, exist_ok=True)

    def on_start(self, run: RunInfo) -> None:
        self.result = run.folder / "result.json"


def test_a_finished_run_whose_result_cannot_be_written_is_finished(folder: Path) -> None:
    made, out = trainer(folder, "blocked", Blocks())
    result = made.fit()
    assert Path(result.checkpoint).exists() and "Could not write" in out.getvalue()
    assert "The run is finished, and its last checkpoint is complete" in out.getvalue()
    shutil.rmtree(result.folder / "result.json")
    again = trainer(folder, "blocked")[0].fit()
    assert json.loads((again.folder / "result.json").read_text())["steps"] == result.steps


class Leaks(Callback):
    """Fails as the client of a database does whose address holds a password, at first or in the end."""

    def __init__(self, method: str) -> None:
        setattr(self, method, self._fail)

    def _fail(self, *_: Any) -> None:
        raise ConnectionError("no answer from postgresql://bob:hunter2@db.internal/runs?api_key=hunter2")


@pytest.mark.parametrize("method", ["on_start", "on_step", "on_checkpoint", "on_end"])
def test_passwords_in_the_errors_of_a_callback_are_not_recorded(folder: Path, method: str) -> None:
    made, out = trainer(folder, f"leaks-{method}", Leaks(method))
    result = made.fit()
    assert result.warnings and "postgresql://***@db.internal/runs?api_key=***" in result.warnings[0]
    assert "hunter2" not in out.getvalue() and not _holding("hunter2", result.folder)


def _holding(word: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and word.encode() in path.read_bytes()]


class LeakingModel(DLRM):
    def forward(self, batch: Any) -> Any:
        if self.training:
            raise RuntimeError("cannot read https://bob:hunter2@models.internal/weights")
        return super().forward(batch)


def test_passwords_in_the_error_of_a_failed_run_are_not_recorded(folder: Path) -> None:
    config = parse_config(raw_config(folder, name="leaks"))
    out = io.StringIO()
    made = Trainer(config, factory=LeakingModel, display=Display(Console(file=out, width=300)))
    with pytest.raises(TrainError, match="cannot read https"):
        made.fit()
    assert "cannot read https://***@models" in (made.folder.path / "metrics.jsonl").read_text()
    assert not _holding("hunter2", made.folder.path) and "hunter2" not in out.getvalue()


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


class Identified(Callback):
    def on_start(self, run: RunInfo) -> None:
        self.id = run.id


def id_of(folder: Path, name: str, fresh: bool = False, epochs: int = 1) -> str:
    identified = Identified()
    config = parse_config(raw_config(folder, name=name, trainer__epochs=epochs))
    Trainer(config, fresh=fresh, callbacks=[identified], display=Display(Console(file=io.StringIO()))).fit()
    return identified.id


def test_a_run_keeps_its_id_and_a_fresh_one_has_another(folder: Path) -> None:
    """Else the figures of a fresh run are written into the entry of the old one in a tracker."""
    first = id_of(folder, "identified")
    assert id_of(folder, "identified", epochs=2) == first != id_of(folder, "identified", fresh=True)
    path = folder / "runs" / "identified"
    (path / "run_id").unlink()
    old = id_of(folder, "identified", epochs=2)
    assert old == hashlib.sha256(str(path).encode()).hexdigest()[:32], "as before runs had ids"


def test_trackers_of_a_config_are_checked_and_flags_are_added_to_them(folder: Path) -> None:
    config = parse_config(raw_config(folder, trainer__trackers=[{"kind": "mlflow", "project": "ours", "name": "a"}]))
    assert [type(made).__name__ for made in trackers_of(config)] == ["MLflow"]
    both = with_trackers(config, ["mlflow", "wandb"]).trainer.trackers
    assert [(section.kind, section.project) for section in both] == [("mlflow", "ours"), ("wandb", "rayrec")]
    with pytest.raises(TrainError, match="must be one of mlflow, wandb, comet"):
        with_trackers(config, ["mlfow"])
    with pytest.raises(ConfigError, match=r"trainer\.trackers\.0\.kind: got .mlfow.; allowed"):
        parse_config(raw_config(folder, trainer__trackers=[{"kind": "mlfow"}]))


def test_mlflow_has_the_figures_of_the_run_and_of_its_second_part(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    uri = (tmp_path / "mlruns").as_uri()
    results = []
    for epochs in (1, 2):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        section = {"kind": "mlflow", "project": "tries"}
        made = trainer(folder, "tracked", trainer__epochs=epochs, trainer__trackers=[section])[0]
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


def tracked(folder: Path, name: str, epochs: int = 1) -> float:
    """Trains with the tracker; the AUC of the last evaluation."""
    config = parse_config(raw_config(write_all(folder, rows=256), name=f"by_{name}", trainer__epochs=epochs))
    result = Trainer(config, callbacks=[tracker(name, "tries")], display=Display()).fit()
    assert result.warnings == () and result.eval is not None
    return float(result.eval["auc"])


def test_wandb_keeps_the_figures_of_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracked(tmp_path, "wandb")
    (record,) = tmp_path.glob("runs/by_wandb/wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 120  # its service writes the file, in a process of its own
    while b"eval/auc" not in record.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    written = record.read_bytes()
    for part in (b"eval/auc", b"train/loss", b"optimizers", b"tries", b"by_wandb"):
        assert part in written, part


def test_comet_keeps_the_figures_of_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path))
    auc = tracked(tmp_path, "comet")
    (archive,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(archive) as files:
        messages = [json.loads(line) for line in files.read("messages.json").decode().splitlines()]
    figures = {
        metric["metricName"]: metric["metricValue"]
        for message in messages
        if (metric := message["payload"].get("metric")) is not None
    }
    assert float(figures["eval/auc"]) == pytest.approx(auc) and "train/loss" in figures
    settings = {of["paramName"]: of["paramValue"] for m in messages if (of := m["payload"].get("param")) is not None}
    assert float(settings["optimizers.dense.lr"]) == 0.01
