"""Columns of tables of entities, joined to rows by key and time, against pandas."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data import DataError, Schema, to_batch
from rayrec.data.mapping.entities import EntitySource, close_entities, open_entities

DAY = 86_400
# Texts of one 64-bit hash (`hash_texts`), which a user who chooses a name could construct.
ALIKE = ["user-00012345678", "00234152XLXsjpyU", "00234644NMxtqgOu", "00262161ORehpyAo"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    close_entities()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def write(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def schema_of(path: Path, kind: str = "dense", take: str = "price", key: str = "item", **options: Any) -> Schema:
    """One feature, which reads a column of the table; `f…` options are those of the feature."""
    feature = {n.removeprefix("f_"): value for n, value in options.items() if n.startswith("f_")}
    spec = {n: value for n, value in options.items() if not n.startswith("f_")}
    derived = {"name": "joined", "kind": "entity", "column": "item", "path": str(path), "key": key, "take": take} | spec
    other = {"sparse": [{"name": "item", "mapping": {"kind": "hash"}}]} if kind == "dense" else {}
    return Schema.model_validate({kind: [{"name": "joined", **feature}], "derived": [derived]} | other)


def values(schema: Schema, **columns: Any) -> list[float]:
    table = pa.table({"label": np.zeros(len(next(iter(columns.values())))), **columns})
    return to_batch(table, schema, {feature.name: 1 << 20 for feature in schema.sparse}).dense[:, 0].tolist()


def ids(schema: Schema, **columns: Any) -> list[list[int]]:
    """The table rows of the ids, by row."""
    table = pa.table({"label": np.zeros(len(next(iter(columns.values())))), **columns})
    bags = to_batch(table, schema, {"joined": 1 << 20}).sparse["joined"]
    return [bag.tolist() for bag in bags.to_dense()]


@settings(max_examples=40)
@given(st.data())
def test_versions_are_those_of_merge_asof(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Versions at equal times, before the first, keys that the table lacks, and null keys and times."""
    sizes = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
    seed, of_text = data.draw(st.integers(0, 1 << 32)), data.draw(st.booleans())
    check_versions(tmp_path_factory, *sizes, np.random.default_rng(seed), of_text)


@pytest.mark.parametrize("of_text", [False, True])
def test_versions_of_100_000_rows_are_those_of_merge_asof(
    tmp_path_factory: pytest.TempPathFactory, of_text: bool
) -> None:
    check_versions(tmp_path_factory, 900, 100_000, np.random.default_rng(0), of_text)


