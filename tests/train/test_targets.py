"""Whole runs with weights, several labels, groups, times and down-sampled negatives: from the files to the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.checkpoint import CheckpointStore
from rayrec.train import (
    ConfigError,
    StorageError,
    TrainError,
    evaluate_run,
    parse_config,
)
from rayrec.train.worker.evaluation import Scores
from tests.train.small import learner_of, make_job, rank_session, raw_config, table, write_all
from tests.train.test_fit import records, shown, trainer
from tests.train.test_loop import batches

LABELS = [{"name": "click", "column": "label"}, {"name": "like", "on_null": "ignore", "weight": 0.5}]


def several_labels(folder: Path, **changes: Any) -> dict[str, Any]:
    schema = {**raw_config(folder)["schema"], "label": None, "labels": LABELS, "sample_weight": {"column": "weight"}}
    model = {"name": "dlrm", "args": {"dense_arch": [16, 8], "over_arch": [16, 2]}}
    return {"schema": schema, "model": model, **changes}


def test_several_labels_and_weights_from_the_files_to_the_report(tmp_path: Path) -> None:
    write_all(tmp_path)
    result = trainer(tmp_path, **several_labels(tmp_path)).fit()
    assert result.eval is not None
    tasks = result.eval["tasks"]
    assert list(tasks) == ["click", "like"]
    assert all(figures["auc"] > 0.65 for figures in tasks.values())
    assert result.eval["auc"] == tasks["click"]["auc"] and tasks["click"]["samples"] == 301
    assert tasks["like"]["samples"] == 301 - pq.read_table(tmp_path / "eval")["like"].null_count
    assert set(records(result.folder, "train")[-1]["tasks"]) == {"click", "like"}
    assert records(result.folder, "eval")[-1]["tasks"] == tasks
    text, report = shown(tmp_path), (result.folder / "report.html").read_text()
    for part in ("click", "like"):
        assert f"evaluation AUC, {part}" in text
        assert f"<td>{part}</td>" in report and f"<b>AUC, {part}</b>" in report
    assert evaluate_run(result.folder)["tasks"] == tasks


def test_weights_of_the_evaluation_are_those_of_the_rows(tmp_path: Path) -> None:
    """The same model scored without weights, and on a file where a row stands as often as it weighs."""
    write_all(tmp_path, rows=300)
    schema = {**raw_config(tmp_path)["schema"], "sample_weight": {"column": "weight"}}
    result = trainer(tmp_path, schema=schema, trainer__epochs=1).fit()
    rows = pq.read_table(tmp_path / "eval")
    times = (np.asarray(rows["weight"]) * 2).astype(int)
    once = rows.take(np.repeat(np.arange(len(rows)), times))
    once = once.set_column(once.column_names.index("weight"), "weight", pa.array(np.ones(len(once))))
    pq.write_table(once, tmp_path / "once.parquet")
    again = evaluate_run(result.folder, str(tmp_path / "once.parquet"))
    assert result.eval is not None
    for name in ("auc", "ne", "logloss", "calibration"):
        assert again[name] == pytest.approx(result.eval[name], rel=1e-6)
    assert (result.eval["samples"], again["samples"]) == (301, int(times.sum()))


@pytest.mark.parametrize("loss", [{"kind": "pairwise", "within": "group"}, {"kind": "listnet"}, {"kind": "ziln"}])
def test_losses_of_groups_and_values_train_from_a_config(tmp_path: Path, loss: dict[str, Any]) -> None:
    write_all(tmp_path)
    schema = {**raw_config(tmp_path)["schema"], "group": {"column": "city"}}
    model = {"name": "dlrm", "args": {"dense_arch": [16, 8], "over_arch": [16, 1]}, "loss": loss}
    if loss["kind"] == "ziln":  # of the weight, which is 0 in a quarter of the rows
        schema |= {"label": {"column": "weight", "kind": "number"}, "group": None}
        model["args"] = {"dense_arch": [16, 8], "over_arch": [16, 3]}
    result = trainer(tmp_path, schema=schema, model=model, trainer__num_workers=0, trainer__epochs=2).fit()
    assert result.eval is not None
    if loss["kind"] == "ziln":
        assert abs(result.eval["prediction_mean"] - result.eval["label_mean"]) < 0.2
    else:
        assert result.eval["gauc"] > 0.7, result.eval


def test_groups_and_times_break_evaluations_down(tmp_path: Path) -> None:
    """Training files need not have these columns."""
    write_all(tmp_path)
    for file in sorted((tmp_path / "train").iterdir()):
        pq.write_table(pq.read_table(file).drop_columns(["at", "city"]), file)
    schema = {**raw_config(tmp_path)["schema"], "group": {"column": "city"}}
    schema["timestamp"] = {"column": "at", "bucket": "day"}
    result = trainer(tmp_path, schema=schema).fit()
    assert result.eval is not None
    assert abs(result.eval["gauc"] - result.eval["auc"]) < 0.1 and result.eval["groups"] == 9
    days = result.eval["by_time"]
    assert [day["start"] for day in days] == ["2023-11-14", "2023-11-15", "2023-11-16", "2023-11-17"]
    assert sum(day["samples"] for day in days) == 301
    assert "GAUC 0." in shown(tmp_path)
    report = (result.folder / "report.html").read_text()
    assert "Last evaluation by time" in report and "2023-11-15" in report and "GAUC" in report
    assert evaluate_run(result.folder)["by_time"] == days


def test_slices_are_evaluations_of_the_rows_with_each_value(tmp_path: Path) -> None:
    write_all(tmp_path)
    (tmp_path / "cities.txt").write_text("".join(f"city {i}\n" for i in range(7)))  # of nine
    raw = raw_config(tmp_path)
    city = {"name": "city", "mapping": {"kind": "vocabulary", "path": str(tmp_path / "cities.txt")}}
    schema = {**raw["schema"], "sparse": [*raw["schema"]["sparse"], city]}
    tables = [*raw["tables"], {"name": "city", "rows": 8, "dim": 8, "features": ["city"]}]
    result = trainer(tmp_path, schema=schema, tables=tables, trainer__slices=["city", "user"]).fit()
    assert result.eval is not None
    by_city, by_user = result.eval["by_value"]["city"], result.eval["by_value"]["user"]
    rows = pq.read_table(tmp_path / "eval")
    cities, counts = np.unique(rows["city"].to_numpy(), return_counts=True)
    sizes = {name: int(count) for name, count in zip(cities, counts, strict=True)}
    others = sizes.pop("city 7") + sizes.pop("city 8")
    assert {line["value"]: line["samples"] for line in by_city} == {**sizes, "(not in the vocabulary)": others}
    assert {line["value"] for line in by_user} == {str(user) for user in rows["user"].to_pylist()}
    assert [line["samples"] for line in by_user] == sorted((line["samples"] for line in by_user), reverse=True)
    for line in [line for line in by_city if line["value"] in sizes][:3]:
        pq.write_table(rows.filter(pc.field("city") == line["value"]), tmp_path / "slice.parquet")
        again = evaluate_run(result.folder, str(tmp_path / "slice.parquet"))
        for name in ("ne", "logloss", "calibration", "samples"):
            assert line[name] == pytest.approx(again[name], rel=1e-6), name
        assert line["auc"] == pytest.approx(again["auc"], abs=1e-3)
    report = (result.folder / "report.html").read_text()
    assert "Last evaluation by value" in report and "city 3" in report
    for wrong, message in [
        ("town", "no sparse feature is named 'town'"),
        ("tags", "must be of kind id"),
        ("item", "mapped by identity or a vocabulary"),
    ]:
        with pytest.raises(ConfigError, match=f"trainer.slices.0.*{message}"):
            parse_config({**raw, "trainer": {**raw["trainer"], "slices": [wrong]}})
    raw["tables"][0]["rows"] = 1001
    with pytest.raises(ConfigError, match="slices may have 1,000"):
        parse_config({**raw, "trainer": {**raw["trainer"], "slices": ["user"]}})


@pytest.mark.parametrize(("bad", "value"), [(-0.5, "-0.5"), (float("nan"), "nan"), (None, "None")])
def test_a_bad_weight_is_a_bad_row(tmp_path: Path, bad: float | None, value: str) -> None:
    write_all(tmp_path, rows=300)
    schema = {**raw_config(tmp_path)["schema"], "sample_weight": {"column": "weight"}}
    rows = table(20).drop_columns("weight").append_column("weight", pa.array([1.0] * 12 + [bad] + [1.0] * 7))
    pq.write_table(rows, tmp_path / "train" / "part-9.parquet")
    with pytest.raises(TrainError, match=rf"sample weight must be .*part-9.*row 12, column 'weight', value {value}"):
        trainer(tmp_path, schema=schema).fit()
    read = {"reader": "local", "bad_rows": {"policy": "skip"}}
    result = trainer(tmp_path, schema=schema, data__read=read, trainer__epochs=1, fresh=True).fit()
    assert result.train["samples"] == 319


def test_fewer_negatives_and_predictions_that_fit_all_rows(tmp_path: Path) -> None:
    """q = p / (p + (1 - p) / w), in training as from a checkpoint."""
    write_all(tmp_path, rows=4000)
    label = pq.read_table(tmp_path / "train")["label"].to_numpy()
    result = trainer(tmp_path, data__negative_rate=0.2, trainer__epochs=2).fit()
    all_rows = trainer(tmp_path, name="all", trainer__epochs=2).fit()
    expected = 2 * (label.sum() + 0.2 * (label == 0).sum())
    assert abs(result.train["samples"] - expected) < 0.1 * expected
    assert "in 3 files (negatives at a rate of 0.2), evaluation on 301 rows in 2 files" in shown(tmp_path)
    assert "run all: training on 4,000 rows in 3 files, evaluation" in shown(tmp_path)
    assert result.eval is not None and all_rows.eval is not None
    assert result.eval["samples"] == 301, "evaluations read all rows"
    assert result.eval["calibration"] == pytest.approx(all_rows.eval["calibration"], abs=0.12)
    assert result.eval["ne"] < 0.9 and result.eval["auc"] > all_rows.eval["auc"] - 0.05
    latest = CheckpointStore(result.folder / "checkpoints").latest()
    assert latest is not None and latest.extra["logit_shift"] == pytest.approx(np.log(0.2))
    assert evaluate_run(result.folder)["ne"] == result.eval["ne"]
    with pytest.raises(StorageError, match=r"data\.negative_rate: 0\.2 → 0\.5"):
        trainer(tmp_path, data__negative_rate=0.5, trainer__epochs=3).fit()


def test_the_correction_is_the_formula(tmp_path: Path) -> None:
    write_all(tmp_path, rows=10)
    config = parse_config(raw_config(tmp_path, data__negative_rate=0.1))
    session = rank_session()
    job = make_job(config.to_dict())
    learner = learner_of(job, session)
    learner.model.eval()
    (batch,) = batches([50], 0)
    p = torch.sigmoid(replace(learner, logit_shift=0.0).score(batch)).double()
    q = torch.sigmoid(learner.score(batch)).double()
    torch.testing.assert_close(q, p / (p + (1 - p) / 0.1), rtol=1e-5, atol=0)


def scores_of(bucket: str) -> Scores:
    raw = raw_config(Path("/nowhere"))
    raw["schema"]["timestamp"] = {"column": "at", "bucket": bucket}
    return Scores(parse_config(raw).data_schema, rank_session())


@pytest.mark.parametrize(
    ("bucket", "times", "starts"),
    [
        ("hour", [0, 3599, 3600, 90_000], ["1970-01-01 00:00"] * 2 + ["1970-01-01 01:00", "1970-01-02 01:00"]),
        ("day", [0, 86_399, 86_400], ["1970-01-01", "1970-01-01", "1970-01-02"]),
        ("week", [0, 4 * 86_400 - 1, 4 * 86_400, 11 * 86_400], ["1969-12-29"] * 2 + ["1970-01-05", "1970-01-12"]),
    ],
)
def test_stretches_of_time_begin_at_whole_hours_days_and_mondays(bucket: str, times: Any, starts: list[str]) -> None:
    for at, start in zip(times, starts, strict=True):
        scores = scores_of(bucket)
        (batch,) = batches([2], 0)
        batch = replace(batch, time=torch.tensor([at, at]))
        scores.add(batch, torch.tensor([0.5, -0.5]))
        (stretch,) = scores.compute()["by_time"]
        assert stretch["start"] == start and stretch["samples"] == 2
