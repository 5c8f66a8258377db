"""Fields of struct columns are columns named `user.id`: every reader sees what it sees in the flattened file."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.cli import run
from rayrec.data import (
    DataError,
    DataSet,
    FooterIndex,
    FooterReading,
    Manifest,
    Mapping,
    Schema,
    check,
    inspect,
    write_index,
)
from rayrec.data.stream.reading import read_window
from rayrec.storage import open_parquet
from rayrec.storage.struct_fields import columns_named, leaf_columns, leaf_table, with_types

ROWS = 300
FIELDS = [("user", "id", "id"), ("city", "home.city", "id"), ("tags", "home.tags", "id_list")]
SCHEMA = Schema.model_validate(
    {
        "label": {"column": "seen.click"},
        "timestamp": {"column": "seen.at"},
        "dense": [{"name": "age", "column": "user.age", "default": 0}],
        "sparse": [
            {
                "name": name,
                "column": f"user.{field}",
                "kind": kind,
                "mapping": {"kind": "hash"},
                "id_type": "text",
                "on_null": "empty",
            }
            for name, field, kind in FIELDS
        ],
    }
)
SIZES = {"user": 64, "city": 64, "tags": 64}


def row_of(number: int) -> dict[str, Any]:
    home = {"city": f"city {number % 7}", "tags": ["a", "b", "c"][: number % 4], "unused": number}
    user = {"id": f"{number % 40:03d}", "age": number * 7 % 90, "home": home}
    return {
        "user": user,
        "item": number % 9,
        "seen": {"click": number % 2, "at": 1_700_000_000 + 3600 * number},
    }


LOG = pa.Table.from_pylist([row_of(number) for number in range(ROWS)])


def mapped(path: Path, filters: list[Any] | None = None) -> list[Any]:
    """The rows of a data set, as its batches have them."""
    manifest = Manifest.read(str(path), SCHEMA, filters=filters or [])
    mapping = Mapping(SCHEMA, SIZES)
    rows: list[Any] = []
    for number in range(len(manifest.windows)):
        table, problems = read_window(manifest, number)
        assert not problems
        batch = mapping.to_batch(table)
        rows.append([table.select(sorted(table.column_names)).to_pydict(), batch.dense.tolist(), str(batch.sparse)])
    return rows


@pytest.mark.parametrize("filters", [[], [["user.home.city", "=", "city 3"]], [["user.age", ">=", 60]]])
def test_structs_are_read_as_the_flattened_file(filters: list[Any], tmp_path: Path) -> None:
    for name, table in (("nested", LOG), ("flat", leaf_table(LOG))):
        (tmp_path / name).mkdir()
        pq.write_table(table, tmp_path / name / "x.parquet", row_group_size=70)
    assert leaf_table(LOG).equals(LOG.flatten().flatten().select(leaf_columns(LOG.schema).names))
    assert mapped(tmp_path / "nested", filters) == mapped(tmp_path / "flat", filters) != []


def test_only_the_leaves_that_are_used_are_read(tmp_path: Path) -> None:
    pq.write_table(LOG, tmp_path / "x.parquet")
    with open_parquet(str(tmp_path / "x.parquet")) as parquet:
        read = parquet.read_row_groups([0], columns=["user.home.city"])
    assert read.schema.field("user").type == pa.struct([("home", pa.struct([("city", pa.string())]))])


def test_statistics_of_fields_leave_out_row_groups(tmp_path: Path) -> None:
    pq.write_table(LOG, tmp_path / "x.parquet", row_group_size=100)
    manifest = Manifest.read(str(tmp_path), SCHEMA, filters=[["seen.at", "<", 1_700_000_000 + 3600 * 50]])
    assert manifest.files.left_out.tolist() == [False, True, True]


def test_a_column_hides_the_field_of_its_name(tmp_path: Path) -> None:
    """Its statistics too: with those of the field the filter would leave out all rows."""
    users = pa.array([{"age": 1}] * ROWS)
    table = pa.table({"user.age": pa.array(range(100, 100 + ROWS)), "user": users, "click": [0, 1] * (ROWS // 2)})
    schema = Schema.model_validate({"label": {"column": "click"}, "dense": [{"name": "age", "column": "user.age"}]})
    for number, columns in enumerate((["user.age", "user", "click"], ["user", "user.age", "click"])):
        path = tmp_path / f"{number}"
        path.mkdir()
        pq.write_table(table.select(columns), path / "x.parquet")
        manifest = Manifest.read(str(path), schema, filters=[["user.age", ">=", 398]])
        rows, _ = read_window(manifest, 0)
        assert rows["user.age"].to_pylist() == [398, 399]


def test_a_struct_in_one_file_and_columns_in_another_are_one_data_set(tmp_path: Path) -> None:
    pq.write_table(LOG, tmp_path / "a.parquet")
    pq.write_table(leaf_table(LOG), tmp_path / "b.parquet")
    manifest = Manifest.read(str(tmp_path), SCHEMA)
    assert manifest.rows == 2 * ROWS and not check(manifest, SCHEMA, SIZES).bad_rows


def test_a_null_struct_has_null_fields(tmp_path: Path) -> None:
    rows = [row_of(number) for number in range(ROWS)]
    rows[7]["user"] = None
    rows[8]["user"] = {"id": "1", "age": None, "home": None}
    pq.write_table(pa.Table.from_pylist(rows, LOG.schema), tmp_path / "x.parquet")
    table, problems = read_window(Manifest.read(str(tmp_path), SCHEMA), 0)
    names = ["user.id", "user.home.city", "user.age"]
    assert not problems and table.select(names).slice(7, 2).to_pylist() == [
        dict.fromkeys(names),
        dict(zip(names, ("1", None, None), strict=True)),
    ]


def test_the_struct_itself_is_refused_with_its_fields(tmp_path: Path) -> None:
    pq.write_table(LOG, tmp_path / "x.parquet")
    schema = Schema.model_validate({"label": {"column": "item"}, "dense": [{"name": "user", "column": "user"}]})
    with pytest.raises(DataError, match=r"'user' is a struct: name one of its fields, user.id, user.age, user.home"):
        Manifest.read(str(tmp_path), schema)


def test_an_index_of_structs_from_an_older_version_is_read_anew(tmp_path: Path) -> None:
    pq.write_table(LOG, tmp_path / "x.parquet")
    path = write_index([str(tmp_path)]).path
    with pa.ipc.open_file(path) as reader:
        facts = reader.read_all()
    assert len(FooterIndex.open(path)._known) == 1
    schema = LOG.schema.remove_metadata().serialize().to_pybytes()
    number = facts.column_names.index("schema")
    old = facts.set_column(number, facts.schema.field(number), pa.array([schema]).dictionary_encode())
    with pa.ipc.new_file(path, old.schema) as writer:
        writer.write_table(old)
    index = FooterIndex.open(path)
    assert len(index._known) == 0
    assert Manifest.read(str(tmp_path), SCHEMA, reading=FooterReading(index)).rows == ROWS


def write_as(folder: Path, suffix: str) -> None:
    rows = [row_of(number) for number in range(ROWS)]
    path = folder / f"x.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif suffix == "json":
        path.write_text(json.dumps(rows))
    elif suffix == "orc":
        orc.write_table(LOG, path)
    else:
        fastavro = pytest.importorskip("fastavro")
        home = {"city": "string", "tags": {"type": "array", "items": "string"}, "unused": "long"}
        user = {"id": "string", "age": "long", "home": record("Home", home)}
        fields = {"user": record("User", user), "item": "long", "seen": record("Seen", {"click": "long", "at": "long"})}
        with path.open("wb") as file:
            fastavro.writer(file, record("Row", fields), rows)


def record(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": kind} for n, kind in fields.items()]}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "avro", "orc"])
def test_structs_of_other_formats_are_the_same_rows(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("other", "flat"):
        (tmp_path / name).mkdir()
    write_as(tmp_path / "other", suffix)
    pq.write_table(leaf_table(LOG), tmp_path / "flat" / "x.parquet")
    assert mapped(tmp_path / "other") == mapped(tmp_path / "flat")


def test_options_for_json_reach_into_structs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types, times and lists of a field; whole numbers beyond int64; a field that is missing or null in some rows."""
    lines = [
        {"user": {"zip": 7, "id": 2**63 + 5, "at": "01.02.2024", "tags": "a|b", "deep": {"x": 1}}, "click": 0},
        {"user": {"zip": 80331, "id": 1, "at": None, "tags": "c", "deep": {"x": 2}}, "click": 1},
        {"user": None, "click": 1},
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ["--type", "user.zip=string", "--time-format", "user.at=%d.%m.%Y", "--list", "user.tags=|"]
    options += ["--type", "user.deep.x=double"]
    assert run(["data", "convert", str(tmp_path / "x.jsonl"), str(tmp_path / "out"), *options]) == 0
    rows = leaf_table(pq.read_table(tmp_path / "out" / "x-00000.parquet"))
    assert rows["user.id"].to_pylist() == [2**63 + 5, 1, None]
    assert rows["user.zip"].to_pylist() == ["7", "80331", None]
    assert rows["user.tags"].to_pylist() == [["a", "b"], ["c"], None]
    assert rows["user.deep.x"].type == pa.float64()
    assert [at and at.strftime("%Y-%m-%d") for at in rows["user.at"].to_pylist()] == ["2024-02-01", None, None]


def test_a_field_of_two_types_in_json_is_named_with_a_fix_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"user": {"id": 7, "age": 1}}, {"user": {"id": "x", "age": 2}}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = ["data", "convert", str(tmp_path / "x.jsonl"), str(tmp_path / "out")]
    assert run(command) == 1
    assert "--type user.id=string" in " ".join(capsys.readouterr().err.split())
    assert run([*command, "--type", "user.id=string"]) == 0
    rows = leaf_table(pq.read_table(tmp_path / "out" / "x-00000.parquet"))
    assert rows["user.id"].to_pylist() == ["7", "x"] and rows["user.age"].to_pylist() == [1, 2]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_init_proposes_fields_as_columns(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if suffix == "parquet":
        pq.write_table(LOG, tmp_path / "x.parquet")
    else:
        write_as(tmp_path, suffix)
    options = ["--label", "seen.click", "--time", "seen.at", "--ignore", "user.home.unused"]
    assert run(["init", f"x.{suffix}", *options]) == 0
    config = yaml.safe_load((tmp_path / "x.yaml").read_text())
    columns = {f.get("column", f["name"]) for kind in ("dense", "sparse") for f in config["schema"].get(kind, [])}
    assert {"user.id", "user.home.city", "user.home.tags", "user.age"} <= columns
    schema = Schema.model_validate(config["schema"])
    manifest = Manifest.of(DataSet.model_validate(config["data"]["eval"]), schema)
    assert not check(manifest, schema, {f.name: 64 for f in schema.sparse}).bad_rows


def test_inspect_and_vocabulary_read_fields(tmp_path: Path) -> None:
    pq.write_table(LOG, tmp_path / "x.parquet")
    roles = {c.name: c.role for c in inspect(str(tmp_path)).columns}
    assert roles["user.id"] == roles["user.home.city"] == "id" and roles["user.home.tags"] == "id_list"
    out = tmp_path / "v.parquet"
    assert run(["data", "vocabulary", str(tmp_path), "--column", "user.home.city", "--out", str(out)]) == 0
    assert sorted(pq.read_table(out)["id"].to_pylist()) == [f"city {n}" for n in range(7)]


def test_rows_in_memory_may_have_structs() -> None:
    mapping = Mapping(SCHEMA, SIZES)
    nested, flat = mapping.to_batch(LOG), mapping.to_batch(leaf_table(LOG))
    assert str(nested.sparse) == str(flat.sparse) and nested.dense.equal(flat.dense)


KINDS = st.recursive(
    st.sampled_from([pa.int64(), pa.string(), pa.list_(pa.int64())]),
    lambda inner: st.dictionaries(st.sampled_from(["a", "b", "a.b"]), inner, min_size=1, max_size=2).map(
        lambda fields: pa.struct(list(fields.items()))
    ),
    max_leaves=5,
)


def value_of(kind: pa.DataType, draw: np.random.Generator) -> Any:
    if draw.random() < 0.2:
        return None
    if pa.types.is_struct(kind):
        return {field.name: value_of(field.type, draw) for field in kind.fields}
    if pa.types.is_list(kind):
        return draw.integers(0, 9, draw.integers(0, 3)).tolist()
    return str(draw.integers(0, 9)) if pa.types.is_string(kind) else int(draw.integers(0, 9))


def at(row: Any, path: str) -> set[str]:
    """The values, as texts, that a dotted name could mean."""
    if row is None:
        return {"None"}
    values = {repr(row[path])} if path in row else set()
    for key, inner in row.items():
        if path.startswith(f"{key}.") and (isinstance(inner, dict) or inner is None):
            values |= at(inner, path[len(key) + 1 :])
    return values


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(["a", "b", "a.b", "c"]), KINDS, min_size=1), st.integers(0, 1000))
def test_leaves_of_any_nesting(columns: dict[str, pa.DataType], seed: int) -> None:
    """A projection of leaves from Parquet has the values of the rows, and literal names win."""
    draw = np.random.default_rng(seed)
    arrow = pa.schema(list(columns.items()))
    rows = [{name: value_of(kind, draw) for name, kind in columns.items()} for _ in range(5)]
    table = pa.Table.from_pylist(rows, arrow)
    leaves = leaf_columns(arrow)
    assert leaf_table(table).schema.types == leaves.types
    assert with_types(arrow, {name: leaves.field(name).type for name in set(leaves.names)
                              if leaves.names.count(name) == 1}) == arrow  # fmt: skip
    with TemporaryDirectory() as folder:
        pq.write_table(table, f"{folder}/x.parquet")
        with open_parquet(f"{folder}/x.parquet") as parquet:
            for name in {name for name in leaves.names if leaves.names.count(name) == 1}:
                read = columns_named(parquet.read_row_groups([0], columns=[name]), [name])
                for row, value in zip(rows, read[name].to_pylist(), strict=True):
                    literal = name in row and not pa.types.is_struct(columns[name])
                    assert repr(value) in ({repr(row[name])} if literal else at(row, name))


