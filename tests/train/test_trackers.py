"""Weights & Biases and Comet hear a run in their offline modes: by their own clients, without account and network."""

from __future__ import annotations

import json
import time
import zipfile
from pathlib import Path

import pytest

from rayrec.train import Display, Trainer, parse_config
from rayrec.train.driver.trackers import tracker
from tests.train.small import raw_config, write_all


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
    deadline = time.monotonic() + 60  # its service writes the file, in a process of its own
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
