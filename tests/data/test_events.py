"""Histories of a log of events, joined to rows by key and time, against `data sequence` and a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec import cli
from rayrec.data import DataError, Schema, to_batch
from rayrec.train import parse_config
from tests.train import small

HASHED = {"mapping": {"kind": "hash"}}


def schema_of(path: Path, last: int, takes: tuple[str, ...] = ("item",), **options: Any) -> Schema:
    """Lists of events, one for each column that is taken."""
    spec = {
        "kind": "events",
        "column": "user",
        "path": str(path),
        "key": "user",
        "time": "at",
        "at": "now",
        "last": last,
    }
    return Schema.model_validate(
        {
            "sparse": [{"name": take, "kind": "id_list", "column": f"last {take}", **HASHED} for take in takes],
            "derived": [spec | {"name": f"last {take}", "take": take} | options for take in takes],
        }
    )


def lists(schema: Schema, **columns: Any) -> dict[str, list[list[int]]]:
    table = pa.table({"label": np.zeros(len(next(iter(columns.values())))), **columns})
    names = [feature.name for feature in schema.sparse]
    sparse = to_batch(table, schema, dict.fromkeys(names, 1 << 20)).sparse
    return {name: [bag.tolist() for bag in sparse[name].to_dense()] for name in names}


def rows_of(values: list[list[Any]]) -> list[list[int]]:
    """The table rows of lists of ids."""
    plain = Schema.model_validate({"sparse": [{"name": "x", "kind": "id_list", **HASHED}]})
    kind = pa.list_(pa.string() if any(isinstance(v, str) for row in values for v in row) else pa.int64())
    return lists(plain, x=pa.array(values, kind))["x"]


@settings(max_examples=25)
@given(st.data())
def test_a_row_has_the_last_events_before_it(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Events at equal times keep the order of the files, and those at the time of the row are not in it."""
    draw = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    events, rows, last = (data.draw(st.integers(1, most)) for most in (400, 100, 30))
    of_text, files = data.draw(st.booleans()), data.draw(st.integers(1, 3))
    user, at = draw.integers(0, 8, events), draw.integers(0, 40, events)
    item, action = draw.integers(0, 99, events), draw.integers(0, 3, events)
    folder = tmp_path_factory.mktemp("events")

    def typed(keys: Any) -> list[Any]:
        return [f"u{key}" for key in keys] if of_text else [*map(int, keys)]

    log = pa.table({"user": typed(user), "at": at, "item": item, "action": [f"a{n}" for n in action]})
    for number, part in enumerate(np.array_split(np.arange(events), files)):
        pq.write_table(log.take(pa.array(part)), folder / f"{number}.parquet", row_group_size=50)
    who, now = draw.integers(0, 10, rows), draw.integers(0, 45, rows)
    null_now = draw.random(rows) < 0.05
    where = data.draw(st.sampled_from([{}, {"action": ["a0", "a2"]}, {"action": ["a1"], "item": [3, 4, 5, 6]}]))

    def expected(column: Any) -> list[list[Any]]:
        chosen = np.ones(events, bool)
        for name, values in where.items():
            chosen &= np.isin(np.array(log.column(name).to_pylist()), values)
        order = np.argsort(at, kind="stable")
        histories = [
            [column[e] for e in order if chosen[e] and user[e] == k and at[e] < t][-last:]
            for k, t in zip(who, now, strict=True)
        ]
        return [[] if null else history for null, history in zip(null_now, histories, strict=True)]

    schema = schema_of(folder, last, ("item", "action"), where=where)
    features = [feature.model_copy(update={"on_null": "empty"}) for feature in schema.sparse]
    found = lists(
        schema.model_copy(update={"sparse": features}), user=typed(who), now=pa.array(now, pa.int64(), mask=null_now)
    )
    assert found["item"] == rows_of(expected([*map(int, item)]))
    assert found["action"] == rows_of(expected(log.column("action").to_pylist()))


def test_lists_are_those_of_data_sequence(tmp_path: Path) -> None:
    """On 100,000 events, of which each is a row as well."""
    draw, events = np.random.default_rng(0), 100_000
    users, times = (draw.zipf(1.3, events) % 500).astype(np.int64), 1_600_000_000 + draw.integers(0, 30_000, events)
    log = pa.table({"user": users, "at": times, "item": draw.integers(0, 1000, events), "label": np.zeros(events)})
    pq.write_table(log, tmp_path / "log.parquet")
    line = f"data sequence {tmp_path}/log.parquet --out {tmp_path}/rows --user user --time at --column item --length 20"
    assert cli.run(line.split()) == 0
    rows = pq.read_table(tmp_path / "rows")
    schema = schema_of(tmp_path / "log.parquet", 20)
    found = lists(schema, user=rows.column("user"), now=rows.column("at"))["item"]
    assert found == rows_of(rows.column("history_item").to_pylist()) and max(map(len, found)) == 20


