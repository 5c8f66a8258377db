"""Rows that could not be used and were left out: what the run folder, the report and the user hear of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.train import Interrupted, TrainError, evaluate_run
from tests.train.small import table, write_all
from tests.train.test_fit import records, shown, stops, trainer


def with_bad_rows(folder: Path) -> dict[str, Any]:
    """9 training and 2 evaluation rows without a label, to be skipped."""
    write_all(folder)
    for part, bad in (("train", 9), ("eval", 2)):
        rows = table(40)
        label = pa.array([None if row < bad else 1 for row in range(40)])
        place = rows.column_names.index("label")
        pq.write_table(rows.set_column(place, "label", label), folder / part / "bad.parquet")
    return {"data__read": {"reader": "local", "bad_rows": {"policy": "skip", "samples": 3}}}


def test_skipped_rows_are_kept_with_their_places(tmp_path: Path) -> None:
    result = trainer(tmp_path, **with_bad_rows(tmp_path)).fit()
    assert (result.train["samples"], result.train["skipped"]) == (2 * (1040 - 9), 18)
    assert result.eval is not None and (result.eval["samples"], result.eval["skipped"]) == (301 + 38, 2)
    told = [event for event in records(result.folder, "event") if event["event"] == "skipped"]
    for epoch in (0, 1):
        train = [event for event in told if event["epoch"] == epoch and "training rows" in event["message"]]
        assert sum(event["count"] for event in train) == 9
        samples = [sample for event in train for sample in event["samples"]]
        assert len(samples) == 3
        for sample in samples:
            assert sample["file"].endswith("train/bad.parquet") and sample["row"] < 9 and sample["column"] == "label"
    assert "2 evaluation rows could not be used and were skipped in epoch 1" in shown(tmp_path)
    report = (result.folder / "report.html").read_text()
    for part in ("Left out 22 rows that could not be used", "Rows left out", "the label is null", "bad.parquet"):
        assert part in report
    assert evaluate_run(result.folder)["skipped"] == 2


def test_skipped_rows_count_once_over_an_interruption(tmp_path: Path) -> None:
    bad = with_bad_rows(tmp_path)
    with pytest.raises(Interrupted):
        trainer(tmp_path, factory=stops(20, KeyboardInterrupt), **bad).fit()
    on = trainer(tmp_path, factory=stops(1000, KeyboardInterrupt), **bad).fit()
    assert (on.train["samples"], on.train["skipped"]) == (2 * (1040 - 9), 18)


def test_too_many_skipped_rows_end_the_run_and_are_told(tmp_path: Path) -> None:
    bad = with_bad_rows(tmp_path)
    bad["data__read"]["bad_rows"]["limit"] = 4
    with pytest.raises(TrainError, match="more than 4 bad rows were skipped"):
        trainer(tmp_path, **bad).fit()
    told = [event for event in records(tmp_path / "runs" / "small", "event") if event["event"] == "skipped"]
    assert sum(event["count"] for event in told) > 4 and told[0]["samples"]
