"""Models that predict numbers, alone or beside a binary label: exported with parity, predicted, and served."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.cli import run as command
from rayrec.inference import ExportOptions, Model
from rayrec.serve import App, ModelSpec, Service
from rayrec.train import Trainer, export_run, parse_config
from tests.inference.runs import trainer_scores
from tests.serve.server import Server
from tests.train.small import raw_config
from tests.train.test_numbers import both, stars, with_stars

Config = Callable[..., dict[str, Any]]
COLUMNS = ["user", "item", "tags", "age"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Config, Path]:
    """A trained run for each config."""
    found = {}
    for config in (stars, both):
        root = tmp_path_factory.mktemp(config.__name__)
        with_stars(root)
        found[config] = Trainer(parse_config(raw_config(root, **config(root, trainer__epochs=8)))).fit().folder
    return found


@pytest.mark.parametrize(("config", "tables"), [(stars, "fp32"), (stars, "int8"), (both, "fp32"), (both, "AUTO")])
def test_a_number_is_exported_predicted_and_served_as_it_is(
    runs: dict[Config, Path], config: Config, tables: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs[config]
    assert command(["export", str(run), str(tmp_path / "out"), "--tables", tables, "--force"]) == 0
    assert "RMSE of " in (told := capsys.readouterr().out) and ("AUC of like" in told) == (config is both)
    model, logits = Model(tmp_path / "out"), torch.cat([logits for _, logits in trainer_scores(run)])
    parity = model.parity()
    of = parity["exported"] if config is stars else parity["exported"]["tasks"]["stars"]
    assert of["r2"] > 0.3 and "auc" not in of
    assert tables != "fp32" or parity["within_limits"]
    assert parity["recorded"]["rmse"] == pytest.approx(parity["trained"]["rmse"], rel=1e-5)
    assert "<td>" + f"{of['rmse']:.6f}" in (tmp_path / "out" / "parity.html").read_text()
    name = model.labels[0]
    expected = (logits if config is stars else logits[:, 0]).numpy()
    assert expected.max() > 1.5, "no probability"
    atol = {"fp32": 1e-5, "int8": 0.05, "AUTO": 0.05}[tables]

    assert command(["predict", str(tmp_path / "out"), str(run.parents[1] / "eval"), str(tmp_path / "predictions")]) == 0
    found = pq.read_table(tmp_path / "predictions")
    column = "prediction" if config is stars else "prediction_stars"
    np.testing.assert_allclose(found[column].to_numpy(), expected, rtol=0, atol=atol)
    if config is both:
        like = found["prediction_like"].to_numpy()
        np.testing.assert_allclose(like, logits[:, 1].sigmoid().numpy(), rtol=0, atol=atol)

    if not parity["within_limits"]:  # 301 rows are few: a service takes no such export
        return
    server = Server(App(Service([ModelSpec(name="ctr", path=tmp_path / "out")])))
    rows = found.select(COLUMNS).to_pylist()
    try:
        status, answer = server.ask("POST", "/score", {"rows": rows})
        assert status == 200
        np.testing.assert_allclose(answer["scores"][name], found[column].to_numpy(), rtol=1e-6, atol=1e-6)
        _, schema = server.ask("GET", "/schema")
        assert schema["label_kinds"] == (["number"] if config is stars else ["number", "binary"])
        tags = [tag for row in rows[:3] for tag in row["tags"]]
        inputs = [
            {"name": c, "datatype": "INT64", "shape": [3], "data": [row[c] for row in rows[:3]]} for c in COLUMNS[:2]
        ]
        inputs.append({"name": "age", "datatype": "FP64", "shape": [3], "data": [row["age"] for row in rows[:3]]})
        inputs.append({"name": "tags", "datatype": "INT64", "shape": [len(tags)], "data": tags})
        inputs.append(
            {"name": "tags.lengths", "datatype": "INT64", "shape": [3], "data": [len(row["tags"]) for row in rows[:3]]}
        )
        status, answer = server.ask("POST", "/v2/models/ctr/infer", {"inputs": inputs})
        assert status == 200, answer
        (output,) = [one for one in answer["outputs"] if one["name"] == name]
        np.testing.assert_allclose(output["data"], found[column].to_numpy()[:3], rtol=1e-6, atol=1e-6)
    finally:
        server.close()


def test_a_number_that_an_export_gets_wrong_is_outside_its_limits(runs: dict[Config, Path], tmp_path: Path) -> None:
    """By its RMSE, of which the trainer's own is the unit."""
    run = shutil.copytree(runs[stars], tmp_path / "run")
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "eval":
            line["rmse"] *= 1.001
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"RMSE of label: the trainer recorded \d\.\d+ for these rows, here it is"):
        export_run(run, tmp_path / "out", ExportOptions())
    assert math.isfinite(lines[0].get("loss", 0.0))
