"""A run goes on, whatever its config: stopped by a signal and launched again, it ends as if it had not been stopped."""

from __future__ import annotations

import copy
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from rayrec.checkpoint import CheckpointStore
from rayrec.cli import run
from rayrec.inference.predict import predict
from rayrec.models import BUILT_IN, RETRIEVERS
from rayrec.train import Interrupted, Trainer
from rayrec.train.after.evaluate import evaluate_run
from rayrec.train.after.export import export_run
from rayrec.train.after.index import index_run
from rayrec.train.config.difference import differing
from rayrec.train.config.file import parse_config
from rayrec.train.run.folder import RunFolder
from rayrec.train.run.resolved import ResolvedValues
from tests.cli.test_init import census, ratings
from tests.train import configs
from tests.train.chaos import MARK, marked

STOP_AT = 2  # steps


def stopping(factory: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A factory whose model sends this process Ctrl-C in a step of its training."""

    def make(**arguments: Any) -> nn.Module:
        model, steps = factory(**arguments), count(1)

        def interrupt(module: nn.Module, _: Any) -> None:
            if module.training and next(steps) == STOP_AT:
                os.kill(os.getpid(), signal.SIGINT)

        model.register_forward_pre_hook(interrupt)
        return model

    return make


def tensors(folder: RunFolder) -> dict[str, torch.Tensor]:
    """All of the newest checkpoint."""
    store = CheckpointStore(folder.checkpoints)
    latest = store.latest()
    assert latest is not None
    with store.reader(latest) as reader:
        return {key: reader.tensor(key) for key in reader.index.tensors}


def check_resolved(folder: RunFolder) -> None:
    """Only `ResolvedValues` sets the stored config apart from the given one, so a relaunch takes all of it over."""
    given, resolved = folder.read_given(), folder.read_config()
    assert given is not None and resolved is not None
    filled = ResolvedValues.of(resolved).fill(parse_config(given)).to_dict()
    counted = {"trainer.epochs"} if given["data"]["progressive"] else set()  # counted anew by each launch
    assert set(differing([filled, resolved])) <= counted, "what a run resolves gets a line in resolved.py"


def check_relaunch(raw: dict[str, Any], folder: Path, factory: Callable[..., nn.Module] | None = None) -> None:
    """Trains without a stop and with one, then uses the run that was stopped."""
    runs = {name: copy.deepcopy(raw) for name in ("whole", "stopped")}
    for name, own in runs.items():
        own["storage"] |= {"path": str(folder / name)}
    whole = Trainer(parse_config(runs["whole"]), factory=factory).fit()
    with pytest.raises(Interrupted):
        Trainer(parse_config(runs["stopped"]), factory=stopping(factory or BUILT_IN[raw["model"]["name"]])).fit()
    resumed = Trainer(parse_config(runs["stopped"]), factory=factory).fit()
    stopped = RunFolder(resumed.folder)
    check_resolved(stopped)
    assert (resumed.steps, resumed.eval) == (whole.steps, whole.eval)
    states = tensors(RunFolder(whole.folder)), tensors(stopped)
    assert states[0].keys() == states[1].keys()
    for key, tensor in states[0].items():
        assert torch.equal(tensor, states[1][key]), key
    rows = raw["data"].get("eval") or f"{raw['data']['train']}/{raw['data']['progressive']}=2"
    rows = rows["path"] if isinstance(rows, dict) else rows
    assert evaluate_run(stopped.path, rows, factory=factory)["step"] == whole.steps
    if raw["model"].get("name") in RETRIEVERS:
        index_run(stopped.path, folder / "index")
        return
    exported = export_run(stopped.path, folder / "export", data=rows, factory=factory)
    predicted = predict(str(exported.folder), rows, str(folder / "scores"))
    assert predicted.rows == sum(pq.read_metadata(file).num_rows for file in (folder / "scores").glob("*.parquet"))


@pytest.mark.parametrize("name", configs.CONFIGS)
def test_a_config_of_the_repository(name: str, tmp_path: Path) -> None:
    check_relaunch(configs.with_data(configs.of_repository(name), tmp_path / "data"), tmp_path)


@pytest.mark.parametrize("name", configs.GUIDES)
def test_a_config_of_a_guide(name: str, tmp_path: Path) -> None:
    check_relaunch(configs.with_data(configs.of_guide(name), tmp_path / "data"), tmp_path)


@pytest.mark.parametrize("name", configs.NOTEBOOKS)
def test_a_config_of_a_notebook(name: str, tmp_path: Path) -> None:
    raw, factory = configs.of_notebook(name, tmp_path)
    check_relaunch(configs.with_data(raw, tmp_path / "data"), tmp_path, factory)


def shop(path: Path) -> Path:
    """The smallest: a number, a text and a label."""
    rows = [f"{i % 97 + 0.5},{('paris', 'rome', 'oslo')[i % 3]},{int(i % 5 == 0)}" for i in range(600)]
    path.write_text("\n".join(["amount,city,bought", *rows]) + "\n")
    return path


def wide_census(path: Path) -> Path:
    """42 columns without names, numbers and texts in turn, and the label a text."""
    rows = [
        ", ".join([*(str((i * 7 + c) % 90) if c % 2 else f"kind {(i + c) % 6}" for c in range(41)),
                   "50000+." if i % 4 == 0 else "- 50000."])
        for i in range(400)
    ]  # fmt: skip
    path.write_text("\n".join(rows) + "\n")
    return path


INIT = {
    "shop": (shop, "bought"),
    "wide": (wide_census, "c41=50000+."),
    "census": (census, "c6=50000+."),
    "ratings": (ratings, "rating>=4"),
}


def init(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The config that `rayrec init` writes for a file of this kind."""
    monkeypatch.chdir(folder)
    write, label = INIT[kind]
    compressed = kind in ("census", "ratings")
    file = write(folder / f"{kind}.csv{'.gz' if compressed else ''}")
    assert run(["init", file.name, "--label", label, "--name", kind]) == 0
    raw: dict[str, Any] = yaml.safe_load((folder / f"{kind}.yaml").read_text())
    return raw


@pytest.mark.parametrize("kind", INIT)
def test_a_config_of_init(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = configs.few_steps(init(kind, tmp_path, monkeypatch))
    raw["trainer"]["batch_size"] = 64
    check_relaunch(raw, tmp_path)


def drawn_config(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as place:
        raw = data.draw(configs.drawn(configs.vocabulary(Path(place))))
        check_relaunch(configs.with_data(raw, Path(place) / "data"), Path(place))


QUICK = settings(max_examples=4, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
                 suppress_health_check=list(HealthCheck))  # fmt: skip


@QUICK
@given(data=st.data())
def test_a_drawn_config(data: st.DataObject) -> None:
    drawn_config(data)


@pytest.mark.long
@settings(QUICK, max_examples=15, derandomize=False)
@given(data=st.data())
def test_many_drawn_configs(data: st.DataObject) -> None:
    drawn_config(data)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_config_of_init_goes_on_after_sigkill_with_two_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init("census", tmp_path, monkeypatch)
    results = {}
    for name, kills in (("whole", False), ("killed", True)):
        mark = secrets.token_hex(8)
        words = [sys.executable, "-m", "rayrec.cli", "train", "census.yaml", "--name", name]
        words += [f"--set={field}" for field in ("trainer.num_workers=2", "trainer.checkpoint_every=20")]
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        env |= {"PYTHONPATH": str(configs.ROOT), MARK: mark}
        if kills:
            folder = RunFolder(tmp_path / "runs" / name)
            with open(tmp_path / "log", "w", encoding="utf-8") as log:
                process = subprocess.Popen(words, env=env, stdout=log, stderr=log, start_new_session=True)
                while not any(record.get("event") == "checkpoint" for record in folder.read_metrics()):
                    assert process.poll() is None, (tmp_path / "log").read_text()
                    time.sleep(0.01)
                for number in marked(mark):  # the command, its Ray and its workers
                    with suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)
                process.wait(60)
            assert not folder.result.exists()
        subprocess.run(words, env=env, check=True, timeout=300)
        results[name] = json.loads((tmp_path / "runs" / name / "result.json").read_text())
    whole, killed = results["whole"], results["killed"]
    assert killed["steps"] == whole["steps"] and killed["eval"]["samples"] == whole["eval"]["samples"]
    assert killed["eval"]["auc"] == pytest.approx(whole["eval"]["auc"], abs=1e-6)
    evaluate_run(tmp_path / "runs" / "killed")
    exported = export_run(tmp_path / "runs" / "killed", tmp_path / "export")
    assert predict(str(exported.folder), str(tmp_path / "census-data" / "eval"), str(tmp_path / "scores")).rows > 0