def test_what_happens_later_changes_nothing(tmp_path: Path) -> None:
    """Other events at the time of a row, or after it, in any order of the files."""
    draw = np.random.default_rng(1)
    found = []
    for part in range(3):
        earlier = {"user": [1, 1, 2], "at": [10, 20, 30], "item": [5, 6, 7]}
        later = {"user": draw.integers(1, 3, 50), "at": draw.integers(40, 99, 50), "item": draw.integers(0, 9, 50)}
        log = pa.table({name: np.concatenate([later[name], earlier[name]]) for name in earlier})
        pq.write_table(log, tmp_path / f"{part}.parquet")
        found.append(lists(schema_of(tmp_path / f"{part}.parquet", 9), user=[1, 2, 3], now=[40, 40, 40])["item"])
    assert found == [rows_of([[5, 6], [7], []])] * 3


def test_a_config_names_events_once(tmp_path: Path) -> None:
    raw = small.raw_config(tmp_path, data__events={"log": {"path": "log", "key": "user", "time": "at"}})
    raw["schema"] |= {
        "sparse": [*raw["schema"]["sparse"][:2], {"name": "tags", "from": "past.item", **HASHED}],
        "sequences": [
            {"name": "past", "from": "log", "before": "at", "last": 30, "where": {"action": "like"}}
            | {"values": [{"name": "times", "from": "at", "kind": "time"}]}
        ],
    }
    schema = parse_config(raw).data_schema
    (past,) = schema.sequences
    assert past.ids == ["tags"] and past.length == 30 and schema.sparse[2].kind == "id_list"
    item, time = schema.derived
    assert (schema.sparse[2].column, past.values[0].column) == (item.name, time.name)
    assert item.inputs == ["user", "at"] and item.where == {"action": ["like"]}  # type: ignore[union-attr]
    assert parse_config(parse_config(raw).to_dict()).data_schema == schema
    age = {"name": "age", "kind": "age", "column": time.name, "at": "at"}
    raw["schema"]["derived"] = [age, {"name": "bucket", "kind": "buckets", "column": "age", "log_base": 2}]
    names = [column.name for column in parse_config(raw).data_schema.derived]
    assert names.index(time.name) < names.index("age"), "columns that are derived from events follow them"


def test_a_row_may_bring_its_own_events(tmp_path: Path) -> None:
    """As in a request to a service; rows that bring none have those of the log."""
    log = pa.table({"user": [1, 1, 2], "at": [10, 20, 30], "item": pa.array([5, 6, 7], pa.int8())})
    pq.write_table(log, tmp_path / "log.parquet")
    schema = schema_of(tmp_path / "log.parquet", 9)
    rows = {"user": [1, 1, 2], "now": [40, 40, 40]}
    assert lists(schema, **rows)["item"] == rows_of([[5, 6], [5, 6], [7]])
    own = {"last item": [[1000, 3], None, []]}
    assert lists(schema, **rows, **own)["item"] == rows_of([[1000, 3], [5, 6], []])
    with pytest.raises(DataError, match="the lists of 'last item' are"):
        lists(schema, **rows, **{"last item": pa.array([["x"], ["y"], ["z"]])})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"from": "lag"}, r"sequences.past: from: lag must be a table in data.events \(log\); did you mean 'log'"),
        ({"before": None}, "sequences.past: a sequence of events needs `before`"),
        ({"last": 0}, "last"),
    ],
)
def test_what_is_wrong_with_a_sequence_is_named(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    raw = small.raw_config(tmp_path, data__events={"log": {"path": "log", "key": "user", "time": "at"}})
    past = {"name": "past", "from": "log", "before": "at", "last": 30} | change
    past = {key: value for key, value in past.items() if value is not None}
    raw["schema"] |= {"sparse": [{"name": "tags", "from": "past.item", **HASHED}], "sequences": [past]}
    with pytest.raises(ValueError, match=problem):
        parse_config(raw)


@pytest.mark.parametrize(
    ("columns", "where", "problem"),
    [
        ({"user": ["a"], "at": [1], "item": [1]}, {}, "the rows' keys are integers, those of .* are strings"),
        ({"user": [1], "at": [None], "item": [1]}, {}, "have no time"),
        ({"user": [1], "at": ["2020"], "item": [1]}, {}, "timestamps, dates or integers"),
        ({"user": [1], "at": [1], "what": [1]}, {}, "'item'"),
        ({"user": [1], "at": [1], "item": [1]}, {"item": ["x"]}, "where: item is int64, and cannot be one of"),
        ({"user": [1], "at": [1], "item": [1]}, {"action": ["x"]}, "'action'"),
    ],
)
def test_what_is_wrong_with_a_log_is_named(
    tmp_path: Path, columns: dict[str, Any], where: dict[str, Any], problem: str
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    with pytest.raises(DataError, match=problem):
        lists(schema_of(tmp_path / "log.parquet", 5, where=where), user=[1], now=[2])
