"""Runs whose features come from tables beside the rows are runs whose rows hold them; exports need the keys alone."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from rayrec.inference import Model, Scorer
from rayrec.train import ConfigError, Display, Trainer, evaluate_run, export_run, parse_config
from tests.train import small

ITEM = np.arange(small.ITEMS)
PRICE, TAGS = np.sin(ITEM) + 2, [[int(n) % small.TAGS] * (int(n) % 3) for n in ITEM]
HASHED = {"mapping": {"kind": "hash"}}
PLAIN = [{"name": "user"}, {"name": "item", **HASHED}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with the price of their item in them, and the table of items."""
    folder = small.write_all(tmp_path_factory.mktemp("runs"), rows=300)
    for file in (*folder.glob("train/*.parquet"), *folder.glob("eval/*.parquet")):
        rows = pq.read_table(file)
        items = rows.column("item").to_numpy()
        rows = rows.append_column("price", pa.array(PRICE[items]))
        pq.write_table(rows.append_column("tag", pa.array([TAGS[item] for item in items])), file, row_group_size=64)
    half = small.ITEMS // 2
    (folder / "items").mkdir()
    for number, part in enumerate((ITEM[half:], ITEM[:half])):
        table = pa.table({"id": part, "cost": PRICE[part], "tag": [TAGS[item] for item in part], "unread": part})
        pq.write_table(table, folder / "items" / f"{number}.parquet")
    return folder


