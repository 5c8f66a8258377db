"""Histories from an interaction log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.cli import run
from rayrec.data import DataError
from tests.data.histories import write_histories

COLUMNS = ("item", "stars")


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
    assert write_histories(tmp_path / "log", tmp_path / "out", *COLUMNS, length=4) == {tmp_path / "out": 200}
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


def test_a_user_has_one_row_with_all_of_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path / "log").to_pylist()
    arguments = ["data", "sequence", str(tmp_path / "log"), "--out", str(tmp_path / "out"), "--user", "user"]
    arguments += ["--time", "at", "--column", "item", "--rows", "users"]
    assert run(arguments) == 0 and "7 rows" in capsys.readouterr().out
    made = read(tmp_path / "out").to_pylist()
    assert len(made) == 7
    for row in made:
        own = sorted((one for one in log if one["user"] == row["user"]), key=lambda one: (one["at"], one["row"]))
        assert row["item"] == [one["item"] for one in own] and row["at"] == [one["at"] for one in own]
        assert row["label"] == 1, "a run needs a label"


PARTS = ("train", "validation", "test")
DIVIDED = {"position": ["--split", "position"]}
DIVIDED["time"] = ["--split", "time", "--validation-from", "15", "--test-from", "20"]


def part_of(one: dict[str, Any], log: list[dict[str, Any]], by: str) -> str:
    """Written anew, a row at a time."""
    if by == "time":
        return "train" if one["at"] < 15 else "validation" if one["at"] < 20 else "test"
    own = sorted((row for row in log if row["user"] == one["user"]), key=lambda row: (row["at"], row["row"]))
    return {1: "test", 2: "validation"}.get(len(own) - own.index(one), "train") if len(own) > 2 else "train"


def sequence(folder: Path, *options: str) -> int:
    """The command, from the log in a folder to `out` beside it."""
    words = ["data", "sequence", str(folder / "log"), "--out", str(folder / "out"), "--user", "user", "--time", "at"]
    return run([*words, *options])


@pytest.mark.parametrize("by", DIVIDED)
@pytest.mark.parametrize("rows", ["impressions", "users"])
def test_divided_by_time_or_position_no_part_sees_what_is_later(
    tmp_path: Path, by: str, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_log(tmp_path / "log")
    few = pa.table(
        {"user": ["few"] * 2, "item": [1, 2], "at": [3, 4], "stars": pa.array([1, 2], pa.float32()), "row": [200, 201]}
    )
    pq.write_table(few, tmp_path / "log" / "c.parquet")
    log = [*table.to_pylist(), *few.to_pylist()]
    assert sequence(tmp_path, "--column", "item", "--column", "row", "--rows", rows, *DIVIDED[by]) == 0
    said = capsys.readouterr().out.replace("\n", "")
    parts = {name: [one for one in log if part_of(one, log, by) == name] for name in PARTS}
    for name in PARTS:
        made = read(tmp_path / "out" / name).to_pylist()
        assert f"{len(made):,} rows in {tmp_path / 'out' / name}" in said
        if rows == "impressions":
            assert sorted(row["row"] for row in made) == sorted(one["row"] for one in parts[name])
            continue
        expected = {}
        for user in {one["user"] for one in parts[name]}:
            own = sorted((one for one in log if one["user"] == user), key=lambda one: (one["at"], one["row"]))
            places = [place for place, one in enumerate(own) if one in parts[name]]
            expected[user] = [one["row"] for one in own[: (places[-1] if name == "train" else places[0]) + 1]]
        assert {row["user"]: row["row"] for row in made} == expected
        newest = {row["user"]: row["at"][-1] for row in made}
        assert all(newest[row["user"]] == max(row["at"]) for row in made)
    everyone = {one["user"] for one in log}
    assert {one["user"] for one in parts["test"]} == everyone - {"few"}


def test_a_part_without_rows_and_moments_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path / "log")
    with pytest.raises(DataError, match="'test' is empty"):
        write_histories(tmp_path / "log", tmp_path / "out", split=(10_000,))
    with pytest.raises(DataError, match="is not a time of the column"):
        write_histories(tmp_path / "log", tmp_path / "out", split=("yesterday",))
    assert not (tmp_path / "out").exists()
    for options in (["--split", "time"], ["--test-from", "3"], ["--split", "position", "--test-from", "3"]):
        assert sequence(tmp_path, "--column", "item", *options) == 2
        assert "belong together" in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_what_cannot_be_a_history_is_refused(tmp_path: Path) -> None:
    table = write_log(tmp_path / "log")
    with pytest.raises(DataError, match="'itm' is missing"):
        write_histories(tmp_path / "log", tmp_path / "out", "itm")
    pq.write_table(table.append_column("history_item", table["item"]), tmp_path / "again.parquet")
    with pytest.raises(DataError, match="already has this column"):
        write_histories(tmp_path / "again.parquet", tmp_path / "out")
    nulls = table.set_column(0, "user", pa.array([None] + ["u"] * 199))
    pq.write_table(nulls, tmp_path / "nulls.parquet")
    with pytest.raises(DataError, match="null or NaN in 1 of 200 rows"):
        write_histories(tmp_path / "nulls.parquet", tmp_path / "out")