def check_versions(
    tmp_path_factory: pytest.TempPathFactory, versions: int, rows: int, draw: np.random.Generator, of_text: bool
) -> None:
    keys, times = draw.integers(0, 30, versions), draw.integers(0, 40, versions) * DAY
    table = pd.DataFrame({"item": keys, "since": times, "price": draw.random(versions)})
    table = table.drop_duplicates(["item", "since"]).sample(frac=1, random_state=1)
    log = pd.DataFrame({"item": draw.integers(-3, 33, rows), "at": draw.integers(0, 45, rows) * DAY})
    ordered = log.reset_index().sort_values("at", kind="stable")
    joined = pd.merge_asof(ordered, table.sort_values("since"), left_on="at", right_on="since", by="item").set_index(
        "index"
    )
    expected = joined.sort_index().price.to_numpy()

    def typed(column: pd.Series) -> pa.Array:
        return pa.array([f"k{key}" for key in column] if of_text else column)

    path = write(
        tmp_path_factory.mktemp("table") / "items.parquet",
        item=typed(table["item"]),
        since=pa.array(table.since, pa.timestamp("s")),
        price=table.price,
    )
    null_key, null_time = draw.random(rows) < 0.1, draw.random(rows) < 0.1
    expected = np.where(null_key | null_time | np.isnan(expected), -1.0, expected)
    schema = schema_of(path, valid_from="since", at="at", on_missing="null", f_default=-1.0)
    key_column = pa.array(typed(log["item"]).to_pylist(), pa.string() if of_text else pa.int64(), mask=null_key)
    with_items = schema.model_copy(update={"sparse": [schema.sparse[0].model_copy(update={"on_null": "empty"})]})
    got = values(with_items, item=key_column, at=pa.array(log["at"].to_numpy(), pa.int64(), mask=null_time))
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_keys_of_one_hash_are_different_keys(tmp_path: Path) -> None:
    """With and without versions, moved into an export, and for a key that the table lacks."""
    other = ["a", ALIKE[1], "b", ALIKE[0], ALIKE[2]]
    path = write(tmp_path / "items.parquet", item=other, since=[0] * 5, price=np.arange(5.0))
    open_entities(EntitySource(str(path), "item")).write(tmp_path / "moved", ["price"])
    asked = [*ALIKE, None, "c", "a"]
    for where, options in ((path, {}), (path, {"valid_from": "since", "at": "at"}), (tmp_path / "moved", {})):
        schema = schema_of(where, on_missing="null", f_default=-1.0, **options)
        schema = schema.model_copy(update={"sparse": [schema.sparse[0].model_copy(update={"on_null": "empty"})]})
        assert values(schema, item=asked, at=[DAY] * 7) == [3, 1, 4, -1, -1, -1, 0]
    only = write(tmp_path / "one.parquet", item=[ALIKE[0]], price=[1.0])
    assert values(schema_of(only, on_missing="null", f_default=-1.0), item=ALIKE[:2]) == [1, -1]


def test_lists_of_keys_become_lists_of_values(tmp_path: Path) -> None:
    path = write(tmp_path / "items.parquet", item=[7, 3, 9], category=["a", "b", "c"])
    schema = schema_of(path, "sparse", "category", f_kind="id_list", f_mapping={"kind": "hash"})
    plain = Schema.model_validate({"sparse": [{"name": "joined", "kind": "id_list", "mapping": {"kind": "hash"}}]})
    assert ids(schema, item=[[3, 7], [], [9, 3, 3]]) == ids(plain, joined=[["b", "a"], [], ["c", "b", "b"]])


def test_a_vector_of_each_entity_is_a_feature(tmp_path: Path) -> None:
    path = write(tmp_path / "items.parquet", item=["x", "y"], vector=[[1.0, 2.0], [3.0, 4.0]])
    schema = schema_of(path, take="vector", f_width=2)
    table = pa.table({"item": ["y", "x", "y"], "label": [0, 1, 0]})
    assert to_batch(table, schema, {"item": 10}).dense.tolist() == [[3, 4], [1, 2], [3, 4]]


