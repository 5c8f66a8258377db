"""A whole config of files that nobody described: what is copied, what is held out, and sizes that fit."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import DataError, DataSet, Manifest, Schema, check
from rayrec.data.tools.init.make_config import Machine, _training
from tests.data.public import started

ROWS = 400
FIRST = datetime(2024, 1, 1, tzinfo=UTC)


def columns(**more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"user_id": rng.integers(0, 40, ROWS), "x": rng.normal(size=ROWS), "click": rng.integers(0, 2, ROWS), **more}


def rows_of(given: dict[str, Any]) -> list[int]:
    """The rows of the two sides of a config's `data`, read by their filters and checked by the schema."""
    schema = Schema.model_validate(given["schema"])
    tables = {table["name"]: table["rows"] for table in given["tables"]}
    found = []
    for side in ("train", "eval"):
        report = check(Manifest.of(DataSet.model_validate(given["data"][side]), schema), schema, tables)
        assert not report.bad_rows
        found.append(report.rows)
    return found


MOMENTS = [FIRST + timedelta(minutes=n * 7 % ROWS) for n in range(ROWS)]
SECONDS = [int(moment.timestamp()) for moment in MOMENTS]


@pytest.mark.parametrize(
    "times",
    [
        pa.array(SECONDS),
        pa.array([s * 1000 for s in SECONDS]),
        pa.array(MOMENTS, pa.timestamp("ns", "UTC")),
        pa.array(MOMENTS, pa.timestamp("us", "Europe/Berlin")),
        pa.array([moment.replace(tzinfo=None) for moment in MOMENTS], pa.timestamp("s")),
        pa.array([date(2024, 1, 1) + timedelta(days=n * 7 % ROWS) for n in range(ROWS)]),
        pa.array([date(2024, 1, 1) + timedelta(days=n * 7 % ROWS) for n in range(ROWS)], pa.date64()),
    ],
)
def test_parquet_with_times_stays_where_it_is_and_is_divided_by_filters(tmp_path: Path, times: pa.Array) -> None:
    pq.write_table(pa.table(columns(ts=times)), tmp_path / "x.parquet")
    said: list[str] = []
    given = started(tmp_path / "x.parquet", tmp_path / "a-data", tell=said.append)
    assert given["data"]["train"]["path"] == str(tmp_path / "x.parquet")
    assert not (tmp_path / "a-data" / "train").exists()
    train, held = rows_of(given)
    assert train + held == ROWS and 40 <= held <= 41
    assert "the last rows by 'ts'" in said[0]


def test_nothing_that_is_held_out_shapes_the_config(tmp_path: Path) -> None:
    """Two data sets that differ in the last rows by time alone: other ids, larger numbers, other nulls."""
    rng, rows = np.random.default_rng(1), 3000
    late = np.arange(rows) >= 2700
    same = {"ts": 1_700_000_000 + np.arange(rows), "click": rng.integers(0, 2, rows)}
    user, amount = rng.integers(0, 40, rows), rng.lognormal(size=rows)
    found = []
    for number in range(2):
        other = late & (number == 1)
        city = pa.array(np.where(other, "new", np.char.mod("city %d", user % 9)))
        more = {"user_id": np.where(other, 10**6 + user, user), "city": city}
        more["amount"] = pa.array(np.where(other, 1e9, amount), mask=other & (user < 9))
        pq.write_table(pa.table(same | more), tmp_path / "x.parquet")
        folder = tmp_path / f"data{number}"
        given = started(tmp_path / "x.parquet", folder)
        ids = {path.name: pq.read_table(path).to_pydict() for path in sorted((folder / "vocabularies").iterdir())}
        text = json.dumps([given["schema"], given["tables"], given["data"]]).replace(str(folder), "")
        found.append((text, ids))
        assert given["data"]["eval"]["filters"] == [["ts", ">=", 1_700_002_700]]
    assert found[0] == found[1] and set(found[0][1]) == {"user_id.parquet", "city.parquet"}


