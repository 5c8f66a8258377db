"""Looking at a data set: the proposed schema reads it, and the check counts what is wrong with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import BadRows, DataError, Manifest, Mapping, Schema, check, convert, inspect, to_batch
from tests.data.sets import CITIES, GENRES, ROWS_OF, SCHEMA, USERS, table, write
from tests.data.test_fuzz import DECIMAL, FLOATS, INTS, ODD, TEXTS, array


def test_the_proposed_schema_reads_the_data(tmp_path: Path) -> None:
    write(tmp_path, [400, 300])
    found = inspect(str(tmp_path))
    roles = {c.name: c.role for c in found.columns}
    assert roles | {"row": "unused", "unused": "unused"} == roles  # counts the rows; holds zeros only
    assert (roles["label"], roles["age"], roles["user_id"]) == ("label", "dense", "id")
    assert (roles["genres"], roles["city"]) == ("id_list", "id")
    proposal = found.proposal()
    schema = Schema.model_validate(proposal["schema"])
    rows_of = {t["name"]: t["rows"] for t in proposal["tables"]}
    assert rows_of == {"user_id": USERS + 9, "genres": GENRES + 8, "city": 128}  # room for later ids
    data = pq.ParquetDataset(str(tmp_path)).read()
    assert to_batch(data, schema, rows_of).rows == 700
    assert not check(Manifest.read(str(tmp_path), schema), schema, rows_of).bad_rows


def test_a_sample_estimates_how_many_ids_there_are(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 1 << 40, 5000)[np.random.default_rng(1).integers(0, 5000, 40_000)]
    label = np.arange(40_000) % 2
    pq.write_table(pa.table({"user_id": ids, "label": label}), tmp_path / "x.parquet")
    user, _ = inspect(str(tmp_path), sample_rows=6000).columns
    assert user.distinct < 4000 and 4500 < user.ids_estimate < 5500
    assert user.table_rows == 16384 and not user.dense_range


def proposed(folder: Path, **options) -> tuple[Schema, dict[str, int]]:
    """The proposed schema and table rows, after every row of the data has been mapped by them."""
    proposal = inspect(str(folder), **options).proposal(vocabularies=folder.parent / "words")
    schema = Schema.model_validate(proposal["schema"])
    rows_of = {feature: t["rows"] for t in proposal["tables"] for feature in t["features"]}
    report = check(Manifest.read(str(folder), schema), schema, rows_of)
    assert not report.bad_rows, report.samples
    return schema, rows_of


@pytest.mark.parametrize("seed", range(12))
def test_what_is_proposed_always_trains(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    lists = [pa.list_(pa.float32(), 3), pa.list_(pa.int64())]
    kinds = [*INTS, *TEXTS, *FLOATS[1:], DECIMAL, *ODD[:2], pa.bool_(), *lists]
    rows, wild = rng.choice([12, 150, 400]), rng.choice([0.0, 0.1])
    names = rng.sample(["user_id", "ts", "weight", "session_id", "", "[red]x[/red]", "a b", "y2", "index", "z"], 8)
    columns = {name: array(rng.choice(kinds), rows, rng, wild) for name in names}
    columns["click"] = pa.array([rng.randrange(2) for _ in range(rows)])
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "data" / "x.parquet", row_group_size=100)
    schema, _ = proposed(tmp_path / "data", sample_rows=1000 if wild else 50)  # nulls beyond a sample are not seen
    assert schema.label is not None and schema.label.column == "click"


def test_logs_that_pandas_wrote_as_csv(tmp_path: Path) -> None:
    """As Open Bandit's: a nameless index, a few texts, the propensity of the logging policy."""
    rng = np.random.default_rng(0)
    rows = 600
    frame = pd.DataFrame(
        {
            "timestamp": pd.date_range("2019-11-24", periods=rows, freq="min"),
            "item_id": rng.integers(0, 80, rows),
            "position": rng.integers(1, 4, rows),
            "click": rng.random(rows) < 0.3,
            "propensity_score": rng.random(rows),
            "user_feature_0": rng.choice(
                ["81ce123cbb5bd8ce818f60fb3586bba5", "cef3390ed299c09874189c387777674a"], rows
            ),
            "affinity": rng.normal(5, 2, rows),
            "spent": np.exp(rng.normal(3, 2, rows)),
        }
    )
    frame["click"] = frame["click"].astype(int)
    frame["revenue"] = frame["click"] * rng.uniform(1, 2, rows)
    (tmp_path / "csv").mkdir()
    frame.to_csv(tmp_path / "csv" / "all.csv")
    list(convert(str(tmp_path / "csv"), tmp_path / "data"))
    found = {c.name: c for c in inspect(str(tmp_path / "data")).columns}
    assert found[""].role == "unused" and "has no name" in found[""].note
    assert found["propensity_score"].role == "unused" and "logging policy" in found["propensity_score"].note
    assert found["revenue"].role == "unused" and "predicts 'click' almost perfectly" in found["revenue"].note
    schema, rows_of = proposed(tmp_path / "data")
    assert schema.timestamp is not None and schema.timestamp.column == "timestamp"
    features = {feature.name: feature for feature in schema.sparse}
    assert list(features) == ["item_id", "position", "user_feature_0"]
    words = features["user_feature_0"].mapping
    assert words.kind == "vocabulary" and rows_of["user_feature_0"] == 3
    batch = to_batch(pq.read_table(tmp_path / "data"), schema, rows_of)
    assert sorted(set(batch.sparse["user_feature_0"].values().tolist())) == [1, 2]  # no two share a row
    assert [feature.name for feature in schema.dense] == ["affinity", "spent"]
    assert batch.dense.mean(0).tolist() == pytest.approx([0, 0], abs=1e-4)
    assert batch.dense.std(0).tolist() == pytest.approx([1, 1], abs=1e-2)
    assert [t.kind for t in schema.dense[1].transforms] == ["clip", "log1p", "standardize", "clip"]


