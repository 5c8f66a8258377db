"""What `--ids`, `--numbers`, `--lists` and `--ignore` say replaces what `init` guesses."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.cli import run
from rayrec.data import DataError, Manifest, Schema, check, inspect

ROWS = 300
RNG = np.random.default_rng(0)
COLUMNS: dict[str, pa.Array] = {
    "user_id": pa.array(RNG.integers(0, 40, ROWS)),
    "zone": pa.array(RNG.integers(0, 10**6, ROWS)),  # guessed to be a number
    "stars": pa.array(RNG.integers(0, 5, ROWS), mask=RNG.random(ROWS) < 0.1),  # guessed to be ids
    "key": pa.array([f"text {n}" for n in range(ROWS)]),  # guessed to be free text
    "row": pa.array(range(ROWS)),  # guessed to count the rows
    "weight": pa.array(RNG.random(ROWS)),
    "flag": pa.array(RNG.random(ROWS) < 0.5),
    "is_new": pa.array(RNG.integers(0, 2, ROWS)),
    "price": pa.array([round(x, 2) for x in RNG.random(ROWS)], mask=RNG.random(ROWS) < 0.1),
    "holes": pa.array(np.where(np.arange(ROWS) == 7, np.nan, RNG.random(ROWS))),
    "tags": pa.array([list(range(n % 4)) for n in range(ROWS)]),
    "marks": pa.array([["a", "b"][: n % 3] for n in range(ROWS)]),
    "vector": pa.array([[n, n % 5] for n in range(ROWS)]),
    "pairs": pa.array([[{"id": n % 9, "weight": 0.5}] for n in range(ROWS)]),
    "born": pa.array([n * 86_400 for n in range(ROWS)], pa.timestamp("s")),
    "a, b": pa.array(RNG.integers(0, 9, ROWS)),
}
TEXTS, INTEGERS = ["key"], ["user_id", "zone", "stars", "row", "is_new", "a, b"]
FITS = {
    "ids": {*TEXTS, *INTEGERS, "tags", "marks", "vector", "pairs"},
    "lists": {"tags", "marks", "vector", "pairs"},
    "numbers": {*INTEGERS, "weight", "flag", "price", "vector"},
    "ignore": {*COLUMNS} - {"born"},  # the time of the rows
}
CLICK = pa.array(RNG.integers(0, 2, ROWS))


def write(folder: Path, columns: dict[str, Any] = COLUMNS) -> str:
    pq.write_table(pa.table({**columns, "click": CLICK}), folder / "x.parquet")
    return str(folder)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(sorted(COLUMNS)), st.sampled_from(sorted(FITS)), max_size=6))
def test_stated_columns_have_their_role_and_train_or_are_refused(stated: dict[str, str]) -> None:
    """Each column is used as stated, or the error names a column that cannot be used so."""
    roles: Any = {role: [name for name in stated if stated[name] == role] for role in FITS}
    wrong = {name for name, role in stated.items() if name not in FITS[role]}
    with TemporaryDirectory() as folder:
        write(Path(folder))
        try:
            keep = [name for name, role in stated.items() if role != "ignore"]  # `is_new` looks like an outcome
            inspection = inspect(folder, roles=roles, keep=keep)
            proposal = inspection.proposal()
        except DataError as error:
            assert error.column in wrong, error
            return
        assert not wrong
        expected = {"ids": ("id", "id_list", "weighted_id_list"), "lists": ("id_list", "weighted_id_list"),
                    "numbers": ("dense",), "ignore": ("unused",)}  # fmt: skip
        for facts in inspection.columns:
            assert facts.stated == stated.get(facts.name, "")
            assert not facts.stated or facts.role in expected[facts.stated], facts
        schema = Schema.model_validate(proposal["schema"])
        tables = {table["name"]: table["rows"] for table in proposal["tables"]}
        report = check(Manifest.read(folder, schema), schema, tables)
        assert not report.bad_rows, report.samples
        names = {*(f.name for f in schema.dense), *(f.name for f in schema.sparse)}
        assert names >= {name for name, role in stated.items() if role != "ignore"}
        assert not names & {name for name, role in stated.items() if role == "ignore"}


@pytest.mark.parametrize(
    ("roles", "texts"),
    [
        ({"ids": ["zoen"]}, ["--ids zoen", "there is no column 'zoen'", "did you mean 'zone'?"]),
        ({"ids": ["user_id,zoen"]}, ["there is no column 'zoen'"]),
        ({"ids": ["zone"], "numbers": ["zone"]}, ["both --ids and --numbers name this column", "'zone'"]),
        ({"numbers": ["zone, user_id"], "ignore": ["user_id"]}, ["both --numbers and --ignore", "'user_id'"]),
        ({"numbers": ["key"]}, ["--numbers key", "type string, not numbers", "row 0", "value 'text 0'"]),
        ({"numbers": ["holes"]}, ["not finite", "row 7", "value nan"]),
        ({"numbers": ["tags"]}, ["same length, from 1", "row 0", "value []"]),
        ({"numbers": ["born"]}, ["type timestamp[ms], not numbers"]),
        ({"lists": ["key"]}, ["--lists key", "not a list", "--list COLUMN=SEPARATOR"]),
        ({"ids": ["price"]}, ["ids are integers or texts", "type double", "--type COLUMN=string"]),
        ({"ignore": ["click"]}, ["--ignore names a label", "--label"]),
        ({"ignore": ["born"]}, ["--ignore names the time of the rows", "--time"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_first_value_and_the_fix(
    tmp_path: Path, roles: Any, texts: list[str]
) -> None:
    write(tmp_path)
    with pytest.raises(DataError) as raised:
        inspect(str(tmp_path), roles=roles)
    for text in texts:
        assert text in str(raised.value)


def test_a_wrong_value_is_found_in_its_file(tmp_path: Path) -> None:
    for name, bad in (("a", False), ("b", True)):
        values = [float("inf") if bad and n == 5 else float(n) for n in range(20)]
        pq.write_table(
            pa.table({"x": values, "user_id": range(20), "click": [0, 1] * 10}), tmp_path / f"{name}.parquet"
        )
    with pytest.raises(DataError) as raised:
        inspect(str(tmp_path), roles={"numbers": ["x"]})
    assert (raised.value.file or "").endswith("b.parquet") and raised.value.row == 5


def test_a_label_needs_no_role_and_a_stated_column_is_no_label_or_time_by_guess(tmp_path: Path) -> None:
    columns = {"ts": pa.array(1_700_000_000 + np.arange(ROWS)), "user_id": COLUMNS["user_id"]}
    write(tmp_path, columns)
    found = inspect(str(tmp_path), roles={"numbers": ["ts"]})
    assert found.time is None and {c.name: c.role for c in found.columns}["ts"] == "dense"
    with pytest.raises(DataError, match="--ids names a label"):
        inspect(str(tmp_path), label="click", roles={"ids": ["click"]})
    with pytest.raises(DataError, match="--numbers names the time of the rows"):
        inspect(str(tmp_path), time="ts", roles={"numbers": ["ts"]})
    with pytest.raises(DataError, match="--ignore names the time of the rows"):
        inspect(str(tmp_path), roles={"ignore": ["ts"]})
    with pytest.raises(DataError, match="no column looks like a label"):
        inspect(str(tmp_path), roles={"ids": ["click"]}).proposal()


def test_a_stated_role_keeps_no_outcome(tmp_path: Path) -> None:
    order = pa.array(RNG.integers(0, 9, ROWS), mask=np.asarray(CLICK) == 0)
    write(tmp_path, {"user_id": COLUMNS["user_id"], "order": order})
    roles: Any = {"numbers": ["order"]}
    facts = {c.name: c for c in inspect(str(tmp_path), roles=roles).columns}
    assert facts["order"].role == "unused" and "--keep order" in facts["order"].note
    facts = {c.name: c for c in inspect(str(tmp_path), roles=roles, keep=["user_id,order"]).columns}
    assert facts["order"].role == "dense" and not facts["order"].note
    with pytest.raises(DataError, match="both --keep and --ignore name this column"):
        inspect(str(tmp_path), roles={"ignore": ["order"]}, keep=["order"])


def test_ignored_lists_are_in_no_sequence(tmp_path: Path) -> None:
    lengths = [n % 4 for n in range(ROWS)]
    lists = {name: [list(range(n)) for n in lengths] for name in ("items", "shops", "actions")}
    write(tmp_path, {"user_id": COLUMNS["user_id"], **lists})
    facts = {c.name: c for c in inspect(str(tmp_path), roles={"ignore": ["shops"]}).columns}
    assert facts["shops"].role == "unused" and not facts["shops"].sequence
    assert facts["items"].sequence == facts["actions"].sequence == "sequence_1"


def test_init_reads_text_as_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers with leading zeros, few cells with lists, whole numbers that are ids, and a column of notes."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{n % 7},{n % 40 * 1000},{'a|b' if n % 9 == 0 else 'c'},{n % 5:03d},no {n},{n % 2}" for n in range(ROWS)]
    (tmp_path / "a.csv").write_text("\n".join(["user_id,zone,genres,stars,note,click", *lines]))
    roles = ["--ids", "zone,user_id", "--numbers", "stars", "--lists", "genres", "--ignore", "note"]
    assert run(["init", "a.csv", *roles]) == 0
    shown = capsys.readouterr().out
    for text in ("id (--ids)", "dense (--numbers)", "id_list (--lists)", "unused (--ignore)", "items separated by '|'"):
        assert text in shown
    raw = yaml.safe_load((tmp_path / "a.yaml").read_text())
    assert raw["data"]["read"]["text"] == {"types": {"stars": "double"}, "lists": {"genres": "|"}}
    assert {feature["name"]: feature["kind"] for feature in raw["schema"]["sparse"]} == {
        "user_id": "id", "zone": "id", "genres": "id_list",
    }  # fmt: skip
    assert [feature["name"] for feature in raw["schema"]["dense"]] == ["stars"]
    assert pq.read_schema(next((tmp_path / "a-data" / "train").iterdir())).field("stars").type == pa.float64()


@pytest.mark.parametrize(
    ("option", "texts"),
    [
        (["--numbers", "note"], ["a.csv", "'note'", "'no 0'"]),
        (["--lists", "note"], ["--lists note", "no cell has one of the separators", "--list 'note=SEPARATOR'"]),
    ],
)
def test_text_that_is_not_as_stated_is_an_error(
    option: list[str], texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    lines = [f"{n % 7},no {n},{n % 2}" for n in range(ROWS)]
    (tmp_path / "a.csv").write_text("\n".join(["user_id,note,click", *lines]))
    assert run(["init", "a.csv", *option]) == 1
    shown = " ".join(capsys.readouterr().err.split())
    for text in texts:
        assert text in shown
    assert not (tmp_path / "a-data").exists() and not (tmp_path / "a.yaml").exists()
