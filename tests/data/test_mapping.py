"""The mapping as services and notebooks call it gives what training gets, from whatever holds the rows."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import yaml

from rayrec.data import BatchStream, Cursor, DataError, Manifest, Mapping, ReadOptions, Schema
from rayrec.data.mapping.column_types import check_types
from rayrec.data.mapping.mapping import rows_of_tables
from rayrec.models import Batch
from tests.data.sets import ROWS_OF, SCHEMA, table, write

ROWS = 150
CONFIG = {
    "schema": SCHEMA.model_dump(mode="json"),
    "tables": [{"rows": rows, "features": [name]} for name, rows in ROWS_OF.items()]
    + [{"rows": 10 * ROWS_OF["city"], "features": ["city"]}],
}


def same(one: Batch, other: Batch, leave_out: tuple[str, ...] = ()) -> None:
    for name in (field.name for field in fields(Batch) if field.name not in ("sparse", "layout", "lists", *leave_out)):
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None), name
        assert a is None or (a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()), name
    assert one.sparse.keys() == other.sparse.keys()
    for part in ("values", "lengths", "weights_or_none"):
        a, b = getattr(one.sparse, part)(), getattr(other.sparse, part)()
        assert (a is None) == (b is None), part
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b)), part


def trained_on(folder: Path, schema: Schema) -> Batch:
    options = ReadOptions(reader="local")
    manifest = Manifest.read(str(folder), schema)
    where: dict[str, Any] = {"batch_rows": ROWS, "rank": 0, "world_size": 1, "cursor": Cursor.start(0), "seed": 0}
    with BatchStream(manifest, schema, ROWS_OF, **where, shuffle=False, options=options) as stream:
        return next(stream)[0]


@pytest.mark.parametrize("form", ["table", "record batch", "pandas", "columns", "numpy", "rows"])
def test_every_form_of_rows_gives_the_batch_of_training(tmp_path: Path, form: str) -> None:
    rows = table(ROWS)
    wanted = trained_on(write(tmp_path, [ROWS]), SCHEMA)
    given: Any = {
        "table": rows,
        "record batch": rows.combine_chunks().to_batches()[0],
        "pandas": rows.to_pandas(),
        "columns": rows.to_pydict(),
        "numpy": rows.to_pydict() | {"age": rows["age"].to_numpy(), "row": rows["row"].to_numpy()},
        "rows": rows.to_pylist(),
    }[form]
    same(Mapping.from_config(CONFIG).to_batch(given), wanted)
    unlabelled = Mapping.from_config(CONFIG, labels=False)
    scored = unlabelled.to_batch(rows.drop_columns("label") if form == "table" else given)
    same(scored, wanted, leave_out=("label",))
    assert scored.label.isnan().all() and scored.label.shape == wanted.label.shape


def test_a_config_object_or_file_says_the_same_as_its_values(tmp_path: Path) -> None:
    tables = [SimpleNamespace(**one) for one in CONFIG["tables"]]
    found = Mapping.from_config(SimpleNamespace(data_schema=SCHEMA, tables=tables))
    assert found == Mapping.from_config(CONFIG) == pickle.loads(pickle.dumps(found))
    assert found.rows_of == ROWS_OF  # the smaller of two tables decides
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    assert Mapping.from_config(file) == Mapping.from_config(str(file)) == found


WEIGHTED = Schema.model_validate(
    {
        "labels": [{"name": "click"}, {"name": "buy"}],
        "sample_weight": {"column": "w"},
        "group": {"column": "user"},
        "timestamp": {"column": "t"},
        "dense": [{"name": "emb", "width": 2, "default": 0.5}],
        "sparse": [
            {"name": "user", "on_null": "empty"},
            {"name": "tags", "kind": "weighted_id_list", "mapping": {"kind": "hash"}, "default": "x"},
        ],
    }
)  # fmt: skip


def test_rows_to_score_need_neither_labels_nor_weights_nor_times() -> None:
    mapping = Mapping(WEIGHTED, {"user": 9, "tags": 100}, labels=False)
    one = mapping.to_batch([{"user": 3, "tags": [{"id": "a", "weight": 0.5}], "emb": [1.0, 2.0]}, {"user": None}])
    assert one.label.shape == (2, 2) and one.weight is None and one.group is None and one.time is None
    assert one.sparse["user"].lengths().tolist() == [1, 0]
    assert one.sparse["tags"].weights().tolist() == [0.5, 1.0]
    assert one.dense.tolist() == [[1.0, 2.0], [0.5, 0.5]]
    with pytest.raises(DataError, match="'click' is missing"):
        Mapping(WEIGHTED, {"user": 9, "tags": 100}).to_batch({"user": [1], "tags": [[]], "emb": [[1, 2]]})


def test_what_python_and_pandas_make_of_types_is_undone() -> None:
    sparse = [{"name": "a", "on_null": "empty"}, {"name": "b", "kind": "id_list"}]
    schema = Schema.model_validate({"sparse": sparse, "dense": [{"name": "x", "default": 7.0}]})
    mapping = Mapping(schema, {"a": 10, "b": 10}, labels=False)
    frame = pd.DataFrame(
        {"a": [1, None, 3], "b": [[], [], []], "x": [None, None, None]}
    )  # a is float now, b has no type
    assert frame["a"].dtype == np.float64
    batch = mapping.to_batch(frame)
    assert batch.sparse["a"].values().tolist() == [1, 3] and batch.sparse["b"].lengths().tolist() == [0, 0, 0]
    assert batch.dense.tolist() == [[7.0], [7.0], [7.0]]
    assert mapping.to_batch({"a": [None], "b": [[]], "x": [1]}).sparse["a"].lengths().tolist() == [0]
    assert mapping.to_batch({"a": np.array([2.0, np.nan]), "b": [[], []], "x": [1, 2]}).sparse[
        "a"
    ].values().tolist() == [2]
    with pytest.raises(DataError, match="whole number") as caught:
        mapping.to_batch({"a": [1.5], "b": [[]], "x": [1]})
    assert caught.value.column == "a"


@pytest.mark.parametrize(
    ("values", "value"),
    [
        (pd.Series([2**60 + 1, None]), str(2**60)),
        ([1.0, -(2.0**53)], str(-(2**53))),
        (pa.array([2.0**24], pa.float32()), str(2**24)),
        (pa.array([2.0**11], pa.float16()), str(2**11)),
    ],
    ids=["pandas", "float64", "float32", "float16"],
)
def test_an_id_that_a_float_may_have_rounded_is_refused(values: Any, value: str) -> None:
    hashed = {"on_null": "empty", "mapping": {"kind": "hash"}}
    schema = Schema.model_validate({"sparse": [{"name": "one", "column": "a", **hashed}]})
    lists = Schema.model_validate({"sparse": [{"name": "many", "column": "a", "kind": "id_list", **hashed}]})
    listed = [[None if pd.isna(each) else each] for each in pa.array(values).to_pylist()]
    leaf = pa.list_(values.type) if isinstance(values, pa.Array) else None
    for mapping, given in (
        (Mapping(schema, {"one": 9}, labels=False), values),
        (Mapping(lists, {"many": 9}, labels=False), pa.array(listed, leaf)),
    ):
        with pytest.raises(
            DataError, match=f"feature '(one|many)': the id is a float too large .*value {value}.*Int64"
        ):
            mapping.to_batch({"a": given})
    exact = {"a": pa.array([2.0**53 - 1, None, 5.0])}
    assert Mapping(schema, {"one": 9}, labels=False).to_batch(exact).sparse.lengths().tolist() == [1, 0, 1]


def test_a_rounded_id_of_a_derived_column_is_refused() -> None:
    derived = [{"name": "c", "kind": "cross", "columns": ["a", "b"]}]
    raw = {"sparse": [{"name": "c", "mapping": {"kind": "hash"}, "on_null": "empty"}], "derived": derived}
    schema = Schema.model_validate({**raw, "column_types": {"a": "integer", "b": "integer"}})
    mapping = Mapping(schema, {"c": 9}, labels=False)
    assert mapping.to_batch({"a": pd.Series([5, None]), "b": [1, 1]}).sparse.lengths().tolist() == [1, 0]
    with pytest.raises(DataError, match=rf"{2**60} may be another integer .*column 'a'"):
        mapping.to_batch({"a": pd.Series([2**60 + 1, None]), "b": [1, 1]})


def test_errors_name_the_row_or_the_whole() -> None:
    mapping = Mapping(SCHEMA, ROWS_OF, labels=False)
    rows = table(5, user_id=pa.array([0, 99, 1, -1, 2]))
    with pytest.raises(DataError) as caught:
        mapping.to_batch(rows)
    assert (caught.value.row, caught.value.column, caught.value.value) == (1, "user_id", "99")
    batch, errors = mapping.to_batch_and_errors(rows)
    assert batch.rows == 5 and {row: error.value for row, error in errors.items()} == {1: "99", 3: "-1"}
    good = mapping.to_batch(rows.take([0, 2, 4]))
    assert batch.dense[[0, 2, 4]].equal(good.dense)
    with pytest.raises(DataError, match="'user_id' is missing"):
        mapping.to_batch(rows.drop_columns("user_id"))
    with pytest.raises(DataError, match="unequal lengths"):
        mapping.to_batch(rows.to_pydict() | {"age": [1.0]})
    with pytest.raises(DataError, match="no common type"):
        mapping.to_batch(rows.to_pydict() | {"city": ["a", 1, "b", "c", "d"]})
    with pytest.raises(TypeError, match="int is not an Arrow table"):
        mapping.to_batch(3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="'city' is in no table"):
        Mapping(SCHEMA, {name: 9 for name in ROWS_OF if name != "city"})


def test_making_a_mapping_loads_no_torch_no_ray_and_nothing_of_training() -> None:
    code = (
        "import sys; from rayrec.data import Mapping;"
        f"Mapping.from_config({CONFIG!r});"
        "loaded = [m for m in sys.modules if m.split('.')[0] in ('torch', 'ray', 'fbgemm_gpu', 'pandas')"
        " or m.startswith(('rayrec.train', 'rayrec.distributed', 'rayrec.data.stream', 'rayrec.checkpoint'))];"
        "sys.exit(str(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_table_longer_than_a_block_keeps_its_rows() -> None:
    """Dense features are put side by side in blocks of rows."""
    rows = 2 * 8192 + 5
    schema = Schema.model_validate({"dense": [{"name": "a"}, {"name": "b"}]})
    numbers = np.arange(rows, dtype=np.float32)
    batch = Mapping(schema, {}, labels=False).to_batch({"a": numbers, "b": -numbers})
    assert np.array_equal(batch.dense.numpy(), np.stack([numbers, -numbers], axis=1))


def test_few_rows_are_mapped_as_many_are() -> None:
    """Features of a request with few rows are mapped together, where the values allow it."""
    seeds = {"a": 0, "b": 7, "c": -3, "d": 2**63 + 5}
    hashed = [{"name": name, "mapping": {"kind": "hash", "seed": seed}} for name, seed in seeds.items()]
    rules = {"e": "error", "f": "clip", "g": "drop", "h": "error"}
    rows = [{"name": name, "mapping": {"kind": "identity", "bounds": bounds}} for name, bounds in rules.items()]
    dense = [{"name": "x", "transforms": [{"kind": "log1p"}]}, {"name": "y"}, {"name": "z", "default": 1.0}]
    schema = Schema.model_validate({"dense": dense, "sparse": [*hashed, *rows]})
    rows_of = {"a": 10, "b": 2**31, "c": 2**32, "d": 2**40, "e": 50, "f": 20, "g": 30, "h": 50}
    mapping = Mapping(schema, rows_of, labels=False)
    random = np.random.default_rng(0)
    lowest = {"a": 0, "b": 0, "c": -(2**63), "d": -(2**63)}
    columns: dict[str, list[Any]] = {
        name: random.integers(low, 2**63 - 1, 600).tolist() for name, low in lowest.items()
    }
    columns |= {name: random.integers(0, 50, 600).tolist() for name in rules}
    columns |= {"x": random.integers(0, 9, 600).tolist(), "y": random.random(600).tolist()}
    columns["z"] = [None if row % 5 == 0 else row / 7 for row in range(600)]
    for size in (1, 7):
        for start in range(0, 70, size):
            stop = start + size
            few = {name: values[start:stop] for name, values in columns.items()}
            as_table = pa.table({name: pa.array(values) for name, values in few.items()})
            filled = {name: np.resize(values, 600).tolist() for name, values in few.items() if name != "z"}
            filled["z"] = (few["z"] * 600)[:600]
            many, errors = mapping.to_batch_and_errors(filled)
            assert not errors
            for given in (few, as_table, [dict(zip(few, row, strict=True)) for row in zip(*few.values(), strict=True)]):
                one = mapping.to_batch(given)
                torch.testing.assert_close(one.dense, many.dense[:size], rtol=0, atol=0)
                for name in schema.sparse_names:
                    ids = many.sparse[name]
                    assert one.sparse[name].lengths().tolist() == ids.lengths()[:size].tolist()
                    assert one.sparse[name].values().tolist() == ids.values()[: ids.offsets()[size]].tolist(), name
    few["e"][0] = 50
    _, errors = mapping.to_batch_and_errors(few)
    assert [*errors] == [0] and "outside its table's rows [0, 50)" in str(errors[0])
    with pytest.raises(DataError, match="the columns have unequal lengths"):
        mapping.to_batch({**few, "b": [1]})


def test_the_default_of_a_null_list_weighs_one() -> None:
    sparse = [{"name": "x", "kind": "weighted_id_list", "on_null": "default", "default": 7}]
    mapping = Mapping(Schema.model_validate({"sparse": sparse}), {"x": 9}, labels=False)
    batch = mapping.to_batch({"x": [None, [{"id": 2, "weight": 0.25}, {"id": None, "weight": 3.0}], None]})
    assert batch.sparse.values().tolist() == [7, 2, 7, 7]
    assert batch.sparse.weights().tolist() == [1.0, 0.25, 3.0, 1.0]


def test_a_feature_of_two_tables_maps_to_the_rows_of_the_smaller() -> None:
    assert rows_of_tables([(10, ["a"]), (4, ["a", "b"])]) == rows_of_tables([(4, ["a", "b"]), (10, ["a"])])
    assert rows_of_tables([(10, ["a"]), (4, ["a", "b"])]) == {"a": 4, "b": 4}


def test_vocabularies_are_looked_for_from_the_file_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a folder is given."""
    feature = {"name": "x", "mapping": {"kind": "vocabulary", "path": "ids.txt"}}
    config = {"schema": {"sparse": [feature]}, "tables": [{"rows": 9, "features": ["x"]}]}
    for number, name in enumerate(("run", "other", "here")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ids.txt").write_text("\n".join(str(number + n) for n in range(3)))
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path / "here")

    def row_of_two(given: Any, folder: Path | None) -> list[int]:
        mapping = Mapping.from_config(given, labels=False, folder=folder)
        return mapping.to_batch({"x": [2]}).sparse.values().tolist()

    file = tmp_path / "run" / "config.yaml"
    assert (row_of_two(file, None), row_of_two(file, tmp_path / "other")) == ([3], [2])
    assert (row_of_two(config, None), row_of_two(config, tmp_path / "other")) == ([1], [2])


def test_columns_of_types_that_mean_nothing_are_refused() -> None:
    schema = Schema.model_validate({"group": {}, "timestamp": {}, "sample_weight": {}, "sparse": [{"name": "a"}]})
    kinds = {"label": pa.int8(), "weight": pa.float32(), "group": pa.string(), "timestamp": pa.date32(), "a": pa.int8()}
    check_types(schema, pa.schema(kinds), "x")
    for column, kind in (
        ("label", pa.decimal128(5, 2)),
        ("weight", pa.string()),
        ("group", pa.float32()),
        ("timestamp", pa.string()),
    ):
        with pytest.raises(DataError, match="must be") as caught:
            check_types(schema, pa.schema({**kinds, column: kind}), "x")
        assert caught.value.column == column
    with pytest.raises(DataError, match="several columns are named") as caught:
        check_types(schema, pa.schema([*kinds.items(), ("a", pa.int8())]), "x")
    assert caught.value.column == "a"
