"""Histories from an interaction log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rayrec.cli.main import app
from rayrec.data import DataError
from rayrec.data.tools.sequence import Log, make_sequences

LOG = Log(user="user", time="at", columns=("item", "stars"))


def write_log(folder: Path, rows: int = 200) -> pa.Table:
    """Two files, not in order of time, with many ties; texts as users."""
    random = np.random.default_rng(3)
    table = pa.table(
        {
            "user": [f"u{i}" for i in random.integers(0, 7, rows)],
            "item": random.integers(0, 50, rows),
            "at": random.integers(0, 25, rows),
            "stars": random.random(rows).astype(np.float32),
            "row": np.arange(rows),
        }
    )
    folder.mkdir()
    pq.write_table(table.slice(0, 90), folder / "a.parquet")
    pq.write_table(table.slice(90), folder / "b.parquet")
    return table


def read(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("*.parquet"))])


def test_an_impression_has_what_came_strictly_before_it(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log").to_pylist()
    assert make_sequences([str(tmp_path / "log")], tmp_path / "out", LOG, length=4) == 200
    made = read(tmp_path / "out").to_pylist()
    assert [row["at"] for row in made] == sorted(row["at"] for row in log)
    assert sorted(row["row"] for row in made) == list(range(200))
    cut = 0
    for row in made:
        before = [one for one in log if one["user"] == row["user"] and one["at"] < row["at"]]
        before = sorted(before, key=lambda one: (one["at"], one["row"]))
        cut += len(before) > 4
        for column in ("item", "stars", "at"):
            assert row[f"history_{column}"] == [one[column] for one in before[-4:]]
    assert 0 < cut < 200


def test_a_user_has_one_row_with_all_of_its_log(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log").to_pylist()
    arguments = ["data", "sequence", str(tmp_path / "log"), "--out", str(tmp_path / "out"), "--user", "user"]
    arguments += ["--time", "at", "--column", "item", "--rows", "users"]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0 and "7 rows" in answer.output, answer.output
    made = read(tmp_path / "out").to_pylist()
    assert len(made) == 7
    for row in made:
        own = sorted((one for one in log if one["user"] == row["user"]), key=lambda one: (one["at"], one["row"]))
        assert row["item"] == [one["item"] for one in own] and row["at"] == [one["at"] for one in own]


def test_what_cannot_be_a_history_is_refused(tmp_path: Path) -> None:
    table = write_log(tmp_path / "log")
    with pytest.raises(DataError, match="'itm' is missing"):
        make_sequences([str(tmp_path / "log")], tmp_path / "out", Log(user="user", time="at", columns=("itm",)))
    pq.write_table(table.append_column("history_item", table["item"]), tmp_path / "again.parquet")
    with pytest.raises(DataError, match="column of this name"):
        make_sequences([str(tmp_path / "again.parquet")], tmp_path / "out", LOG)
    nulls = table.set_column(0, "user", pa.array([None] + ["u"] * 199))
    pq.write_table(nulls, tmp_path / "nulls.parquet")
    with pytest.raises(DataError, match="1 rows have a null"):
        make_sequences([str(tmp_path / "nulls.parquet")], tmp_path / "out", LOG)