LAKE = pa.table({"user": [{"id": n, "home": {"city": f"city {n}"}} for n in range(6)], "label": [0, 1] * 3})


def cities(data: dict[str, Any], column: str) -> list[Any]:
    feature = {"name": "city", "column": column, "kind": "id", "mapping": {"kind": "hash"}}
    schema = Schema.model_validate({"label": {"column": "label"}, "sparse": [feature]})
    rows, problems = read_window(Manifest.of(DataSet.model_validate(data), schema), 0)
    assert not problems
    return sorted(rows[column].to_pylist())


def test_fields_of_a_delta_table(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(str(tmp_path), LAKE)
    assert cities({"path": str(tmp_path), "table": "delta"}, "user.home.city") == [f"city {n}" for n in range(6)]


def test_a_renamed_field_of_an_iceberg_table_is_found_by_its_id(tmp_path: Path) -> None:
    pytest.importorskip("pyiceberg")
    from pyiceberg.catalog import load_catalog

    catalog = load_catalog("structs", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=str(tmp_path / "files"))
    catalog.create_namespace("db")
    table = catalog.create_table("db.clicks", LAKE.schema)
    table.append(LAKE)
    with table.update_schema() as update:
        update.rename_column("user.home.city", "town")
    table.append(
        pa.table({"user": [{"id": 6, "home": {"town": "city 6"}}], "label": [1]}).cast(table.schema().as_arrow())
    )
    data = {"path": table.metadata_location, "table": "iceberg"}
    assert cities(data, "user.home.town") == [f"city {n}" for n in range(7)]
    catalog.close()
