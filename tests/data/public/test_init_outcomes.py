"""Columns that are known only after the label are left out, with a line that says how to keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.cli import run
from rayrec.data import inspect
from tests.data.public import started

ROWS = 2000
TIMES = 1_650_000_000_000 + 1000 * np.arange(ROWS)


def found(folder: Path, columns: dict[str, Any], label: str | list[str], **options: Any) -> dict[str, Any]:
    pq.write_table(pa.table(columns), folder / "x.parquet")
    return {facts.name: facts for facts in inspect(str(folder), label=label, **options).columns}


def log(seed: int = 0, **more: Any) -> dict[str, Any]:
    """Videos that are shown, and clicked with a probability of 0.3."""
    rng = np.random.default_rng(seed)
    columns = {"user_id": rng.integers(0, 90, ROWS), "video_id": rng.integers(0, 50, ROWS), "time_ms": TIMES}
    return {**columns, "is_click": (rng.random(ROWS) < 0.3).astype(np.int64), **more}


def test_a_column_that_is_filled_or_not_zero_only_where_the_label_is_1_is_left_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    columns = log()
    del columns["time_ms"]  # the rule needs no log
    clicked = columns["is_click"] == 1
    columns["order"] = pa.array(rng.integers(0, 10**6, ROWS), mask=~clicked)
    columns["seconds"] = np.where(clicked & (rng.random(ROWS) < 0.5), rng.random(ROWS), 0.0)
    columns["liked"] = (clicked & (rng.random(ROWS) < 0.1)).astype(np.int64)
    columns["stars"] = np.where(clicked & (rng.random(ROWS) < 0.4), rng.integers(1, 6, ROWS), 0)
    columns["state"] = np.where(clicked & (rng.random(ROWS) < 0.2), "refunded", "none")
    columns["dwell"] = np.where(clicked, rng.integers(0, 9, ROWS), -1)
    columns["place"] = np.where(rng.random(ROWS) < 0.8, "top", "bottom")
    columns["answers"] = [[1] if one and n % 2 else [] for n, one in enumerate(clicked)]
    columns["reason"] = pa.array(["too long", "seen"] * (ROWS // 2), mask=clicked | (rng.random(ROWS) < 0.5))
    columns["almost"] = np.where(rng.random(ROWS) < 0.1, clicked | (rng.random(ROWS) < 0.3), 0).astype(np.int64)
    columns["holes"] = pa.array(rng.random(ROWS), mask=rng.random(ROWS) < 0.5)
    facts = found(tmp_path, columns, "is_click")
    left_out = {name for name, one in facts.items() if one.outcome}
    assert left_out == {"order", "seconds", "liked", "stars", "state", "dwell", "answers", "reason"}
    assert facts["order"].role == "unused" and "filled only where 'is_click' is 1" in facts["order"].note
    assert "not 'none' only where 'is_click' is 1" in facts["state"].note
    assert "not 0 only where 'is_click' is 1" in facts["stars"].note and "--keep stars" in facts["stars"].note
    assert "filled only where 'is_click' is 0" in facts["reason"].note
    kept = found(tmp_path, columns, "is_click", keep=["stars", "order"])
    assert kept["stars"].role == kept["order"].role.replace("dense", "id") == "id" and kept["liked"].outcome


def test_few_rows_or_a_frequent_label_prove_nothing(tmp_path: Path) -> None:
    columns = log()
    del columns["time_ms"]
    clicked = columns["is_click"] == 1
    columns["twelve"] = (clicked & (np.cumsum(clicked) <= 12)).astype(np.int64)
    assert not found(tmp_path, columns, "is_click")["twelve"].outcome
    often = (np.random.default_rng(2).random(ROWS) < 0.97).astype(np.int64)
    columns |= {"is_click": often, "half": np.where(often & (np.arange(ROWS) % 2), 3, 0)}
    assert not found(tmp_path, columns, "is_click")["half"].outcome


def test_in_a_log_another_column_of_0_and_1_is_an_outcome(tmp_path: Path) -> None:
    """Likes also come without a click here, so that only the kind of column tells."""
    rng = np.random.default_rng(3)
    columns = log(is_like=(rng.random(ROWS) < 0.2).astype(np.int64), is_follow=rng.random(ROWS) < 0.05)
    columns["is_new_user"] = columns["user_id"] % 3 // 2
    columns["time_ms"] = columns["time_ms"] + 3_600_000 * (np.arange(ROWS) // 200)
    columns["is_weekend"] = columns["time_ms"] // 3_600_000 % 2
    facts = found(tmp_path, columns, "is_click")
    assert {name for name, one in facts.items() if one.outcome} == {"is_like", "is_follow"}
    assert "--label is_like" in facts["is_like"].note and "--keep is_like" in facts["is_like"].note
    assert facts["is_new_user"].role == facts["is_weekend"].role == "id", "attributes of a user, of an hour"
    both = found(tmp_path, columns, ["is_click", "is_like"])
    assert both["is_click"].role == both["is_like"].role == "label" and both["is_follow"].outcome


def test_a_census_keeps_its_columns_of_0_and_1(tmp_path: Path) -> None:
    """It has no time, and its ones come with both labels; also where the label is the frequent value."""
    rng = np.random.default_rng(4)
    rich = rng.random(ROWS) < 0.06
    columns = {
        "married": (rng.random(ROWS) < np.where(rich, 0.8, 0.4)).astype(np.int64),
        "veteran": (rng.random(ROWS) < 0.1).astype(np.int64),
        "male": rng.random(ROWS) < 0.5,
        "gain": np.where(rng.random(ROWS) < np.where(rich, 0.3, 0.03), rng.integers(100, 9999, ROWS), 0),
        "union": (~rich & (rng.random(ROWS) < 0.3)).astype(np.int64),
        "clicked": (rng.random(ROWS) < 0.3).astype(np.int64),
        "income": np.where(rich, "50000+.", "- 50000."),
    }
    for label in ("income=50000+.", "income=- 50000."):
        facts = found(tmp_path, columns, label)
        assert [name for name, one in facts.items() if one.outcome] == ["clicked"], "only the name of a label tells"
        assert facts["married"].role == "id" and facts["male"].role == "dense"


def test_columns_are_compared_with_each_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(5)
    columns = log()
    columns["is_buy"] = (rng.random(ROWS) < 0.1).astype(np.int64)
    columns["price_paid"] = pa.array(rng.random(ROWS), mask=columns["is_buy"] == 0)
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    config = started(tmp_path / "x.parquet", tmp_path / "d", ["is_click", "is_buy"])
    schema = config["schema"]
    assert [label["name"] for label in schema["labels"]] == ["is_click", "is_buy"]
    assert config["model"]["args"]["over_arch"][-1] == 2
    assert "price_paid" not in str(schema)
    assert run(["data", "inspect", str(tmp_path / "x.parquet"), "--label", "is_click"]) == 0
    text = capsys.readouterr().err
    assert sum("is_buy: another outcome beside 'is_click'?" in line for line in text.splitlines()) == 1
    assert run(["data", "inspect", str(tmp_path / "x.parquet"), "--label", "is_click", "--keep", "is_buys"]) == 1
    assert "did you mean 'is_buy'?" in capsys.readouterr().err


def test_floats_of_0_and_1_are_a_label(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    for kind in ("float16", "float32", "float64"):
        label = (rng.random(ROWS) < 0.3).astype(kind)
        columns: dict[str, Any] = {"item": rng.integers(0, 40, ROWS), "label": label}
        pq.write_table(pa.table(columns), tmp_path / "x.parquet")
        chosen = inspect(str(tmp_path)).label
        assert chosen is not None and chosen.column == "label" and chosen.positives.sum() == label.sum()
    columns["flag"] = (rng.random(ROWS) < 0.5).astype(np.float64)
    facts = found(tmp_path, columns, "label")
    assert facts["flag"].role == "dense" and facts["flag"].mean == 0.5
    columns = {"item": rng.integers(0, 40, ROWS), "bought": rng.integers(0, 2, ROWS), "share": columns["flag"]}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    chosen = inspect(str(tmp_path)).label
    assert chosen is not None and chosen.column == "bought", "integers before floats"


def test_counters_and_keys_are_no_thresholds_and_numbers_are_plain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(7)
    columns = {
        "user": rng.integers(0, 40, ROWS),
        "n": 7 * rng.permutation(ROWS),
        "views": rng.integers(100_000, 180_000, ROWS) // 100 * 100,
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    assert run(["data", "inspect", str(tmp_path / "x.parquet")]) == 1
    error = capsys.readouterr().err
    assert "--label 'views>=140000'" in error and "--label 'n>=" not in error


@pytest.mark.parametrize("kind", [np.int64, np.float64])
@pytest.mark.parametrize("unit", [1, 1000])
def test_a_number_that_predicts_the_label_alone_is_left_out(tmp_path: Path, kind: Any, unit: int) -> None:
    """The time that a video was watched, which is not 0 for half of the rows without a click."""
    rng = np.random.default_rng(5)
    columns = log(seed=5)
    clicked = columns["is_click"] == 1
    seconds = np.where(clicked, rng.integers(5, 50, ROWS), rng.integers(0, 12, ROWS) * (rng.random(ROWS) < 0.5))
    columns["play_time"] = (seconds * unit + (rng.integers(0, unit, ROWS) if unit > 1 else 0)).astype(kind)
    columns["price"] = rng.random(ROWS) + 0.3 * clicked
    facts = found(tmp_path, columns, "is_click")
    play_time = facts["play_time"]
    assert play_time.role == "unused" and play_time.outcome
    assert "predicts 'is_click' alone with AUC 0.9" in play_time.note and "--keep play_time" in play_time.note
    assert all("predicts" not in one.note for name, one in facts.items() if name != "play_time")
    kept = found(tmp_path, columns, "is_click", keep=["play_time"])["play_time"]
    assert kept.role in ("dense", "id") and not kept.outcome and "predicts" not in kept.note
    ignored = found(tmp_path, columns, "is_click", roles={"ignore": ["play_time"]})["play_time"]
    assert ignored.role == "unused" and not ignored.note