def test_without_times_a_tenth_is_drawn_where_the_rows_are(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for part in range(3):
        rows = columns(row=range(part * ROWS, (part + 1) * ROWS))
        pq.write_table(pa.table(rows), tmp_path / "in" / f"{part}.parquet")
    said: list[str] = []
    given = started(tmp_path / "in", tmp_path / "a-data", tell=said.append)
    assert given["data"]["train"]["path"] == given["data"]["eval"]["path"] == str(tmp_path / "in")
    assert [path.name for path in (tmp_path / "a-data").iterdir()] == ["vocabularies"]
    sides = rows_of(given)
    assert sum(sides) == 3 * ROWS and 0.06 < sides[1] / (3 * ROWS) < 0.14
    assert "too few for a reliable AUC" in said[-1]
    assert rows_of(started(tmp_path / "in" / "*.parquet", tmp_path / "b-data")) == sides
    pq.write_table(pa.table(columns(row=range(ROWS))).slice(0, 2), tmp_path / "two.parquet")
    with pytest.raises(DataError, match="too few rows to hold some out for evaluation"):
        started(tmp_path / "two.parquet", tmp_path / "c-data")


def test_times_that_cannot_be_cut_are_not(tmp_path: Path) -> None:
    days = pa.array([1_700_000_000] * (ROWS // 3) + [1_700_086_400] * (ROWS - ROWS // 3))
    pq.write_table(pa.table(columns(ts=days)), tmp_path / "x.parquet")
    said: list[str] = []
    started(tmp_path / "x.parquet", tmp_path / "a-data", tell=said.append)
    assert "by a hash of their number, because 'ts' has too few distinct times" in said[0]


def test_converted_files_are_written_once_and_folders_stay_columns(tmp_path: Path) -> None:
    for day in (1, 2):
        folder = tmp_path / "in" / f"day=2024-01-0{day}"
        folder.mkdir(parents=True)
        lines = [f"{n % 7},{n % 3 / 2},{n % 2},{1_700_000_000 + day * 1000 + n}" for n in range(100)]
        (folder / "x.csv").write_text("\n".join(["user_id,x,click,ts", *lines]))
    given = started(tmp_path / "in", tmp_path / "a-data")
    assert sorted(path.name for path in (tmp_path / "a-data").iterdir()) == ["eval", "train", "vocabularies"]
    train, held = (pq.read_table(given["data"][side]) for side in ("train", "eval"))
    assert (len(train), len(held)) == (180, 20) and set(train["day"].to_pylist()) > set(held["day"].to_pylist())
    assert max(train["ts"].to_pylist()) < min(held["ts"].to_pylist())


@pytest.mark.parametrize(
    ("rows", "machine", "workers", "batch", "epochs"),
    [
        (100, Machine(cores=2), 0, 8, 5),
        (90_000, Machine(cores=2), 0, 256, 5),
        (2_000_000, Machine(cores=2), 1, 8192, 3),
        (5_000_000, Machine(cores=64), 10, 8192, 3),
        (50_000_000, Machine(cores=8, gpus=4), 4, 8192, 1),
        (100, Machine(cores=64, gpus=40), 40, 40, 5),
    ],
)
def test_sizes_fit_rows_and_machine(rows: int, machine: Machine, workers: int, batch: int, epochs: int) -> None:
    found = _training(rows, machine)["trainer"]
    assert (found["num_workers"], found["batch_size"], found["epochs"]) == (workers, batch, epochs)


def test_data_that_no_model_can_be_made_of(tmp_path: Path) -> None:
    def refused(*sources: Path) -> str:
        with pytest.raises(DataError) as caught:
            started(sources, tmp_path / "a-data")
        return str(caught.value)

    pq.write_table(
        pa.table({"x": np.random.default_rng(0).normal(size=20), "label": [0, 1] * 10}), tmp_path / "x.parquet"
    )
    assert "no column contains ids or categories" in refused(tmp_path / "x.parquet")
    assert "a-data would be inside the data" in refused(tmp_path)
    (tmp_path / "y.csv").write_text("user,label\n")
    assert "the file has no rows" in refused(tmp_path / "y.csv")
    assert "this file is not Parquet, but " in refused(tmp_path)
    (tmp_path / "delta" / "_delta_log").mkdir(parents=True)
    (tmp_path / "delta" / "_delta_log" / "0.json").write_text("{}")
    pq.write_table(pa.table(columns()), tmp_path / "delta" / "x.parquet")
    assert "the folder holds a table in Delta format" in refused(tmp_path / "delta")
    pq.write_table(pa.table({"user": ["a"], "label": [1]}), tmp_path / "x.parquet")
    assert "the files have a single row" in refused(tmp_path / "x.parquet")