def test_ids_are_rows_only_where_all_of_them_are_known_to_fit(tmp_path: Path) -> None:
    ids = np.concatenate([np.arange(100), [250]])[np.random.default_rng(0).integers(0, 100, 2000)]
    ids[-1] = 250  # beyond the sample
    (tmp_path / "data").mkdir()
    rows = pa.table({"item_id": ids, "label": np.arange(2000) % 2})
    pq.write_table(rows, tmp_path / "data" / "x.parquet")
    schema, rows_of = proposed(tmp_path / "data", sample_rows=500)
    assert schema.sparse[0].mapping.kind == "identity" and rows_of == {"item_id": 251 + 62}
    pq.write_table(rows, tmp_path / "data" / "x.parquet", write_statistics=False)
    schema, rows_of = proposed(tmp_path / "data", sample_rows=500)
    assert schema.sparse[0].mapping.kind == "vocabulary" and rows_of["item_id"] < 102


def test_ids_that_were_all_seen_have_rows_of_their_own_and_later_ones_share_one(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    ids = np.arange(2000) * 7 % 100
    pq.write_table(pa.table({"item_id": ids, "label": np.arange(2000) % 2}), tmp_path / "data" / "x.parquet")
    schema, rows_of = proposed(tmp_path / "data")
    assert schema.sparse[0].mapping.kind == "vocabulary" and rows_of == {"item_id": 101}
    later = Mapping(schema, rows_of, labels=False).to_batch({"item_id": [0, 99, 100, 10**12]})
    assert later.sparse["item_id"].values().tolist() == [1, 100, 0, 0]


def test_a_column_of_nearly_one_value_stays_within_a_few_deviations(tmp_path: Path) -> None:
    gains = np.where(np.arange(20_000) % 5000 == 4999, -99_999.0, 0.5)
    gains[7] = 0.25
    pq.write_table(pa.table({"gain": gains, "label": np.arange(20_000) % 2}), tmp_path / "x.parquet")
    schema = Schema.model_validate(inspect(str(tmp_path)).proposal()["schema"])
    dense = to_batch(pq.read_table(tmp_path / "x.parquet"), schema, {}).dense
    assert dense.min() == -5.0 and abs(dense).max() == 5.0


def test_texts_that_do_not_come_twice_are_no_ids(tmp_path: Path) -> None:
    columns = {"key": [f"k{n}" for n in range(200)], "city": ["a", "b"] * 100, "label": [0, 1, 1, 0] * 50}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    found = inspect(str(tmp_path))
    assert [c.role for c in found.columns] == ["unused", "id", "label"]
    assert "key or free text?" in found.columns[0].note


def test_the_label_is_what_the_user_says(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    income = np.array(["- 50000.", "50000+."])[(rng.random(400) < 0.1).astype(int)]
    columns = {"income": income, "told": income == "50000+.", "age": rng.integers(18, 90, 400)}
    columns["sex"] = np.array(["f", "m"] * 200)
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    found = inspect(str(tmp_path), label="income")
    proposal = found.proposal()["schema"]
    assert proposal["label"] == {"column": "income", "positive": "50000+.", "negative": "- 50000."}
    assert [c.role for c in found.columns] == ["label", "unused", "dense", "id"]
    assert "predicts 'income' almost perfectly" in found.columns[1].note
    other = inspect(str(tmp_path))
    assert other.label is not None and other.label.column == "told"
    assert "the only column with only 0 and 1" in other.columns[1].note
    assert other.columns[0].role == "unused", "it tells the label"
    pq.write_table(pa.table(columns).drop_columns("told"), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"possibly --label 'sex=m', --label 'income=50000\+.', --label 'age>=5"):
        inspect(str(tmp_path)).proposal()


def test_labels_are_suggested_that_the_next_command_takes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = {
        "event_type": np.array(["cart", "purchase", "view"])[rng.integers(0, 3, 400)],
        "rating": rng.integers(1, 11, 400) / 2,
        "label": pa.array([None if n % 5 == 0 else n % 2 for n in range(400)]),
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    suggested = r"possibly --label 'event_type=purchase', --label 'rating>=3'; 'label' is null in 80 rows"
    with pytest.raises(DataError, match=suggested):
        inspect(str(tmp_path)).proposal()
    for option in ("event_type=purchase", "rating>=3"):
        assert inspect(str(tmp_path), label=option).label is not None


def test_groups_are_proposed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = {"label": rng.integers(0, 2, 50), "user_id": rng.integers(0, 9, 50), "x": rng.normal(size=50)}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    proposal = inspect(str(tmp_path)).proposal()["schema"]
    assert proposal["group"] == {"column": "user_id"} and proposal["sparse"][0]["name"] == "user_id"
    pq.write_table(pa.table(columns | {"session_id": rng.integers(0, 20, 50)}), tmp_path / "x.parquet")
    proposal = inspect(str(tmp_path)).proposal()["schema"]
    assert proposal["group"] == {"column": "session_id"}
    assert [feature["name"] for feature in proposal["sparse"]] == ["user_id"]


def test_odd_columns_are_left_out_with_a_reason(tmp_path: Path) -> None:
    columns = {
        "deep": pa.array([[[1]], [[2]]]),
        "when": pa.array([1, 2], pa.duration("s")),
        "flag": pa.array([True, False]),
        "click": pa.array([0, 1]),
        "pairs": pa.array([[{"id": 1, "weight": 0.5}], []]),
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    found = inspect(str(tmp_path))
    roles = {c.name: c.role for c in found.columns}
    assert roles == {"deep": "unused", "when": "unused", "flag": "dense", "click": "label", "pairs": "weighted_id_list"}
    assert all(c.note for c in found.columns if c.role == "unused")
    Schema.model_validate(found.proposal()["schema"])
    pq.write_table(pa.table({"name": ["a", "b"]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="no column looks like a label"):
        inspect(str(tmp_path)).proposal()


def test_times_and_weights_are_proposed_as_such(tmp_path: Path) -> None:
    now = 1_700_000_000
    columns = {
        "label": pa.array([0, 1]),
        "date": pa.array([now, None], pa.timestamp("s")),
        "ts": pa.array([now * 1000, (now + 9) * 1000]),
        "seen": pa.array([now, now + 1], pa.timestamp("s")),
        "weight": pa.array([0.5, 2.0]),
        "sample_weight": pa.array([1.0, 1.0]),
        "time": pa.array([70, 95]),  # seconds of watching, say: no time of day
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    found = inspect(str(tmp_path))
    roles = {c.name: c.role for c in found.columns}
    assert roles == {
        "label": "label", "date": "unused", "ts": "timestamp", "seen": "unused", "weight": "sample_weight",
        "sample_weight": "unused", "time": "id",
    }  # fmt: skip
    assert next(c.note for c in found.columns if c.name == "seen") == "a schema has one timestamp: 'ts'"
    schema = Schema.model_validate(found.proposal()["schema"])
    assert schema.timestamp is not None and schema.sample_weight is not None
    assert (schema.timestamp.column, schema.timestamp.unit, schema.sample_weight.column) == ("ts", "ms", "weight")
    batch = to_batch(pq.read_table(tmp_path / "x.parquet"), schema, {"time": 96})
    assert batch.time is not None and batch.time.tolist() == [now, now + 9]
    assert batch.weight is not None and batch.weight.tolist() == [0.5, 2.0]


def test_check_counts_what_is_wrong(tmp_path: Path) -> None:
    write(tmp_path, [300])
    bad = table(100, 300, user_id=pa.array([None, 77, *([3] * 98)]), label=pa.array([1, 1, 5, *([0] * 97)]))
    pq.write_table(bad, tmp_path / "x.parquet")
    report = check(Manifest.read(str(tmp_path), SCHEMA, window_rows=64), SCHEMA, ROWS_OF)
    assert (report.rows, report.bad_rows, len(report.samples)) == (400, 3, 3)
    assert sum(report.reasons.values()) == 3
    source = pq.ParquetDataset(str(tmp_path)).read()
    by_name = {f.name: f for f in report.features}
    assert by_name["user"].nulls == 1 and by_name["user"].distinct_ids == USERS + 1
    lengths = [len(g) for i, g in enumerate(source["genres"].to_pylist()) if i not in (300, 301, 302)]
    assert by_name["genres"].lengths[:4].tolist() == np.bincount(lengths, minlength=4).tolist()
    city = by_name["city"]
    assert city.distinct_ids == 50 and city.used_rows <= CITIES and city.collisions == 50 - city.used_rows
    assert report.to_dict()["features"][0]["name"] == "row"


def test_the_work_of_check_grows_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded rows, of one large row group, whose windows have other ids each."""
    schema = Schema(label=None, labels=[{"name": "label"}], sparse=[{"name": "row", "mapping": {"kind": "hash"}}])
    decoded, iter_batches = [0], pq.ParquetFile.iter_batches

    def counting_batches(self: pq.ParquetFile, *args: Any, **kwargs: Any) -> Any:
        for batch in iter_batches(self, *args, **kwargs):
            decoded[0] += batch.num_rows
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counting_batches)
    for rows in (1_000, 4_000):
        pq.write_table(table(rows), tmp_path / "part.parquet", row_group_size=rows)
        decoded[0] = 0
        report = check(Manifest.read(str(tmp_path), schema, window_rows=50), schema, {"row": 100})
        assert report.features[0].distinct_ids == rows
        assert decoded[0] == rows


def test_check_looks_at_the_same_sample_each_time_and_says_of_how_many_rows(tmp_path: Path) -> None:
    write(tmp_path, [400, 400, 400, 400])
    data = Manifest.read(str(tmp_path), SCHEMA, window_rows=100)
    some = [check(data, SCHEMA, ROWS_OF, sample_rows=200).to_dict() for _ in range(2)]
    assert some[0] == some[1] and some[0]["rows"] == 200, "two windows of sixteen"
    by_name = {one["name"]: one for one in some[0]["features"]}
    assert by_name["row"]["used_rows"] == by_name["row"]["distinct_ids"] == 200, "each row once"
    pq.write_table(table(400, 800, label=pa.array([5] * 400)), tmp_path / "part-002.parquet")
    data = Manifest.read(str(tmp_path), SCHEMA, window_rows=100)
    assert check(data, SCHEMA, ROWS_OF, sample_rows=200).bad_rows == 100, "the sample is spread over the files"
    whole = check(data, SCHEMA, ROWS_OF, sample_rows=10**9)
    assert (whole.rows, whole.bad_rows) == (1600, 400) and whole.to_dict() == check(data, SCHEMA, ROWS_OF).to_dict()


def test_check_by_hand(tmp_path: Path) -> None:
    schema = Schema.model_validate(
        {
            "label": {"column": "label"},
            "sparse": [
                {"name": "item", "mapping": {"kind": "hash", "seed": 0}},
                {"name": "tags", "kind": "id_list", "mapping": {"kind": "identity"}},
            ],
        }
    )
    tags = [[0, 1], [], [1], None, [2, 2, 2], [9], [0] * 150, [1]]
    columns = {"label": [1, 0, 1, 0, 1, 1, 0, 7], "item": ["a", "b", "a", "c", "d", "a", "e", "f"], "tags": tags}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    manifest = Manifest.read(str(tmp_path), schema)
    report = check(manifest, schema, {"item": 1, "tags": 3}, BadRows(samples=1))
    assert (report.rows, report.bad_rows, report.positives, len(report.samples)) == (8, 3, 3, 1)
    item, lists = report.features
    assert (item.ids, item.nulls, item.used_rows, item.distinct_ids, item.collisions) == (5, 0, 1, 6, 5)
    assert (lists.ids, lists.nulls, lists.used_rows, lists.distinct_ids) == (2 + 0 + 1 + 3 + 150, 1, 3, 4)
    assert {size: n for size, n in enumerate(lists.lengths.tolist()) if n} == {0: 1, 1: 1, 2: 1, 3: 1, 100: 1}
    assert lists.counts.tolist() == [151, 2, 3] and lists.hottest == 151 / 156
    assert (lists.skew(3), lists.skew(2)) == (3 * 151 / 156, 2 * 153 / 156)
    assert item.skew(8) == 8, "a table of one row is on one rank"
    assert report.to_dict()["features"][1]["skew"] == {"8": 8 * 151 / 156, "64": 64 * 151 / 156}
    assert item.lengths[1] == item.lengths.sum() == 5
    good = check(manifest, schema, {"item": 9, "tags": 10})
    assert good.bad_rows == 2, "the label, and the list that is null"


def test_check_goes_on_past_unreadable_files(tmp_path: Path) -> None:
    manifest = Manifest.read(str(write(tmp_path, [100, 50])), SCHEMA)
    (tmp_path / "part-001.parquet").unlink()
    report = check(manifest, SCHEMA, ROWS_OF)
    assert report.bad_rows == 50 and "the file is gone" in next(iter(report.reasons))


def test_the_files_tell_the_ends_of_numbers_beside_texts(tmp_path: Path) -> None:
    """Of a sample alone larger ids could follow."""
    ids = np.arange(400) % 90
    columns = {"city": ["a", "b"] * 200, "item_id": ids[::-1], "label": np.arange(400) % 2}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet", row_group_size=100)
    found = {one.name: one for one in inspect(str(tmp_path), sample_rows=120).columns}
    assert (found["item_id"].low, found["item_id"].high) == (0, 89) and found["item_id"].dense_range


def test_a_second_flag_is_a_number_between_0_and_1(tmp_path: Path) -> None:
    flags = {"flag": np.arange(40) % 3 == 0, "click": np.arange(40) % 2}
    pq.write_table(pa.table(flags), tmp_path / "x.parquet")
    schema = Schema.model_validate(inspect(str(tmp_path)).proposal()["schema"])
    assert to_batch(pa.table(flags), schema, {}).dense[:2].tolist() == [[1.0], [-1.0]]


def test_what_leaves_no_row_is_told_with_the_first_file(tmp_path: Path) -> None:
    folder = write(tmp_path, [20, 20])
    with pytest.raises(DataError, match="no row can pass the filters `age > 99`") as caught:
        inspect(str(folder), filters=[["age", ">", 99]])
    assert caught.value.file == str(folder / "part-000.parquet")


def test_positives_are_those_of_the_first_label(tmp_path: Path) -> None:
    labels = {"labels": [{"name": "a"}, {"name": "b"}], "sparse": [{"name": "x"}]}
    schema = Schema.model_validate(labels)
    pq.write_table(pa.table({"a": [1, 0, 0, 0], "b": [1, 1, 1, 0], "x": [0, 1, 2, 9]}), tmp_path / "x.parquet")
    report = check(Manifest.read(str(tmp_path), schema), schema, {"x": 3})
    assert (report.rows, report.bad_rows, report.positives) == (4, 1, 1)


def test_lists_of_one_length_beside_each_other_are_a_sequence(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(0, 6, 300)

    def lists(draw: Callable[[int], npt.NDArray[np.generic]], kind: pa.DataType, sizes: Sequence[int]) -> pa.Array:
        return pa.array([draw(n).tolist() for n in sizes], pa.list_(kind))

    def ids(n: int) -> npt.NDArray[np.generic]:
        return random.integers(0, 40, n)

    at = lists(lambda n: 1_700_000_000_000 + random.integers(0, 10**9, n), pa.int64(), lengths)
    columns = {
        "item": random.integers(0, 40, 300),
        "seen_item": lists(ids, pa.int64(), lengths),
        "seen_shop": lists(lambda n: random.choice(["a", "b", "c"], n), pa.string(), lengths),
        "seen_price": lists(random.random, pa.float32(), lengths),
        "seen_at": at,
        "when": at.cast(pa.list_(pa.timestamp("ms"))),
        "tags": lists(ids, pa.int64(), random.integers(0, 6, 300)),
        "pair": lists(ids, pa.int64(), [2] * 300),
        "other_pair": lists(ids, pa.int64(), [2] * 300),
        "holes": pa.array([None if n == 3 else [1] * n for n in lengths.tolist()], pa.list_(pa.int64())),
        "label": random.integers(0, 2, 300),
    }
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "data" / "x.parquet")
    schema, _ = proposed(tmp_path / "data")
    (sequence,) = schema.sequences
    assert sequence.ids == ["seen_item", "seen_shop"]
    assert [(one.name, one.kind, one.unit) for one in sequence.values] == [
        ("seen_price", "number", "s"),
        ("seen_at", "time", "ms"),
        ("when", "time", "s"),
    ]
    assert {f.name for f in schema.sparse} >= {"item", "tags", "pair", "other_pair", "holes"}
    longer = lists(lambda n: random.choice(["a", "b"], n), pa.string(), lengths + 1)
    (tmp_path / "uneven" / "data").mkdir(parents=True)
    pq.write_table(pa.table({**columns, "seen_shop": longer}), tmp_path / "uneven" / "data" / "x.parquet")
    schema, _ = proposed(tmp_path / "uneven" / "data")
    assert schema.sequences == [], "the odd one out parts them: on one side one list, on the other none of ids"
