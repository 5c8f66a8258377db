"""One law widens the types of a column over files of every format, and a column of nulls is what its feature makes of a
null: at the start, between launches, and in the commands without a schema."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.orc as paorc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.cli import run
from rayrec.data import (
    BatchStream,
    Cursor,
    DataError,
    DataSet,
    Manifest,
    Mapping,
    ReadOptions,
    Schema,
    check,
    convert,
    inspect,
)
from rayrec.data.arrays.widening import concatenated, wider
from tests.data.mapped import kept
from tests.data.public import started

HASH = {"kind": "hash"}
SCHEMA: dict[str, Any] = {
    "dense": [{"name": "price", "default": 0.5}],
    "sparse": [
        {"name": "row"},
        {"name": "brand", "mapping": HASH, "on_null": "empty"},
        {"name": "tags", "kind": "id_list", "mapping": HASH, "on_null": "empty"},
    ],
}
ROWS_OF = {"row": 100, "brand": 50, "tags": 50}


def write(path: Path, first: int = 0, **columns: pa.Array) -> None:
    """Four rows, of which columns may be others; `None` leaves one out."""
    rows = range(first, first + 4)
    table: dict[str, Any] = {
        "label": [row % 2 for row in rows],
        "row": list(rows),
        "price": [row / 4 for row in rows],
        "brand": [f"b{row}" for row in rows],
        "tags": [[f"t{row}"] for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({name: column for name, column in (table | columns).items() if column is not None}), path)


def read(folder: Path, schema: Schema, rows_of: dict[str, int] = ROWS_OF) -> dict[int, tuple[list[float], int, int]]:
    """By row: its dense values, and how many brands and tags it has."""
    manifest, found = Manifest.read([str(folder)], schema), {}
    how: dict[str, Any] = {"rank": 0, "world_size": 1, "cursor": Cursor.start(0), "seed": 0}
    with BatchStream(manifest, schema, rows_of, batch_rows=8, options=ReadOptions(reader="local"), **how) as stream:
        for batch, _ in stream:
            ids = {name: batch.sparse[name].to_dense() for name in schema.sparse_names}
            for place in range(batch.rows):
                counts = (len(ids[name][place]) for name in ("brand", "tags"))
                found[int(ids["row"][place][0])] = (batch.dense[place].tolist(), *counts)
    return found


@pytest.mark.parametrize("second_file", [False, True])
def test_a_column_of_nulls_is_what_its_feature_makes_of_a_null(tmp_path: Path, second_file: bool) -> None:
    nothing = {"price": pa.nulls(4), "brand": pa.nulls(4), "tags": pa.array([None, [], [None], [None] * 2])}
    assert nothing["tags"].type == pa.list_(pa.null())
    write(tmp_path / "data" / "a.parquet", 0, **nothing)
    if second_file:
        write(tmp_path / "data" / "b.parquet", 4)
    found = read(tmp_path / "data", Schema.model_validate(SCHEMA))
    assert {row: found[row] for row in range(4)} == dict.fromkeys(range(4), ([0.5], 0, 0))
    if second_file:
        assert {row: found[row] for row in range(4, 8)} == {row: ([row / 4], 1, 1) for row in range(4, 8)}


def test_a_list_of_lists_of_nulls_and_a_null_for_a_list(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.parquet", 0, tags=pa.nulls(4))
    assert read(tmp_path / "data", Schema.model_validate(SCHEMA))[0] == ([0.0], 1, 0)


def test_nulls_only_do_not_tell_the_type_of_the_ids() -> None:
    """A later launch may have texts."""
    types = {
        "label": pa.int64(),
        "row": pa.int64(),
        "price": pa.null(),
        "brand": pa.null(),
        "tags": pa.list_(pa.null()),
    }
    first = kept(Schema.model_validate(SCHEMA), types)
    assert [feature.id_type for feature in first.sparse] == ["integer", None, None]
    later = kept(first, types | {"brand": pa.string(), "tags": pa.list_(pa.int32())})
    assert [feature.id_type for feature in later.sparse] == ["integer", "text", "integer"]


@pytest.mark.parametrize("column", ["label", "row", "brand", "tags", "price"])
def test_a_column_of_nulls_is_refused_where_a_null_is_and_names_the_row(tmp_path: Path, column: str) -> None:
    strict = {
        "dense": [{"name": "price"}],
        "sparse": [{key: value for key, value in one.items() if key != "on_null"} for one in SCHEMA["sparse"]],
    }
    write(tmp_path / "data" / "a.parquet", 0, **{column: pa.nulls(4)})
    with pytest.raises(DataError, match="null") as caught:
        read(tmp_path / "data", Schema.model_validate(strict))
    assert caught.value.column == column and caught.value.row in range(4) and caught.value.fix


NUMBERS = [
    pa.array([0, 1, 2, 3], pa.int8()),
    pa.array([0, 1, 2, 1 << 62], pa.int64()),
    pa.array([0, 1, 2, 1 << 63], pa.uint64()),
    pa.array([0.0, 1.5, 2, 3], pa.float32()),
    pa.array([0.0, 0.1, 2, 1e300]),
    pa.array([Decimal("1.25")] * 4),
    pa.array([Decimal("0.0000000001")] * 4, pa.decimal128(38, 10)),
    pa.nulls(4),
]


@pytest.mark.parametrize("one", NUMBERS, ids=lambda array: str(array.type))
@pytest.mark.parametrize("other", NUMBERS, ids=lambda array: str(array.type))
def test_a_number_may_have_any_type_of_number(one: pa.Array, other: pa.Array) -> None:
    kind = wider(one.type, other.type)
    assert kind is not None
    if not any(pa.types.is_integer(array.type) for array in (one, other)) or kind != pa.float64():
        table = concatenated([pa.table({"price": array}) for array in (one, other)], ["one", "other"])
        assert table["price"].type == kind
        for before, after in zip([*one, *other], table["price"], strict=True):
            value = before.as_py()
            assert after.as_py() == (float(value) if value is not None and kind == pa.float64() else value)


def test_integers_beside_floats_train_as_a_number_and_never_as_an_id(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.parquet", 0, price=pa.array([1, 2, (1 << 53) + 1, 4]))
    write(tmp_path / "data" / "b.parquet", 4)
    found = read(tmp_path / "data", Schema.model_validate(SCHEMA))
    assert [found[row][0][0] for row in (0, 1, 2, 5)] == [1.0, 2.0, float(1 << 53), 1.25]
    write(tmp_path / "data" / "b.parquet", 4, row=pa.array([4.0, 5, 6, 7]))
    with pytest.raises(DataError, match="'row' must be an integer or a string; the column's type is double") as caught:
        read(tmp_path / "data", Schema.model_validate(SCHEMA))
    assert Path(caught.value.file or "").name == "b.parquet"


def test_without_a_schema_an_id_is_not_rounded() -> None:
    tables = [pa.table({"item": [(1 << 53) + 1]}), pa.table({"item": [1.0, None]})]
    with pytest.raises(DataError, match="does not fit double") as caught:
        concatenated(tables, ["a", "b"])
    assert (caught.value.file, caught.value.column) == ("a", "item")


TYPES = {
    "label": pa.int8(),
    "row": pa.int64(),
    "price": pa.int64(),
    "brand": pa.string(),
    "tags": pa.list_(pa.string()),
}
DERIVED = {
    "dense": [{"name": "price", "default": 0.5}, {"name": "no_price", "column": "absent"}],
    "sparse": [*SCHEMA["sparse"], {"name": "band", "mapping": HASH, "on_null": "empty"}],
    "derived": [
        {"kind": "buckets", "name": "band", "column": "price", "boundaries": [0.5]},
        {"kind": "missing", "name": "absent", "column": "price"},
    ],
}


@pytest.mark.parametrize(
    ("trained", "price", "bands"),
    [
        (pa.float64(), pa.array([0, 1, 2, 3]), 1),
        (pa.int64(), pa.array([0.25, 1, 2, 3]), 1),
        (pa.int64(), pa.nulls(4), 0),
        (pa.decimal128(5, 2), pa.array([0.25, 1, 2, 3]), 1),
    ],
)
def test_inputs_of_derived_columns_widen_after_training_too(trained: pa.DataType, price: pa.Array, bands: int) -> None:
    types = {
        "label": pa.int8(),
        "row": pa.int64(),
        "price": trained,
        "brand": pa.string(),
        "tags": pa.list_(pa.string()),
    }
    schema = kept(Schema.model_validate(DERIVED), types)
    names = {pa.int64(): "integer", pa.float64(): "number", pa.decimal128(5, 2): "decimal"}
    assert schema.column_types == {"price": names[trained]}
    table = {"row": [1, 2, 3, 4], "price": price, "brand": pa.nulls(4), "tags": pa.nulls(4)}
    batch = Mapping(schema, ROWS_OF | {"band": 8}, labels=False).to_batch(pa.table(table))
    assert [len(bag) for bag in batch.sparse["band"].to_dense()] == [bands] * 4
    assert batch.dense[:, 1].tolist() == [1.0 - bands] * 4
    again = kept(schema, types | {"price": pa.float64()})
    assert again.column_types == {"price": "decimal" if trained == pa.decimal128(5, 2) else "number"}
    assert kept(schema, types | {"price": pa.null()}).column_types == schema.column_types


def test_crosses_of_ids_stay_ids() -> None:
    derived = [{"kind": "cross", "name": "band", "columns": ["price", "brand"]}]
    types = {
        "label": pa.int8(),
        "row": pa.int64(),
        "price": pa.int64(),
        "brand": pa.string(),
        "tags": pa.list_(pa.string()),
    }
    schema = kept(Schema.model_validate(DERIVED | {"dense": [], "derived": derived}), types)
    table = {"row": [1], "price": [1.5], "brand": ["b"], "tags": [["t"]]}
    with pytest.raises(DataError, match="ids are integers or texts, not double"):
        Mapping(schema, ROWS_OF | {"band": 8}, labels=False).to_batch(pa.table(table))


PAIRS = {
    "int": (pa.array([1, 2, 3, 4], pa.int32()), pa.array([5, 6, 7, 8], pa.int64())),
    "time": (pa.array([1, 2, 3, 4], pa.timestamp("us")), pa.array([5000, 6000, 7000, 8000], pa.timestamp("ns"))),
    "date": (pa.array([1, 2, 3, 4], pa.date32()), pa.array([5, 6, 7, 8], pa.timestamp("us"))),
    "decimal": (pa.array([Decimal("1.5")] * 4), pa.array([Decimal("100.25")] * 4)),
    "null": (pa.nulls(4), pa.array(["a", "b", "c", "d"])),
    "lists": (pa.array([[None], [], [], []]), pa.array([[1.5], [], [], []])),
    "dense": (pa.array([1, 2, 3, 4]), pa.array([1.5, 2, 3, 4])),
}


@pytest.mark.parametrize("turned", [False, True])
def test_commands_without_a_schema_read_what_training_reads(tmp_path: Path, turned: bool) -> None:
    for number in (0, 1):
        write(
            tmp_path / "data" / f"{number}.parquet",
            4 * number,
            **{name: pair[number ^ turned] for name, pair in PAIRS.items()},
            late=pa.array([1, 2, 3, 4]) if number else None,
            user=pa.array([1, 1, 2, 2], pa.int64() if number else pa.int16()),
        )
    inspection = inspect([str(tmp_path / "data")])
    assert inspection.rows == 8 and {*PAIRS, "late"} <= {column.name for column in inspection.columns}
    words = ["data", "sequence", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--user", "user"]
    assert run([*words, "--time", "time", *(word for name in PAIRS for word in ("--column", name))]) == 0
    written = pq.read_table(tmp_path / "out")
    assert len(written) == 8
    assert written["dense"].type == pa.float64() and written["time"].type == pa.timestamp("ns")
    for name, pair in PAIRS.items():
        assert written[name].type == wider(*(array.type for array in pair)) or name == "lists"


def test_init_splits_files_of_other_types_by_time(tmp_path: Path) -> None:
    """Times of two units are compared as times, and a column that a file lacks is null."""
    for number, unit in enumerate(("us", "ns")):
        at = [10**9 + number * 100 + row for row in range(100)]
        columns: dict[str, Any] = {"at": pa.array(at, pa.timestamp("s")).cast(pa.timestamp(unit))}
        columns |= {"n": pa.array(at, pa.int64() if number else pa.int32()), "user": [row % 9 for row in range(100)]}
        columns |= {"click": [row % 2 for row in range(100)]} | (
            {"late": [row % 7 for row in range(100)]} if number else {}
        )
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(pa.table(columns), tmp_path / "in" / f"{number}.parquet")
    config = started(tmp_path / "in", tmp_path / "a-data", "click")
    schema = Schema.model_validate(config["schema"])
    rows_of = {feature.name: 100 for feature in schema.sparse}
    manifests = (Manifest.of(DataSet.model_validate(config["data"][side]), schema) for side in ("train", "eval"))
    sides = [check(manifest, schema, rows_of) for manifest in manifests]
    assert [side.rows for side in sides] == [180, 20]


def test_a_text_beside_a_number_names_both_files(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.parquet", 0, price=pa.nulls(4))
    write(tmp_path / "data" / "b.parquet", 4)
    write(tmp_path / "data" / "c.parquet", 8, price=pa.array(["a", "b", "c", "d"]))
    with pytest.raises(DataError, match=r"string here, double in .*b\.parquet") as caught:
        inspect([str(tmp_path / "data")])
    assert Path(caught.value.file or "").name == "c.parquet" and caught.value.column == "price"


def test_other_formats_widen_by_the_same_law(tmp_path: Path) -> None:
    texts = {
        "a.jsonl": '{"n": 1, "text": null, "list": [1], "map": {"x": 1}}\n',
        "b.jsonl": '{"n": 2.5, "text": "t", "list": [2.5], "map": {"x": 2.5, "y": null}}\n',
    }
    (tmp_path / "json").mkdir()
    for name, text in texts.items():
        (tmp_path / "json" / name).write_text(text)
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "a.csv").write_text("n,text,at\n1,,2024-01-31\n")
    (tmp_path / "csv" / "b.csv").write_text("n,text,at\n2.5,t,2024-01-31 08:00:00\n")
    (tmp_path / "orc").mkdir()
    paorc.write_table(pa.table({"n": pa.array([1], pa.int64()), "text": ["u"]}), tmp_path / "orc" / "a.orc")
    paorc.write_table(pa.table({"n": [2.5], "text": ["t"]}), tmp_path / "orc" / "b.orc")
    for kind in ("json", "csv", "orc"):
        list(convert([str(tmp_path / kind)], tmp_path / f"{kind}-out"))
        tables = [pq.read_table(path) for path in sorted((tmp_path / f"{kind}-out").glob("*.parquet"))]
        assert tables[0].schema == tables[1].schema
        assert [table["n"].to_pylist() for table in tables] == [[1.0], [2.5]]
        assert tables[1]["text"].to_pylist() == ["t"]
    (tmp_path / "csv" / "c.csv").write_text("n,text,at\nmany,t,2024-01-31\n")
    with pytest.raises(DataError, match=r"string here, int64 in .*a\.csv.*--type n=string"):
        list(convert([str(tmp_path / "csv")], tmp_path / "again"))


LEAVES = [
    *(pa.null(), pa.bool_(), pa.int8(), pa.int64(), pa.uint32(), pa.uint64(), pa.float16(), pa.float64()),
    *(pa.decimal128(5, 2), pa.decimal128(30, 10), pa.date32(), pa.date64(), pa.timestamp("s"), pa.timestamp("ns")),
    *(pa.timestamp("us", "UTC"), pa.time32("s"), pa.time64("us"), pa.string(), pa.string_view(), pa.binary()),
    pa.dictionary(pa.int32(), pa.string()),
]
kinds = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        st.lists(inner, min_size=1, max_size=2).map(lambda of: pa.struct([(f"f{i}", k) for i, k in enumerate(of)])),
    ),
    max_leaves=3,
)


def arrow_law(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    try:
        schemas = [pa.schema([("column", kind)]) for kind in (one, other)]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return None


@settings(max_examples=300)
@given(kinds, kinds)
def test_the_law_is_symmetric_and_idempotent_and_null_widens_to_anything(one: pa.DataType, other: pa.DataType) -> None:
    wide = wider(one, other)
    assert wide == wider(other, one)
    assert wider(one, one) == one == wider(one, pa.null())
    if wide is not None:
        assert wider(wide, one) == wider(wide, other) == wide
    elif arrow_law(one, other) is not None:  # what Arrow widens and this law does not
        raise AssertionError(f"{one}, {other}: Arrow has {arrow_law(one, other)}")


@settings(max_examples=100)
@given(st.sampled_from(LEAVES), st.sampled_from(LEAVES), st.sampled_from(LEAVES))
def test_the_order_of_files_does_not_matter(one: pa.DataType, two: pa.DataType, three: pa.DataType) -> None:
    def of(*types: pa.DataType) -> pa.DataType | None:
        wide: pa.DataType | None = types[0]
        for kind in types[1:]:
            wide = None if wide is None else wider(wide, kind)
        return wide

    assert of(one, two, three) == of(three, two, one) == of(two, one, three)