def test_files_of_a_folder_are_one_table(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.parquet", item=[10 * number, 10 * number + 1], price=[number + 0.25, number + 0.5])
    assert values(schema_of(tmp_path), item=[21, 0, 10]) == [2.5, 0.25, 1.25]


def test_a_table_that_changed_is_read_anew(tmp_path: Path) -> None:
    """New items get their values without another training."""
    path = write(tmp_path / "items.parquet", item=[1], price=[1.0])
    assert values(schema_of(path), item=[1]) == [1.0]
    write(path, item=[1, 2], price=[1.0, 2.0])
    close_entities()  # as a new process
    assert values(schema_of(path), item=[2, 1]) == [2.0, 1.0]


def test_a_key_that_the_table_lacks_is_named_or_null(tmp_path: Path) -> None:
    path = write(tmp_path / "items.parquet", item=[1, 2], price=[0.5, 1.5])
    with pytest.raises(DataError, match=r"no entity with this key .*row 1, column 'item', value 8"):
        values(schema_of(path), item=[1, 8])
    assert values(schema_of(path, on_missing="null", f_default=9.0), item=[1, 8]) == [0.5, 9.0]


@pytest.mark.parametrize(
    ("columns", "spec", "problem"),
    [
        ({"item": [1, 2, 1], "price": [1, 2, 3]}, {}, r"a key is there twice, in rows 0 and 2.*value 1.*valid_from"),
        ({"item": [1, None], "price": [1, 2]}, {}, "1 of 2 entities have no key"),
        ({"item": [1.0, 2.0], "price": [1, 2]}, {}, "integers or strings, not double"),
        ({"item": [1], "cost": [1]}, {}, "no column 'price'|'price'"),
        ({"id": [1], "price": [1]}, {}, "'item'"),
        ({"item": ["1"], "price": [1]}, {}, 'keys are integers, those of .* are strings: 7 and "7"'),
        (
            {"item": [5, 5], "since": [DAY, DAY], "price": [1, 2]},
            {"valid_from": "since", "at": "at"},
            r"two versions of a key become valid at the same time.*5 at 86400",
        ),
        (
            {"item": [5], "since": [1_700_000_000_000], "price": [1]},
            {"valid_from": "since", "at": "at"},
            r"between 1970 and 2200 in s .*1700000000000.*unit",
        ),
        (
            {"item": [5], "since": pa.array([None], pa.timestamp("s")), "price": [1]},
            {"valid_from": "since", "at": "at"},
            "1 of 1 entities have no time",
        ),
        ({"item": [5], "since": ["2024"], "price": [1]}, {"valid_from": "since", "at": "at"}, "timestamps, dates or"),
        (
            {"item": [5], "since": pa.array([1], pa.timestamp("s", "UTC")), "price": [1]},
            {"valid_from": "since", "at": "time"},
            "of the rows have none|of the entities have a time zone",
        ),
    ],
)
def test_what_is_wrong_with_a_table_is_named(
    tmp_path: Path, columns: dict[str, Any], spec: dict[str, Any], problem: str
) -> None:
    path = write(tmp_path / "items.parquet", **columns)
    with pytest.raises(DataError, match=problem) as caught:
        values(schema_of(path, **spec), item=[1, 5], at=[DAY, DAY], time=pa.array([1, 2], pa.timestamp("s")))
    assert re.search(r"; fix: \w", str(caught.value))


def test_a_list_for_each_key_of_a_list_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "items.parquet", item=[1], tags=[["a", "b"]])
    schema = schema_of(path, "sparse", "tags", f_kind="id_list", f_mapping={"kind": "hash"})
    with pytest.raises(DataError, match=r"lists of lists.*fix: take a column of single values"):
        ids(schema, item=[[1]])
    plain = Schema.model_validate({"sparse": [{"name": "joined", "kind": "id_list", "mapping": {"kind": "hash"}}]})
    assert ids(schema, item=[1]) == ids(plain, joined=[["a", "b"]])


def test_an_index_is_moved_with_the_columns_that_it_needs(tmp_path: Path) -> None:
    path = write(tmp_path / "items.parquet", item=["b", "a"], since=[0, DAY], price=[1.0, 2.0], other=[0, 0])
    source = EntitySource(str(path), "item", "since")
    open_entities(source).write(tmp_path / "copy", ["price"])
    path.unlink()
    shutil.move(tmp_path / "copy", tmp_path / "moved")
    schema = schema_of(tmp_path / "moved", valid_from="since", at="at")
    assert values(schema, item=["a", "b"], at=[DAY, 2 * DAY]) == [2.0, 1.0]
    about = tmp_path / "moved" / "about.json"
    about.write_text(about.read_text().replace('"format": 2', '"format": 1'))
    (tmp_path / "moved" / "names.arrow").unlink()
    close_entities()
    assert values(schema, item=["a", "b"], at=[DAY, 2 * DAY]) == [2.0, 1.0], "an export of an earlier version"
    with pytest.raises(DataError, match="other"):
        values(schema_of(tmp_path / "moved", take="other", valid_from="since", at="at"), item=["a"], at=[DAY])
