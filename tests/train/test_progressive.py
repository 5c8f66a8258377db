"""Day by day: an epoch trains on one day and is evaluated on the next; the same command goes on with new days."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from rayrec.train import Display, Result, Trainer, parse_config
from tests.train import small
from tests.train.row_log import noted, with_row_ids

DAY_ROWS = 90


def write_day(folder: Path, day: int) -> None:
    """Rows numbered through from day to day."""
    part = small.table(1000, seed=0).slice(day * DAY_ROWS, DAY_ROWS)
    (folder / f"day={day}").mkdir(parents=True)
    pq.write_table(part, folder / f"day={day}" / "part-0.parquet", row_group_size=40)


def fit(raw: dict[str, Any], log: Path, told: io.StringIO | None = None) -> Result:
    from functools import partial

    from tests.train.row_log import Noted

    display = Display(Console(file=told or io.StringIO()))
    return Trainer(parse_config(raw), factory=partial(Noted, str(log), {}), display=display).fit()


@pytest.mark.parametrize("shuffle", [{}, "none"])
def test_each_day_is_trained_on_after_the_model_was_evaluated_on_it(tmp_path: Path, shuffle: Any) -> None:
    for day in range(3):
        write_day(tmp_path / "days", day)
    raw = with_row_ids(tmp_path, 1000, trainer__batch_size=32)
    raw["data"] |= {"train": str(tmp_path / "days"), "eval": None, "progressive": "day", "shuffle": shuffle}
    result = fit(raw, tmp_path / "first")
    assert (result.epochs, result.eval["samples"] if result.eval else None) == (2, DAY_ROWS)
    steps = noted(tmp_path / "first", 0)
    rows = [row for step in steps for row in step]
    assert sorted(rows[:DAY_ROWS]) == list(range(DAY_ROWS))
    assert sorted(rows[DAY_ROWS:]) == list(range(DAY_ROWS, 2 * DAY_ROWS))
    if shuffle == "none":
        assert rows == sorted(rows)
    lines = (tmp_path / "runs" / "small" / "metrics.jsonl").read_text().splitlines()
    told = [record for record in map(json.loads, lines) if record["kind"] == "eval"]
    assert [(record["epoch"], record["samples"]) for record in told] == [(0, DAY_ROWS), (1, DAY_ROWS)]
    assert fit(raw, tmp_path / "none").epochs == 2 and not (tmp_path / "none").exists()
    write_day(tmp_path / "days", 3)
    assert fit(raw, tmp_path / "second").epochs == 3
    later = [row for step in noted(tmp_path / "second", 0) for row in step]
    assert sorted(later) == list(range(2 * DAY_ROWS, 3 * DAY_ROWS))


def test_what_cannot_be_progressive_is_refused(tmp_path: Path) -> None:
    write_day(tmp_path / "days", 0)
    raw = small.raw_config(tmp_path, data={"train": str(tmp_path / "days"), "progressive": "day"})
    with pytest.raises(ValueError, match="is used for evaluation only"):
        Trainer(parse_config(raw), display=Display(Console(file=io.StringIO()))).fit()
    write_day(tmp_path / "days", 1)
    raw["data"]["progressive"] = "week"
    with pytest.raises(ValueError, match="not in a folder week="):
        Trainer(parse_config(raw), display=Display(Console(file=io.StringIO()))).fit()
    for data in ({"train": str(tmp_path), "eval": str(tmp_path)}, {"train": [{"path": str(tmp_path), "weight": 1.0}]}):
        with pytest.raises(ValueError, match="progressive needs one data set"):
            parse_config(small.raw_config(tmp_path, data={**data, "progressive": "day"}))


def test_old_days_may_be_removed_and_late_ones_are_reported(tmp_path: Path) -> None:
    days = tmp_path / "days"
    write_day(days, 1)
    write_day(days, 2)
    raw = with_row_ids(tmp_path, 1000, trainer__batch_size=32)
    raw["data"] |= {"train": str(days), "eval": None, "progressive": "day"}
    trained = []
    for launch in range(3):
        told = io.StringIO()
        assert fit(raw, tmp_path / f"launch-{launch}", told).epochs == launch + 1
        trained += sorted({row // DAY_ROWS for step in noted(tmp_path / f"launch-{launch}", 0) for row in step})
        assert ("NOT trained on: day=0" in " ".join(told.getvalue().split())) == (launch == 2)
        shutil.rmtree(days / f"day={1 + launch}")
        write_day(days, 3 + launch)
        if launch == 1:
            write_day(days, 0)
    assert trained == [1, 2, 3]
    shutil.rmtree(days / "day=5")
    told = io.StringIO()
    assert fit(raw, tmp_path / "none", told).epochs == 3 and not (tmp_path / "none.0.jsonl").exists()
    assert "already finished (3 epochs); it is at day=3; next: nothing until" in " ".join(told.getvalue().split())


def test_a_run_whose_checkpoints_are_gone_begins_anew(tmp_path: Path) -> None:
    for day in range(3):
        write_day(tmp_path / "days", day)
    raw = with_row_ids(tmp_path, 1000, trainer__batch_size=32)
    raw["data"] |= {"train": str(tmp_path / "days"), "eval": None, "progressive": "day"}
    assert fit(raw, tmp_path / "first").epochs == 2
    shutil.rmtree(tmp_path / "runs" / "small" / "checkpoints")
    shutil.rmtree(tmp_path / "days" / "day=0")
    assert fit(raw, tmp_path / "second").epochs == 1


def test_files_may_be_added_between_epochs(tmp_path: Path) -> None:
    write_day(tmp_path / "days", 0)
    raw = with_row_ids(tmp_path, 1000, trainer__batch_size=32, trainer__epochs=1)
    raw["data"] |= {"train": str(tmp_path / "days"), "eval": None}
    fit(raw, tmp_path / "first")
    write_day(tmp_path / "days", 1)
    raw["trainer"]["epochs"] = 2
    assert fit(raw, tmp_path / "second").epochs == 2
    assert sorted(row for step in noted(tmp_path / "second", 0) for row in step) == list(range(2 * DAY_ROWS))