def config(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    raw = small.raw_config(folder, name=name, **sections)
    raw["tables"][2]["features"] = ["tag"]
    return raw


@pytest.fixture(scope="module")
def joined(folder: Path) -> dict[str, Any]:
    raw = config(
        folder,
        "joined",
        schema__dense=[{"name": "age"}, {"name": "price", "from": "thing.cost", "by": "item"}],
        schema__sparse=[*PLAIN, {"name": "tag", "kind": "id_list", "from": "thing.tag", "by": "item"}],
    )
    raw["data"]["entities"] = {"thing": {"path": str(folder / "items"), "key": "id"}}
    return raw


def fit(raw: dict[str, Any]) -> Path:
    return Path(Trainer(parse_config(raw), display=Display(Console(file=io.StringIO()))).fit().folder)


def test_a_run_and_its_export_score_as_if_the_rows_held_the_columns(
    folder: Path, joined: dict[str, Any], tmp_path: Path
) -> None:
    sparse = [*PLAIN, {"name": "tag", "kind": "id_list"}]
    stored = config(folder, "stored", schema__dense=[{"name": "age"}, {"name": "price"}], schema__sparse=sparse)
    run, other = fit(joined), fit(stored)
    here, there = (small.flat(evaluate_run(each)) for each in (run, other))
    for figures in (here, there):
        for name in ("checkpoint", "seconds", "rows_per_s"):
            figures.pop(name, None)
    assert here == there
    export = export_run(run, tmp_path / "export").folder
    table = pq.read_table(next((folder / "eval").glob("*.parquet")))
    request = table.select(["user", "item", "age"])
    (folder / "items").rename(tmp_path / "gone")
    scorer = Scorer(Model(export))
    try:
        by_key = scorer.score(request)
    finally:
        (tmp_path / "gone").rename(folder / "items")
    whole = Scorer(Model(export_run(other, tmp_path / "other").folder)).score(
        table.select(["user", "item", "age", "price", "tag"])
    )
    assert by_key.probabilities["label"].tolist() == whole.probabilities["label"].tolist() and not by_key.errors
    assert not list((export / "entities").rglob("*2.arrow")), "the columns that no feature reads stay away"
    errors = scorer.score({"user": [1, 1], "item": [10**6, 1], "age": [0.0, 0.0]}).errors
    assert [*errors] == [0] and "no entity with this key" in str(errors[0])


def test_histories_of_events_score_as_if_the_rows_held_them(folder: Path, tmp_path: Path) -> None:
    """Ids and times of a sequence; `where` counts before `last`."""
    draw = np.random.default_rng(0)
    events = pa.table(
        {
            "who": draw.integers(0, small.USERS, 2000),
            "when": 1_699_900_000 + draw.integers(0, 400_000, 2000),
            "what": draw.integers(0, small.TAGS, 2000),
            "how": draw.choice(["like", "skip"], 2000),
        }
    )
    pq.write_table(events, folder / "events.parquet")
    liked = events.filter(pc.equal(events.column("how"), "like")).sort_by("when").to_pylist()
    for part in ("train", "eval"):
        rows = pq.read_table(folder / part)
        past = [
            [event for event in liked if event["who"] == user and event["when"] < at][-5:]
            for user, at in zip(rows.column("user").to_pylist(), rows.column("at").to_pylist(), strict=True)
        ]
        lists = {"past": [[e["what"] for e in of] for of in past], "past_at": [[e["when"] for e in of] for of in past]}
        for name, values in lists.items():
            rows = rows.append_column(name, pa.array(values, pa.list_(pa.int64())))
        (folder / f"with_past_{part}").mkdir()
        pq.write_table(rows, folder / f"with_past_{part}" / "0.parquet", row_group_size=64)
    sequence = {"name": "history", "values": [{"name": "past_at", "kind": "time"}]}
    stored = {"ids": ["past"], "length": 5}
    joined = {"from": "log", "by": "user", "before": "at", "last": 5, "where": {"how": ["like"]}}
    of_log = {"values": [{"name": "past_at", "kind": "time", "from": "when"}]}
    runs, tables = [], {"log": {"path": str(folder / "events.parquet"), "key": "who", "time": "when"}}
    for name, of_sequence, feature in (
        ("stored_past", stored, {"kind": "id_list"}),
        ("joined_past", joined | of_log, {"from": "history.what"}),
    ):
        sparse = [*PLAIN, {"name": "past"} | feature]
        changes = {"schema__sparse": sparse, "schema__sequences": [sequence | of_sequence], "data__events": tables}
        raw = small.raw_config(folder, name=name, trainer__epochs=1, **changes)
        raw["data"] |= {"train": str(folder / "with_past_train"), "eval": str(folder / "with_past_eval")}
        raw["tables"][2]["features"] = ["past"]
        runs.append(fit(raw))
    assert evaluate_run(runs[0])["auc"] == evaluate_run(runs[1])["auc"]
    rows = pq.read_table(folder / "with_past_eval").slice(0, 50)
    exports = [Scorer(Model(export_run(run, tmp_path / run.name).folder)) for run in runs]
    stored_scores = exports[0].score(rows.select(["user", "item", "age", "past", "past_at"]))
    (folder / "events.parquet").unlink()
    joined_scores = exports[1].score(rows.select(["user", "item", "age", "at"]))
    assert stored_scores.probabilities["label"].tolist() == joined_scores.probabilities["label"].tolist()
    assert {*exports[1].mapping.schema.feature_columns} == {"user", "item", "age", "at"}
    own = rows.select(["user", "item", "age", "at", "past", "past_at"])
    own = own.rename_columns(["user", "item", "age", "at", "history.what", "history.when"])
    longer = own.set_column(4, "history.what", pa.array([[1, 2, 3]] * 50))
    longer = longer.set_column(5, "history.when", pa.array([[1_600_000_000] * 3] * 50))
    scores = [exports[1].score(given).probabilities["label"].tolist() for given in (own, longer)]
    assert scores[0] == stored_scores.probabilities["label"].tolist() != scores[1], "rows may bring their events"


def test_a_new_item_needs_no_training(folder: Path, joined: dict[str, Any], tmp_path: Path) -> None:
    """An extended table is exported anew, or given to `predict`: a resumed run goes on with it as well."""
    raw = copy.deepcopy(joined) | {"name": "extended"}
    items = tmp_path / "items"
    items.mkdir()
    for file in (folder / "items").glob("*.parquet"):
        (items / file.name).write_bytes(file.read_bytes())
    raw["data"]["entities"]["thing"]["path"] = str(items)
    run = fit(raw)
    pq.write_table(pa.table({"id": [999], "cost": [2.5], "tag": [[1]], "unread": [0]}), items / "new.parquet")
    raw["trainer"]["epochs"] = 3
    assert fit(raw) == run
    scorer = Scorer(Model(export_run(run, tmp_path / "export").folder))
    scores = scorer.score({"user": [1], "item": [999], "age": [0.0]})
    assert not scores.errors and 0 < scores.probabilities["label"][0] < 1


@pytest.mark.parametrize(
    ("feature", "entities", "problem"),
    [
        ({"from": "thing.cost"}, {}, "schema.dense.price: from: thing.cost needs `by`"),
        ({"by": "item"}, {}, "schema.dense.price: give `from`: TABLE.COLUMN"),
        ({"from": "think.cost", "by": "item"}, {}, r"as TABLE.COLUMN \(thing\); did you mean 'thing'"),
        (
            {"from": "cost", "by": "item"},
            {},
            "must be a column of a table in data.entities or of a sequence of events, as TABLE.COLUMN",
        ),
        ({"from": "thing.cost", "by": "item", "column": "x"}, {}, "not both"),
        ({"from": "thing.cost", "by": "item"}, {"columns": ["tag"]}, r"data.entities.thing.columns has no 'cost'"),
        ({"from": "thing.cost", "by": "item"}, {"valid_from": "since"}, "data.entities.thing: give both valid_from"),
        ({"from": "thing.cost", "by": "item"}, {"kee": "id"}, "data.entities.thing.kee: unknown field"),
    ],
)
def test_what_is_wrong_in_a_config_is_named(
    joined: dict[str, Any], feature: dict[str, Any], entities: dict[str, Any], problem: str
) -> None:
    raw = copy.deepcopy(joined)
    raw["schema"]["dense"][1] = {"name": "price", **feature}
    raw["schema"]["sparse"][2] = {"name": "tag", "kind": "id_list"}
    raw["data"]["entities"]["thing"] |= entities
    with pytest.raises(ConfigError, match=problem):
        parse_config(raw)
