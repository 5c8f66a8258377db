"""What a run says that went through and yet is odd: in figures, and from the console to the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.train import Result, evaluate_run, parse_config
from rayrec.train.driver.warnings import at_end, at_start
from tests.train.small import RAW, raw_config, table, write_all
from tests.train.test_fit import shown, trainer

CONFIG = parse_config(RAW)  # batches of 64 rows, in this process
GOOD = {"ctr": 0.4, "ne": 0.9, "samples": 1000}


def outcome(evaluation: dict[str, Any] | None = GOOD, **train: Any) -> dict[str, Any]:
    figures = {"loss": 0.5, "ne": 0.9, "samples": 20_000, **train}
    return {"eval": evaluation, "train": figures, "epochs": 2}


def workers(number: Any) -> Any:
    return parse_config({**RAW, "trainer": {**RAW["trainer"], "num_workers": number}})


def test_a_run_without_oddities_is_told_nothing() -> None:
    assert at_start(CONFIG, 65, 2.0) == at_start(workers(2), 65, 2.0) == at_start(workers(9), 65, None) == []
    assert at_start(workers([2, 9]), 65, 2.0) == at_start(workers(1), 65, 0.5) == []
    assert at_end(CONFIG, outcome()) == at_end(CONFIG, outcome(None)) == []
    assert at_end(CONFIG, outcome({"ctr": 0.4, "ne": 1.0, "samples": 250})) == []
    assert at_end(CONFIG, outcome({"ctr": 0.9, "ne": 1.0, "samples": 1000})) == []
    assert at_end(CONFIG, outcome({"mrr": 0.5, "num_items": 11})) == at_end(CONFIG, outcome({"mrr": 0.5})) == []
    assert at_end(CONFIG, outcome({"rmse": 1.0, "r2": 0.0}, ne=None, rmse=1.0)) == []
    assert at_end(CONFIG, outcome(None, ne=None, rmse=1.0)) == []
    assert at_end(CONFIG, outcome(None, ne=None, loss=None, samples=0)) == []  # no step was logged
    assert at_end(CONFIG, outcome(samples=2 * 65)) == []


@pytest.mark.parametrize(
    ("found", "parts"),
    [
        (
            at_start(CONFIG, 64, 2.0),
            ["a single step: trainer.batch_size=64 and only 64 rows", "batch_size=3"],
        ),
        (at_start(CONFIG, 1, None), ["1 rows", "batch_size=1"]),
        (at_start(workers(3), 65, 2.5), ["3 workers share 2.5 cores", "set trainer.num_workers to 2"]),
        (at_start(workers(2), 65, 0.5), ["2 workers share 0.5 cores", "to 1 or fewer"]),
        (at_end(CONFIG, outcome(samples=2 * 64)), ["an epoch is a single step", "64 rows"]),
        (at_end(CONFIG, outcome({"ctr": 0.0, "ne": None, "samples": 1234})), ["in the 1,234 evaluation rows is 0"]),
        (at_end(CONFIG, outcome({"ctr": 1.0, "ne": None, "samples": 9})), ["every label in the 9", "rows is 1"]),
        (at_end(CONFIG, outcome({**GOOD, "ne": 1.0321})), ["has NE 1.032: worse", "storage.keep_best"]),
        (at_end(CONFIG, outcome({"rmse": 2.0, "r2": -0.25})), ["R² -0.250: worse than predicting the mean"]),
        (
            at_end(CONFIG, outcome({**GOOD, "tasks": {"buy": GOOD, "like": {**GOOD, "ne": 1.5}}})),
            ["of 'like' has NE 1.500"],
        ),
        (
            at_end(CONFIG, outcome({"ctr": 0.004, "ne": 0.9, "samples": 1000})),
            ["about 4 of the 1,000 evaluation rows have label 1", "may be off by 0.29", "data.eval"],
        ),
        (at_end(CONFIG, outcome({"ctr": 0.91, "ne": 0.9, "samples": 1000})), ["about 90 of", "label 0", "off by 0.06"]),
        (at_end(CONFIG, outcome({**GOOD, "tasks": {"buy": {**GOOD, "ctr": 0.01}}})), ["have label of 'buy' 1"]),
        (at_end(CONFIG, outcome({"mrr": 0.5, "num_items": 5})), ["HR@10 is 1 for any model", "only 5 items", "NDCG"]),
        (at_end(CONFIG, outcome(None, ne=None)), ["all labels of the last logged steps are the same"]),
    ],
)
def test_each_oddity_is_one_line_with_its_figure_and_a_way_out(found: list[str], parts: list[str]) -> None:
    (text,) = found
    assert "\n" not in text and all(part in text for part in parts)


def test_warnings_go_to_the_console_the_result_and_the_report(tmp_path: Path) -> None:
    write_all(tmp_path, rows=100)
    rows = table(50, seed=3)
    alike = rows.set_column(rows.column_names.index("label"), "label", pa.array([1] * 50))
    for file in (tmp_path / "eval").iterdir():
        pq.write_table(alike, file)
    result = trainer(tmp_path, trainer__batch_size=128, trainer__epochs=1).fit()
    one_step, one_class = sorted(result.warnings)
    assert (
        "trainer.batch_size=128 and only 100 rows" in one_step
        and "every label in the 100 evaluation rows is 1" in one_class
    )
    raw = json.loads((result.folder / "result.json").read_text())
    assert tuple(raw["warnings"]) == result.warnings
    report, text = (result.folder / "report.html").read_text(), shown(tmp_path)
    for warning in result.warnings:
        assert f"warning: {warning}" in text and f"Warning: {warning[:40]}" in report
    assert text.count(one_step) == 2, "at the start and at the end"
    assert Result.from_dict(result.folder, raw) == result
    del raw["warnings"]
    assert Result.from_dict(result.folder, raw).warnings == (), "of a run of an older version"


def test_a_run_and_evaluate_tell_that_few_rows_have_a_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_all(tmp_path, rows=200)
    rows = table(50, seed=3)
    two = pa.array([1, 1] + [0] * 48)
    for file in (tmp_path / "eval").iterdir():
        pq.write_table(rows.set_column(rows.column_names.index("label"), "label", two), file)
    result = trainer(tmp_path, trainer__epochs=1).fit()
    few = [text for text in result.warnings if "about 4 of the 100 evaluation rows have label 1" in text]
    assert len(few) == 1 and f"Warning: {few[0][:40]}" in (result.folder / "report.html").read_text()
    capsys.readouterr()
    evaluate_run(result.folder)
    assert f"warning: {few[0]}" in " ".join(capsys.readouterr().out.split())


def test_rows_before_filters_are_said_to_be_so_and_another_batch_size_is_noted(tmp_path: Path) -> None:
    write_all(tmp_path, rows=200)
    filtered = {"path": str(tmp_path / "train"), "filters": [["user", "<", 20]]}
    trainer(tmp_path, data={**raw_config(tmp_path)["data"], "train": filtered}, trainer__epochs=1).fit()
    assert "training on 197 rows in 3 files (before filters), evaluation on 301 rows in 2 files\n" in shown(tmp_path)
    trainer(
        tmp_path, data={**raw_config(tmp_path)["data"], "train": filtered}, trainer__epochs=2, trainer__batch_size=16
    ).fit()
    assert "batch size changed from 64 to 16 rows" in shown(tmp_path)
