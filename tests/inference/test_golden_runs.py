"""Golden runs and exports: checkpoints of format 2 and exports of format 2 load, score and resume.

The runs are `small`'s, of one epoch: dlrm on two workers, deepfm in one process, on data in `/earlier`; their models
lived in `rayrec.models.complete`. The archive holds the config, plan, last checkpoint and export of each run, and the
first logits of each export.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
import yaml

from rayrec.inference import Model
from rayrec.train import Trainer, evaluate_run, export_run, parse_config
from rayrec.train.config.removed import without_removed
from tests.inference.runs import trained_run
from tests.train import small

GOLDEN = Path(__file__).parent / "golden" / "checkpoint_v2_export_v2.tar.xz"
NAMES = ["dlrm", "deepfm"]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("earlier")
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(root, filter="data")
    for config in root.glob("runs/*/config.yaml"):
        config.write_text(config.read_text(encoding="utf-8").replace("/earlier", str(root)), encoding="utf-8")
    return small.write_all(root, rows=300)


def first_logits(export: Path, run: Path) -> torch.Tensor:
    model = Model(export)
    return torch.cat([model.score(batch) for batch in trained_run(run).batches()])[:40]


def recorded_logits(root: Path, name: str) -> torch.Tensor:
    return torch.tensor(json.loads((root / "logits.json").read_text(encoding="utf-8"))[name])


@pytest.mark.parametrize("name", NAMES)
def test_an_earlier_export_scores_as_it_did(earlier: Path, name: str) -> None:
    logits = first_logits(earlier / "exports" / name, earlier / "runs" / name)
    torch.testing.assert_close(logits, recorded_logits(earlier, name), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_an_earlier_checkpoint_is_exported_with_the_same_scores(earlier: Path, tmp_path: Path, name: str) -> None:
    export_run(earlier / "runs" / name, tmp_path / "out")
    tables = [folder / "tables.bin" for folder in (tmp_path / "out", earlier / "exports" / name)]
    assert tables[0].read_bytes() == tables[1].read_bytes()
    logits = first_logits(tmp_path / "out", earlier / "runs" / name)
    torch.testing.assert_close(logits, recorded_logits(earlier, name), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_an_earlier_run_is_evaluated_as_it_was(earlier: Path, name: str) -> None:
    found = evaluate_run(earlier / "runs" / name)
    recorded = json.loads((earlier / "exports" / name / "parity.json").read_text(encoding="utf-8"))["recorded"]
    assert found["auc"] == pytest.approx(recorded["auc"], abs=1e-6)
    assert found["ne"] == pytest.approx(recorded["ne"], abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_an_earlier_run_goes_on(earlier: Path, tmp_path: Path, name: str) -> None:
    """In this process, whatever number of workers it had; a second epoch is better than the first."""
    shutil.copytree(earlier / "runs", tmp_path / "runs")
    raw = yaml.safe_load((tmp_path / "runs" / name / "config.yaml").read_text(encoding="utf-8"))
    raw = without_removed(raw, of_run=True)
    raw["trainer"] |= {"epochs": 2, "num_workers": 0}
    raw["storage"]["path"] = str(tmp_path / "runs")
    before = evaluate_run(earlier / "runs" / name)
    result = Trainer(parse_config(raw)).fit()
    assert result.steps == 10 and result.eval["ne"] < before["ne"]
