"""What the footers say: windows, and every kind of wrong input that shows before a row is read."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import DataError, Manifest, Schema, convert
from tests.data.sets import SCHEMA, table, write


def test_small_row_groups_join_and_large_ones_are_cut(tmp_path: Path) -> None:
    folder = write(tmp_path, [950, 0, 30, 400], row_group_size=100)
    manifest = Manifest.read(str(folder), SCHEMA, window_rows=250)
    assert manifest.rows == 1380
    assert all(manifest.windows.rows[:-1] >= 250)
    small = Manifest.read(str(folder), SCHEMA, window_bytes=2000)
    assert small.rows == 1380
    assert max(small.windows.rows) < 50
    assert pickle.loads(pickle.dumps(manifest)).fingerprint == manifest.fingerprint
    assert manifest.fingerprint != small.fingerprint


@pytest.mark.parametrize("rows", [131_072, 200_003])
def test_a_large_row_group_is_cut_into_parts_of_one_size(tmp_path: Path, rows: int) -> None:
    data = pa.table({"label": pa.array(np.arange(rows) % 2), "uid": pa.array(np.arange(rows))})
    pq.write_table(data, tmp_path / "x.parquet", row_group_size=rows)
    schema = Schema.model_validate(
        {"label": {"column": "label"}, "sparse": [{"name": "uid", "mapping": {"kind": "identity"}}]}
    )
    manifest = Manifest.read(str(tmp_path), schema)
    sizes = manifest.windows.rows.tolist()
    *others, last = sizes
    assert sum(sizes) == rows and len(sizes) == rows // 65_536
    assert len(set(others)) == 1 and 0 <= others[0] - last < len(sizes)


def test_fingerprint_survives_a_move_and_notices_a_change(tmp_path: Path) -> None:
    here = Manifest.read(str(write(tmp_path / "a", [50, 60])), SCHEMA)
    there = Manifest.read(str(write(tmp_path / "b", [50, 60])), SCHEMA)
    assert here.fingerprint == there.fingerprint
    assert here.fingerprint != Manifest.read(str(write(tmp_path / "c", [50, 61])), SCHEMA).fingerprint


def test_paths_may_be_files_folders_globs_and_uris(tmp_path: Path) -> None:
    folder = write(tmp_path / "x" / "day=1", [10, 20])
    write(tmp_path / "x" / "day=2", [30])
    (folder / "_SUCCESS").write_text("")
    (folder / "notes.txt").write_text("no data")

    def rows(*paths: str) -> int:
        return Manifest.read(list(paths), SCHEMA).rows

    top = tmp_path / "x"
    assert rows(str(top)) == 60
    assert rows(str(folder / "part-001.parquet")) == 20
    assert rows(str(folder), str(folder / "part-001.parquet")) == 30
    assert rows(f"{top}/day=*/part-000.parquet") == 40
    assert rows(f"{top}/**/*.parquet") == 60
    assert rows(f"{top}/day=[2-9]/*") == 30
    assert rows(f"file://{folder}") == 30


def test_a_partition_may_begin_with_an_underscore_and_other_such_names_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / "_day=1", [10])
    write(tmp_path / "_temporary" / "_day=2", [20])
    write(tmp_path / ".day" / "0", [40])
    assert Manifest.read(str(tmp_path), SCHEMA).rows == Manifest.read(f"{tmp_path}/*/*.parquet", SCHEMA).rows == 10
    assert Manifest.read(str(tmp_path), SCHEMA, by="_day").rows_by("_day") == {1: 10}


@pytest.mark.parametrize(
    ("log", "kind", "fix"),
    [
        (".hoodie/hoodie.properties", "a table in Hudi format", r'spark\.read\.format\("hudi"\)\.load'),
        ("day=1/.hoodie_partition_metadata", "a table in Hudi format", r'spark\.read\.format\("hudi"\)\.load'),
        ("_spark_metadata/0", "the output of a Spark stream", r"spark\.read\.parquet"),
        ("_delta_log/00000000000000000000.json", "a table in Delta format", "data.train.table: delta"),
    ],
)
def test_a_folder_with_files_of_all_versions_is_refused(tmp_path: Path, log: str, kind: str, fix: str) -> None:
    table = tmp_path / "site=a"
    write(table / "day=1", [10, 20])
    (table / log).parent.mkdir(exist_ok=True)
    (table / log).write_text("v1")
    for path in (table, table / "day=1"):
        with pytest.raises(DataError, match=rf"{kind}, with the files of all its versions.*{fix}.*\*\.parquet\)"):
            Manifest.read(str(path), SCHEMA)
    assert Manifest.read(f"{table}/**/*.parquet", SCHEMA).rows == 30
    (table / "day=1" / "part-000.parquet").rename(table / "day=1" / "rows.csv")
    with pytest.raises(DataError, match="files of all its versions"):
        list(convert(str(table), tmp_path / "out"))
    (table / "day=1" / "rows.csv").rename(table / "day=1" / ".rows.log.1_0")
    (table / "day=1" / "part-001.parquet").unlink()
    for path in (table, table / "day=1"):
        with pytest.raises(DataError, match=rf"{kind}, and no file that can be read as it is.*{fix}"):
            Manifest.read(str(path), SCHEMA)


def test_wrong_paths(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, message in [
        ("nowhere", "does not exist"),
        ("empty", "no Parquet file"),
        ("*.parquet", "matches no file"),
        ("no/*.parquet", "does not exist"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            Manifest.read(str(tmp_path / path), SCHEMA)
        assert caught.value.file == str(tmp_path / path)
    with pytest.raises(DataError, match="no data paths"):
        Manifest.read([], SCHEMA)
    with pytest.raises(DataError, match="file system"):
        Manifest.read("nosuchscheme://bucket/data", SCHEMA)


def test_corrupt_and_empty_files(tmp_path: Path) -> None:
    good = write(tmp_path, [50]) / "part-000.parquet"
    data = good.read_bytes()
    for name, content in [("text", b"no parquet at all"), ("cut", data[:-20]), ("none", b"")]:
        bad = tmp_path / f"{name}.parquet"
        bad.write_bytes(content)
        with pytest.raises(DataError, match="not readable as Parquet") as caught:
            Manifest.read(str(tmp_path), SCHEMA)
        assert caught.value.file == str(bad)
        bad.unlink()
    pq.write_table(table(0), good)
    with pytest.raises(DataError, match="no rows"):
        Manifest.read(str(tmp_path), SCHEMA)


def test_a_column_that_is_missing_or_changes_type(tmp_path: Path) -> None:
    write(tmp_path, [50, 50])
    pq.write_table(table(10, city=pa.array([1] * 10, pa.int32())), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="differs between files: int32 here, string in") as caught:
        Manifest.read(str(tmp_path), SCHEMA)
    assert caught.value.file == str(tmp_path / "x.parquet") and caught.value.column == "city"
    pq.write_table(table(10).drop_columns("city"), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"column 'city' is missing in 1 of 3 files: .*x\.parquet"):
        Manifest.read(str(tmp_path), SCHEMA)
    pq.write_table(table(10).rename_columns({"city": "City"}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"column 'city' is missing in 1 of 3 files: .*; did you mean 'City'\?"):
        Manifest.read(str(tmp_path), SCHEMA)


STRINGS = pa.array(["a", "b"])
NUMBERS = pa.array([1, 2])
LISTS = pa.array([[1], [2]])
DEEP = pa.array([[[1]], [[2]]])
TIMES = pa.array(np.array([1, 2], "datetime64[s]"))
DECIMALS = pa.array([1, 2]).cast(pa.decimal128(30, 2))


@pytest.mark.parametrize(
    ("replaced", "column", "message"),
    [
        ({"label": STRINGS}, "label", "the label must be a number"),
        ({"age": STRINGS}, "age", "'age' must be a number; the column's type is string"),
        ({"age": TIMES}, "age", "must be a number; the column's type is timestamp"),
        ({"age": LISTS}, "age", "must be a number; the column's type is list"),
        ({"user_id": STRINGS}, "user_id", "'user' must be an integer; .* fix: set mapping: {kind: hash}"),
        ({"user_id": LISTS}, "user_id", "an id; .* fix: set kind: id_list"),
        ({"user_id": pa.array([1.0, 2.0])}, "user_id", "an integer or a string; .* double .*astype.'Int64'"),
        ({"user_id": DECIMALS}, "user_id", "an integer or a string; .* decimal"),
        ({"user_id": TIMES}, "user_id", "an integer or a string; .* timestamp"),
        ({"genres": NUMBERS}, "genres", "a list of ids; the column's type is int64 .* fix: set kind: id"),
        ({"genres": DEEP}, "genres", "in a list, an id; .* fix: flatten"),
    ],
)
def test_wrong_types(tmp_path: Path, replaced: dict[str, pa.Array], column: str, message: str) -> None:
    file = tmp_path / "x.parquet"
    pq.write_table(table(2, **replaced), file)
    with pytest.raises(DataError, match=message.replace("{", r"\{")) as caught:
        Manifest.read(str(file), SCHEMA)
    assert caught.value.column == column
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sparse": [{"name": "a", "colour": "red"}]}, "sparse.0.colour"),
        ({"sparse": [{"name": "a", "mapping": {"kind": "guess"}}]}, "sparse.0.mapping"),
        ({"sparse": [{"name": "a"}], "dense": [{"name": "a"}]}, "must be unique"),
        ({}, "no features"),
        (
            {"dense": [{"name": "a", "transforms": [{"kind": "standardize", "mean": 0.0, "std": 0.0}]}]},
            "dense.0.transforms.0.standardize.std",
        ),
        ({"dense": [{"name": "a", "transforms": [{"kind": "clip", "lowest": 2.0, "highest": 1.0}]}]}, "is above"),
        ({"dense": [{"name": "a", "transforms": [{"kind": "clip"}]}]}, "lowest, highest, or both"),
        ({"dense": [{"name": "a", "log1p": True}]}, "dense.0.log1p"),
        ({"sparse": [{"name": "a", "max_length": 3}]}, "max_length applies to lists"),
        ({"sparse": [{"name": "a", "on_null": "default"}]}, "set both on_null"),
        ({"sparse": [{"name": "a", "weight_column": "w"}]}, "weighted_id_list"),
    ],
)
def test_wrong_schemas(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schema.model_validate(fields)
