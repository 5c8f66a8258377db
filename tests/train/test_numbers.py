"""Labels that are numbers: from the files to loss, figures, evaluation and report, alone and beside binary ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from rayrec.data import DataError
from rayrec.metrics import LabelMetrics
from rayrec.models import Batch
from rayrec.models.loss import Head
from rayrec.train import ConfigError, TrainError, evaluate_run, parse_config
from tests.ranks import on_ranks
from tests.train.small import fit_on_rank, make_job, raw_config, score_job, write_all
from tests.train.test_fit import records, shown, trainer


def with_stars(folder: Path, rows: int = 1000) -> Path:
    """The small data set with a number to predict: of taste, and of age."""
    write_all(folder, rows)
    for path in [*(folder / "train").iterdir(), *(folder / "eval").iterdir()]:
        table = pq.read_table(path)
        user, item, age = (np.asarray(table[name]) for name in ("user", "item", "age"))
        stars = 3 + np.sin(user * 1.7) + np.cos(item * 2.3) + 0.3 * age
        pq.write_table(table.append_column("stars", pa.array(stars)), path, row_group_size=64)
    return folder


def stars(folder: Path, **changes: Any) -> dict[str, Any]:
    schema = {**raw_config(folder)["schema"], "label": {"column": "stars", "kind": "number"}}
    return {"schema": schema, **changes}


def both(folder: Path, **changes: Any) -> dict[str, Any]:
    labels = [{"name": "stars", "kind": "number"}, {"name": "like", "on_null": "ignore", "weight": 0.5}]
    schema = {**raw_config(folder)["schema"], "label": None, "labels": labels}
    return {
        "schema": schema,
        "model": {"name": "dlrm", "args": {"dense_arch": [16, 8], "over_arch": [16, 2]}},
        **changes,
    }


def test_a_number_is_trained_by_squared_error_scored_and_reported(tmp_path: Path) -> None:
    with_stars(tmp_path)
    early = {"metric": "rmse", "patience": 50}
    result = trainer(
        tmp_path, **stars(tmp_path, trainer__epochs=12, trainer__early_stopping=early, storage__keep_best="r2")
    ).fit()
    assert result.eval is not None and "auc" not in result.eval
    assert result.eval["r2"] > 0.5
    assert result.eval["rmse"] == pytest.approx(math.sqrt(result.eval["mse"]))
    assert result.eval["label_mean"] == pytest.approx(np.mean(pq.read_table(tmp_path / "eval")["stars"].to_numpy()))
    line = records(result.folder, "train")[-1]
    assert "auc" not in line and line["rmse"] == pytest.approx(math.sqrt(line["loss"]), rel=0.01)
    text, report = shown(tmp_path), (result.folder / "report.html").read_text()
    assert "RMSE" in text and "evaluation R²" in text and "AUC" not in text
    for part in ("<b>RMSE</b>", "<b>R²</b>", "<b>Squared error</b>"):
        assert part in report
    assert "<b>AUC</b>" not in report
    scores = evaluate_run(result.folder)
    assert {name: scores[name] for name in result.eval} == result.eval


def test_a_number_beside_a_binary_label(tmp_path: Path) -> None:
    with_stars(tmp_path)
    result = trainer(tmp_path, **both(tmp_path, trainer__epochs=8)).fit()
    assert result.eval is not None
    tasks = result.eval["tasks"]
    assert list(tasks) == ["stars", "like"] and tasks["stars"]["r2"] > 0.4 and tasks["like"]["auc"] > 0.65
    assert result.eval["rmse"] == tasks["stars"]["rmse"] and "auc" not in tasks["stars"]
    report = (result.folder / "report.html").read_text()
    for part in ("<b>RMSE, stars</b>", "<b>AUC, like</b>"):
        assert part in report
    assert "<b>AUC, stars</b>" not in report and "<b>RMSE, like</b>" not in report
    assert "evaluation AUC, like" in shown(tmp_path) and "evaluation RMSE, stars" in shown(tmp_path)


def scores_on_rank(group: dist.ProcessGroup, raw: dict[str, Any]) -> dict[str, Any]:
    return score_job(make_job(raw), group)


@pytest.mark.parametrize("labels", [stars, both])
def test_two_ranks_train_too_and_score_a_checkpoint_as_one_does(tmp_path: Path, labels: Any) -> None:
    with_stars(tmp_path)
    raw = raw_config(tmp_path, **labels(tmp_path, trainer__epochs=6))
    trained = on_ranks(2, fit_on_rank, raw)[0]["eval"]
    assert trained["r2"] > 0.3
    alone = score_job(make_job(raw))
    again = on_ranks(2, scores_on_rank, raw)[0]
    for name in ("mse", "mae", "r2", "label_mean", "prediction_mean", "samples"):
        assert alone[name] == pytest.approx(trained[name], abs=1e-6)
        assert again[name] == pytest.approx(trained[name], abs=1e-6)


def test_the_loss_of_one_label_and_of_several() -> None:
    random = np.random.default_rng(0)
    label = torch.from_numpy(random.normal(size=(6, 2)).astype(np.float32))
    label[:, 1] = (label[:, 1] > 0).float()
    label[2, 0] = math.nan
    logits = torch.randn(6, 2, requires_grad=True)
    weight = torch.tensor([1.0, 2.0, 1.0, 0.0, 1.0, 3.0])
    batch = Batch(torch.zeros(6, 0), None, label, weight)  # type: ignore[arg-type]
    loss, _ = Head([2.0, 0.5], label_kinds=["number", "binary"])(logits, batch)
    square = (logits[:, 0] - label[:, 0].nan_to_num()).square() * torch.tensor([1.0, 1, 0, 1, 1, 1])
    binary = torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 1], label[:, 1], reduction="none")
    torch.testing.assert_close(loss, ((2 * square + 0.5 * binary) * weight).sum() / weight.sum())
    loss.backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    one = Batch(torch.zeros(6, 0), None, label[:, 1] * 3, None)  # type: ignore[arg-type]
    mean, given = Head(None, label_kinds=["number"])(logits[:, :1], one)
    torch.testing.assert_close(mean, (given - one.label).square().mean())


def metrics_of_a_rank(group: dist.ProcessGroup) -> dict[str, Any]:
    metrics = LabelMetrics(["number", "binary", "number"], names=["a", "b", "c"])
    logits, labels, weights = examples()
    half = slice(None, 40) if group.rank() == 0 else slice(40, None)
    metrics.update(logits[half], labels[half], weights[half])
    again = LabelMetrics(["number", "binary", "number"], names=["a", "b", "c"])
    again.load_state(metrics.state())
    assert again.compute() == metrics.compute()
    return again.compute(group)


def examples() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(1)
    labels = torch.from_numpy(random.normal(5, 2, size=(100, 3)))
    labels[:, 1] = (labels[:, 1] > 5).double()
    labels[::7, 2] = math.nan
    logits = torch.from_numpy(random.normal(5, 2, size=(100, 3)))
    return logits, labels, torch.from_numpy(random.integers(0, 3, 100).astype(float))


def test_figures_of_numbers_are_exact_over_ranks() -> None:
    found = on_ranks(2, metrics_of_a_rank)
    assert found[0] == found[1]
    logits, labels, weights = (part.numpy() for part in examples())
    for name, column in (("a", 0), ("c", 2)):
        seen = ~np.isnan(labels[:, column])
        y, p, w = labels[seen, column], logits[seen, column], weights[seen]
        mse = np.average((y - p) ** 2, weights=w)
        variance = np.average((y - np.average(y, weights=w)) ** 2, weights=w)
        wanted = {
            "mse": mse, "rmse": math.sqrt(mse), "mae": np.average(abs(y - p), weights=w), "r2": 1 - mse / variance,
            "label_mean": np.average(y, weights=w), "prediction_mean": np.average(p, weights=w), "samples": seen.sum(),
        }  # fmt: skip
        assert found[0]["tasks"][name] == pytest.approx(wanted)
    assert found[0]["mse"] == found[0]["tasks"]["a"]["mse"] and "auc" in found[0]["tasks"]["b"]
    empty = LabelMetrics(["number"]).compute()
    assert empty["samples"] == 0 and all(value is None for name, value in empty.items() if name != "samples")


def test_what_cannot_be_asked_of_a_number_is_refused(tmp_path: Path) -> None:
    for changes, message in [
        ({"storage__keep_best": "auc"}, r"storage\.keep_best: auc needs a binary label"),
        ({"trainer__early_stopping": {}}, r"trainer\.early_stopping\.metric: auc needs a binary label"),
        ({"data__negative_rate": 0.5}, r"data\.negative_rate: negative sampling needs binary labels"),
    ]:
        with pytest.raises(ConfigError, match=message):
            parse_config(raw_config(tmp_path, **stars(tmp_path, **changes)))
    with pytest.raises(ConfigError, match="rmse needs a label of `kind: number`"):
        parse_config(raw_config(tmp_path, storage__keep_best="rmse"))
    grouped = {**stars(tmp_path)["schema"], "group": {"column": "user"}}
    with pytest.raises(ConfigError, match="group: metrics per group"):
        parse_config(raw_config(tmp_path, schema=grouped))


def test_a_number_that_is_none_is_told_with_its_row(tmp_path: Path) -> None:
    with_stars(tmp_path, rows=100)
    path = min((tmp_path / "train").iterdir())
    table = pq.read_table(path)
    values = table["stars"].to_numpy().copy()
    values[5] = math.inf
    pq.write_table(table.set_column(table.column_names.index("stars"), "stars", pa.array(values)), path)
    with pytest.raises(
        (DataError, TrainError), match=r"the label must be a finite number .*row 5, column 'stars', value inf"
    ):
        trainer(tmp_path, **stars(tmp_path)).fit()
