"""Equal column names are one error in all formats and commands; names of columns that no table can have get one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.orc as paorc
import pyarrow.parquet as pq
import pytest

from rayrec.cli import run
from rayrec.data import DataError, Manifest, Schema, check, inspect
from rayrec.storage.column_names import check_names
from rayrec.train import parse_config
from tests.data.public import started

TWICE = pa.table([["a", "b"] * 4, ["x", "y"] * 4, ["x", "z"] * 4, [0, 1] * 4], names=["u", "c", "c", "click"])


def write_avro(path: Path) -> None:
    fastavro = pytest.importorskip("fastavro")
    fields = [{"name": name, "type": "string"} for name in ("u", "c", "c")]
    with path.open("wb") as out:
        fastavro.writer(out, {"type": "record", "name": "row", "fields": fields}, [{"u": "a", "c": "x"}] * 4)


WRITERS: dict[str, Callable[[Path], object]] = {
    "x.csv": lambda path: path.write_text("u,c,c,click\n" + "a,x,x,0\nb,y,z,1\n" * 4),
    "x.json": lambda path: path.write_text('{"u":"a","c":"x","click":0}\n{"u":"b","c":"x","c":"y","click":1}\n'),
    "x.avro": write_avro,
    "x.orc": lambda path: paorc.write_table(TWICE, path),
    "x.parquet": lambda path: pq.write_table(TWICE, path),
}
COMMANDS = [
    ["init", "FILE"],
    ["data", "inspect", "FILE"],
    ["data", "convert", "FILE", "out"],
    ["data", "sequence", "FILE", "--out", "out", "--user", "u", "--time", "click", "--column", "u"],
]


@pytest.mark.parametrize("name", WRITERS)
def test_equal_names_are_refused_with_one_text(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    WRITERS[name](tmp_path / name)
    for command in COMMANDS:
        if name == "x.parquet" and "convert" in command:
            continue  # reads other formats only
        assert run([word.replace("FILE", name) for word in command]) == 1
        error = " ".join(capsys.readouterr().err.split())
        assert "several columns are named 'c' (file" in error and name in error, (command, error)
        assert "rename one of the columns" in error
    schema = Schema.model_validate({"label": {"column": "click"}, "sparse": [{"name": "u"}]})
    with pytest.raises(DataError, match="several columns are named 'c'"):  # as `train`, also where no feature reads it
        Manifest.read(str(tmp_path / name), schema)


def test_all_files_with_equal_names_are_listed() -> None:
    files = [(f"{number}.csv", ["a", "b", *("a" * (number > 0))]) for number in range(9)]
    with pytest.raises(DataError) as caught:
        check_names(files)
    assert caught.value.file == "1.csv" and caught.value.column == "a"
    assert "the same in 2.csv, 3.csv, 4.csv, 5.csv and 3 more" in str(caught.value)
    check_names(files[:1])


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("x.csv", "", "the file has no rows"),
        ("x.csv", "a,click\n", "the file has no rows"),
        ("x.csv", "a,click\nx,1\n", "the files have a single row"),
        ("x.json", '{"a": "x", "click": 1}\n', "the files have a single row"),
        ("x.parquet", 0, "the files have no rows"),
        ("x.parquet", 1, "the files have a single row"),
    ],
)
def test_files_of_no_or_one_row(name: str, text: str | int, problem: str, tmp_path: Path) -> None:
    if isinstance(text, int):
        pq.write_table(pa.table({"a": ["x"], "click": [1]})[:text], tmp_path / name)
    else:
        (tmp_path / name).write_text(text)
    for label in (None, "click"):
        with pytest.raises(DataError, match=problem):
            started(tmp_path / name, tmp_path / f"{label}-data", label)


def test_float16_is_a_number(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = {
        "x": rng.random(300).astype(np.float16),
        "many": [[1.0, 2.0], [0.5, 3.0], [2.0, 2.5]] * 100,
        "item": rng.integers(0, 9, 300),
        "click": rng.integers(0, 2, 300),
    }
    table = pa.table(columns | {"many": pa.array(columns["many"], pa.list_(pa.float16()))})
    pq.write_table(table, tmp_path / "x.parquet")
    found = inspect(str(tmp_path))
    assert {facts.name: facts.role for facts in found.columns} == {
        "x": "dense", "many": "dense", "item": "id", "click": "label",
    }  # fmt: skip
    schema = Schema.model_validate(found.proposal()["schema"])
    assert not check(Manifest.read(str(tmp_path), schema), schema, {"item": 32}).bad_rows


def test_a_table_gets_a_name_that_fits_and_the_column_keeps_its_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = ["type", "items", "site.id", "site_id", "类别", "training", "weight"]
    columns = {name: rng.choice(["a", "b", "c"], 400) for name in names}
    columns["a.price"] = rng.random(1200)[:400]
    pq.write_table(pa.table(columns | {"click": rng.integers(0, 2, 400)}), tmp_path / "x.parquet")
    given = started(tmp_path / "x.parquet", tmp_path / "d")
    assert [feature["name"] for feature in given["schema"]["sparse"]] == names
    tables = {table["features"][0]: table["name"] for table in given["tables"]}
    assert list(tables.values())[:4] == ["type_", "items_", "site_id", "site_id_"]
    assert tables["类别"] == "类别"
    parse_config(given)  # as `train` checks it
    json.dumps(given)
