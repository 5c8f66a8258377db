"""`rayrec init` lets columns that share values share a table and a vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.cli import run
from rayrec.data import inspect

ROWS = 2000


def inspected(folder: Path, columns: dict[str, Any]) -> Any:
    label = np.random.default_rng(3).integers(0, 2, ROWS)
    pq.write_table(pa.table({**columns, "label": label}), folder / "rows.parquet")
    return inspect(str(folder / "rows.parquet"))


def numbers(low: int, high: int, seed: int = 0) -> pa.Array:
    return pa.array(np.random.default_rng(seed).integers(low, high, ROWS))


def lists(low: int, high: int, seed: int = 1) -> pa.Array:
    random = np.random.default_rng(seed)
    return pa.array([random.integers(low, high, random.integers(1, 6)).tolist() for _ in range(ROWS)])


def texts(ids: pa.Array) -> pa.Array:
    return ids.cast(pa.list_(pa.string()) if pa.types.is_list(ids.type) else pa.string())


def shared(inspection: Any) -> dict[str, str]:
    return {c.name: c.shares for c in inspection.columns if c.shares}


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("item_id", "history"), ("item", "item_history"), ("itemId", "clickedItems"), ("movie_id", "watched_movies"),
        ("movie", "history_items"), ("category_id", "liked_categories"), ("target_item_id", "user_hist_items"),
        ("video_id", "user_click_history"), ("product", "seen"), ("thing_id", "history_ids"), ("tag_id", "tags"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_an_id_and_a_list_share_a_table(owner: str, name: str, text: bool, first: bool, tmp_path: Path) -> None:
    columns = {name: lists(1, 400), "user_id": numbers(1, 400), owner: numbers(1, 400)}
    if text:
        columns |= {name: texts(columns[name]), owner: texts(columns[owner])}
    if first:
        columns = dict(reversed(columns.items()))
    inspection = inspected(tmp_path, columns)
    assert shared(inspection) == {name: owner}
    assert f"shares the table of {owner!r}" in next(c.note for c in inspection.columns if c.name == name)
    proposal = inspection.proposal(8, tmp_path / "vocabularies")
    tables = {table["name"]: table["features"] for table in proposal["tables"]}
    assert {owner, name} in [set(features) for features in tables.values()] and ["user_id"] in tables.values()
    mappings = {feature["name"]: feature["mapping"] for feature in proposal["schema"]["sparse"]}
    assert mappings[owner] == mappings[name] != mappings["user_id"]
    known = {*pq.read_table(mappings[owner]["path"])["id"].to_pylist()}
    assert known == {id for c in (owner, name) for v in columns[c].to_pylist() for id in (v if c == name else [v])}
    hashed = {feature["name"]: feature["mapping"] for feature in inspection.proposal(8)["schema"]["sparse"]}
    assert hashed[owner] == hashed[name]


@pytest.mark.parametrize(
    "columns",
    [
        {"age": numbers(1, 91), "city_code": numbers(1, 101)},
        {"category_id": numbers(1, 21), "weekday": numbers(0, 7)},
        {"user_id": numbers(1, 2000), "user_city_id": numbers(1, 500)},
        {"item_id": numbers(1, 2000), "item_brand_id": numbers(1, 500), "genres": lists(1, 200)},
        {"user_id": numbers(1, 2000), "user_history": lists(1, 500)},
        {"user_group_id": numbers(1, 300), "item_group_id": numbers(1, 300)},
        {"item_id": numbers(1, 2000), "clicked_ads": lists(1, 300)},
        {"item_id": texts(numbers(1, 300)), "history": lists(1, 300)},
        {"item_id": numbers(1, 300), "history": lists(300, 600)},
        {"father_country": texts(numbers(1, 40)), "mother_country": texts(numbers(1, 40))},
    ],
    ids=lambda columns: "-".join(columns),
)
def test_columns_that_overlap_by_chance_keep_their_tables(columns: dict[str, Any], tmp_path: Path) -> None:
    inspection = inspected(tmp_path, columns)
    assert shared(inspection) == {}
    assert all(len(table["features"]) == 1 for table in inspection.proposal(8)["tables"])


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"liked_author_id": numbers(1, 500), "author_id": numbers(1, 500)}, {"liked_author_id": "author_id"}),
        ({"origin": texts(numbers(1, 300)), "dest": texts(numbers(1, 300))}, {"origin": "dest"}),
        (
            {"user_id": pa.array((np.arange(ROWS) % 300 + 7) * 10**12), "friends": lists(7, 300)},
            {"friends": "user_id"},
        ),
        (
            {"clicked_items": lists(1, 300), "bought_items": lists(1, 300, 5), "item": numbers(1, 300)},
            {"clicked_items": "item", "bought_items": "item"},
        ),
        ({"clicked_items": lists(1, 300), "bought_items": lists(1, 300, 5)}, {"bought_items": "clicked_items"}),
    ],
    ids=lambda value: "-".join(value),
)
def test_other_columns_that_share_a_table(columns: dict[str, Any], expected: dict[str, str], tmp_path: Path) -> None:
    if "friends" in columns:
        columns["friends"] = pa.array([[id * 10**12 for id in ids] for ids in columns["friends"].to_pylist()])
    inspection = inspected(tmp_path, columns)
    assert len(shared(inspection)) == len(expected)
    tables = [set(table["features"]) for table in inspection.proposal(8)["tables"]]
    for member, owner in expected.items():
        assert any({member, owner} <= features for features in tables)


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(2, 90), min_size=2, max_size=5), starts=st.lists(st.integers(0, 3), min_size=5))
def test_small_integers_of_unrelated_names_never_share(
    sizes: list[int], starts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = ["age_id", "city_code", "weekday_id", "device_id", "colors"]
    columns = {
        name: (lists if name == "colors" else numbers)(start, start + size + 1, seed)
        for seed, (name, size, start) in enumerate(zip(names, sizes, starts, strict=False))
    }
    assert shared(inspected(tmp_path_factory.mktemp("small"), columns)) == {}


def test_init_writes_one_table_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    inspected(tmp_path, {"user": numbers(0, 50), "item": numbers(0, 90), "history": lists(0, 90)})
    assert run(["init", "rows.parquet"]) == 0
    assert "history: shares the table of 'item'" in capsys.readouterr().out
    raw = yaml.safe_load((tmp_path / "rows.yaml").read_text())
    assert [table["features"] for table in raw["tables"]] == [["user"], ["item", "history"]]
