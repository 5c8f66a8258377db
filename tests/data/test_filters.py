"""Hive partitions and filters: which files, row groups and rows are read, and that those come exactly once."""

from __future__ import annotations

import datetime
import random
import shutil
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data import (
    BadRows,
    BatchStream,
    Condition,
    Cursor,
    DataError,
    DataSet,
    Manifest,
    Mix,
    ReadOptions,
    Schema,
    WeightedDataSet,
    check,
    count_column,
    inspect,
)
from rayrec.data.order import epoch_planner
from rayrec.data.source.filters import OPERATORS, rows_that_pass
from rayrec.data.stream.reading import Recipe, window_shares
from rayrec.data.stream.survivors import survivors_of
from rayrec.storage import retries
from tests.data.mapped import kept
from tests.data.sets import ROWS_OF, SCHEMA, table
from tests.data.test_stream import LOCAL, RAY, row_ids, same, stream

DAYS = {"2024-01-01": (700, 90), "2024-01-02": (0, 350), "2024-01-03": (401,), "__HIVE_DEFAULT_PARTITION__": (60,)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Days and hours as folders; the column `row` counts through, so statistics tell its row groups apart."""
    top, first = tmp_path_factory.mktemp("set") / "of=elsewhere", 0
    for day, sizes in DAYS.items():
        for hour, rows in enumerate(sizes):
            below = top / f"day={day}" / f"hour={hour:02d}"
            below.mkdir(parents=True)
            pq.write_table(table(rows, first), below / "x.parquet", row_group_size=100)
            first += rows
    return top


def oracle(folder: Path, filters: list[Any]) -> list[int]:
    """The rows that pyarrow finds; it compares dates of folders as texts, as we do, when it is told that they are."""
    kinds = pa.schema([("day", pa.string()), ("hour", pa.int64())])
    found = pads.dataset(str(folder), format="parquet", partitioning=pads.partitioning(kinds, flavor="hive"))
    return sorted(
        found.to_table(["row"], filter=pq.filters_to_expression(filters) if filters else None)["row"].to_pylist()
    )


FILTERS: list[list[Any]] = [
    [],
    [("day", ">=", "2024-01-02")],
    [("day", "=", "2024-01-01"), ("hour", "!=", 0)],
    [("hour", "in", [1, 7])],
    [("row", "<", 250)],
    [("age", ">", 50.0)],
    [("age", ">", 50), ("day", "<", "2024-01-03"), ("city", "in", ["city 3", "city 4"])],
    [("user_id", "in", [3, 5, 39]), ("price", "<=", 100.0)],
    [("price", "!=", 8.0)],
    [("row", ">=", 700), ("row", "<", 705)],
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_rows_are_those_that_pyarrow_finds(folder: Path, filters: list[Any]) -> None:
    manifest = Manifest.read(str(folder), SCHEMA, filters=filters, window_rows=200)
    with stream(manifest, Cursor.start(0), 0, 1, shuffle=False) as batches:
        assert row_ids([b for b, _ in batches]) == oracle(folder, filters)


@settings(max_examples=15)
@given(data=st.data())
def test_exactly_once_under_stops_and_resizes(folder: Path, data: st.DataObject) -> None:
    filters = data.draw(st.sampled_from(FILTERS))
    manifest = Manifest.read(
        str(folder), SCHEMA, filters=filters, window_rows=data.draw(st.sampled_from([90, 200, 900]))
    )
    cursor, ids, epoch = Cursor.start(1), [], 1
    for _ in range(4):
        world_size, batch_rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 120))
        steps, after = data.draw(st.integers(0, 5)), []
        for rank in range(world_size):
            with stream(manifest, cursor, rank, world_size, batch_rows=batch_rows) as batches:
                last: Any = batches.start_cursor
                for _ in range(steps):
                    batch, last = next(batches, (None, last))
                    ids += [] if batch is None else row_ids([batch])
                after.append(last)
        cursor = Cursor.from_dict(Cursor.merge(after).to_dict())
        assert cursor.epoch == epoch
    with stream(manifest, cursor, 0, 1) as batches:
        for batch, last in batches:
            ids += row_ids([batch])
            assert batch.rows == 64 or last.rows_done == manifest.rows
            cursor = Cursor.merge([last])
    assert sorted(ids) == oracle(folder, filters)
    assert cursor.rows_done == manifest.rows


def test_resume_continues_the_very_same_batches(folder: Path) -> None:
    manifest = Manifest.read(str(folder), SCHEMA, filters=[("age", ">", 30.0)], window_rows=200)
    ranks = [[(b, c) for b, c in stream(manifest, Cursor.start(0), rank, 2, batch_rows=20)] for rank in range(2)]
    cursor = Cursor.merge([ranks[0][4][1], ranks[1][6][1]])
    for rank, done in ((0, 5), (1, 7)):
        with stream(manifest, cursor, rank, 2, batch_rows=20) as batches:
            rest = list(batches)
        assert len(rest) == len(ranks[rank]) - done
        assert all(same(a, b) for (a, _), (b, _) in zip(rest, ranks[rank][done:], strict=True))


def test_through_ray_the_same_batches(folder: Path, running_ray: None) -> None:
    manifest = Manifest.read(str(folder), SCHEMA, filters=[("age", ">", 30.0), ("hour", "=", 0)], window_rows=200)
    for rank in range(2):
        pairs = [list(stream(manifest, Cursor.start(3), rank, 2, options=options)) for options in (LOCAL, RAY)]
        for (a, after_a), (b, after_b) in zip(*pairs, strict=True):
            assert same(a, b) and after_a.to_dict() == after_b.to_dict()


def write_clumps(file: Path, passing: int, rows: int = 3000, row_group: int = 50) -> Path:
    """A file of which one row group in `passing` has rows with an age above 1000, and no statistics say which."""
    whole, random = table(rows), np.random.default_rng(0)
    clumps = (np.arange(rows) // row_group % passing == 0) & (random.random(rows) < 0.4)
    ages = pa.array(np.where(clumps, 2000.0, whole["age"].to_numpy()), whole["age"].type)
    pq.write_table(
        whole.set_column(whole.schema.get_field_index("age"), "age", ages), file,
        row_group_size=row_group, write_statistics=False,
    )  # fmt: skip
    return file


@settings(max_examples=20)
@given(data=st.data())
def test_the_same_rows_whether_or_not_filters_are_read_first(tmp_path_factory: Any, data: st.DataObject) -> None:
    file = write_clumps(tmp_path_factory.mktemp("clumps") / "x.parquet", data.draw(st.sampled_from([1, 2, 5, 20])))
    manifest = Manifest.read(str(file), SCHEMA, filters=[("age", ">", 1000.0)], window_rows=200)
    world_size, epoch = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 5))
    more = {"shuffle": data.draw(st.booleans()), "interleave": data.draw(st.sampled_from([1, 3])), "batch_rows": 20}

    def read(cursor: Cursor) -> list[list[tuple[Any, Any]]]:
        return [list(stream(manifest, cursor, rank, world_size, **more)) for rank in range(world_size)]

    survivors_of.cache_clear()
    first = read(Cursor.start(epoch))
    for _ in range(3):
        again = read(Cursor.start(epoch))
        for one, other in zip(first, again, strict=True):
            assert all(same(a, b) and x.to_dict() == y.to_dict() for (a, x), (b, y) in zip(one, other, strict=True))
    if min(map(len, first)) > 2:
        cursor = Cursor.merge([batches[1][1] for batches in first])
        rest = read(cursor)
        for one, other in zip(first, rest, strict=True):
            assert all(same(a, b) for (a, _), (b, _) in zip(one[2:], other, strict=True))


def test_columns_are_not_read_where_no_row_passes(tmp_path: Path) -> None:
    """Damage of other columns there is not noticed, once it is known that few row groups have a row."""
    file = write_clumps(tmp_path / "x.parquet", passing=20)
    footer = pq.ParquetFile(file).metadata
    raw = bytearray(file.read_bytes())
    number = next(n for n, name in enumerate(footer.schema.names) if name == "price")
    for group in range(footer.num_row_groups):
        chunk = footer.row_group(group).column(number)
        start = chunk.dictionary_page_offset or chunk.data_page_offset
        if group % 20:
            raw[start : start + chunk.total_compressed_size] = bytes(chunk.total_compressed_size)
    file.write_bytes(raw)
    manifest = Manifest.read(str(tmp_path), SCHEMA, filters=[("age", ">", 1000.0)], window_rows=50)
    survivors = survivors_of(manifest.filters, 1.0)
    for _ in range(30):
        survivors.note(np.array([False]))
    with stream(manifest, Cursor.start(0), 0, 1, shuffle=False) as batches:
        ids = row_ids([batch for batch, _ in batches])
    assert len(ids) > 20 and all(row // 50 % 20 == 0 for row in ids)
    survivors_of.cache_clear()
    with pytest.raises(DataError, match="not readable"), stream(manifest, Cursor.start(0), 0, 1) as batches:
        list(batches)


def test_filters_that_leave_almost_nothing_are_no_stall(tmp_path: Path) -> None:
    """All windows together take longer than a stall, each of them less, and only the last one has a row."""
    rows = 140
    pq.write_table(table(rows), tmp_path / "x.parquet", row_group_size=20, write_statistics=False)
    slow = {"kind": "custom", "name": "slow", "function": f"{__name__}:slowly", "columns": ["row"]}
    sparse = [feature.model_dump() for feature in SCHEMA.sparse[:1]] + [{"name": "slow", "mapping": {"kind": "hash"}}]
    schema = Schema.model_validate({"sparse": sparse, "derived": [slow]})
    options = ReadOptions(reader="local", stall_timeout_s=1.0, patience_s=0)
    for wanted in ([rows - 1], []):
        manifest = Manifest.read(str(tmp_path), schema, filters=[("row", "in", wanted or [10**6])], window_rows=20)
        sizes = {"row": 10**6, "slow": 10}
        more = {"rank": 0, "world_size": 1, "cursor": Cursor.start(0), "seed": 0, "batch_rows": 64, "options": options}
        with BatchStream(manifest, schema, sizes, shuffle=False, **more) as batches:
            assert [id_ for b, _ in batches for id_ in b.sparse["row"].values().tolist()] == wanted


def slowly(rows: pa.Array) -> pa.Array:
    """Takes a fifth of a stall for each window, also for one without rows."""
    time.sleep(0.2)
    return rows


def test_ray_says_that_it_reads_where_nothing_passes(tmp_path: Path, running_ray: None) -> None:
    from rayrec.data.stream.ray_reader import read_ray

    pq.write_table(table(400), tmp_path / "x.parquet", row_group_size=10, write_statistics=False)
    manifest = Manifest.read(str(tmp_path), SCHEMA, filters=[("row", "in", [205, 399])], window_rows=10)
    planner = epoch_planner.EpochPlanner(manifest)
    part = planner.open(Cursor.start(0), epoch_planner.Ordering(seed=0, shuffle=False), 0, 1)
    how = (manifest.columns, SCHEMA, ROWS_OF, 0, 0, False, retries.Patience(), BadRows(), manifest.filters)
    tables = list(read_ray(window_shares(planner, part), Recipe(*how), RAY))
    assert sum(len(one) for one in tables) == 2 and len(tables) > 5


def test_what_cannot_pass_is_never_opened(folder: Path, tmp_path: Path) -> None:
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(table(1000), tmp_path / f"day={day}" / "x.parquet", row_group_size=100)
    (tmp_path / "day=1" / "broken.parquet").write_bytes(b"no parquet")
    manifest = Manifest.read(str(tmp_path), SCHEMA, filters=[("day", ">", 1), ("row", ">=", 250), ("row", "<=", 399)])
    assert [f.uri for f in manifest.files] == [str(tmp_path / "day=2/x.parquet")]
    assert np.flatnonzero(~manifest.files.left_out).tolist() == [2, 3] and manifest.rows == 200
    assert [str(c) for c in manifest.filters] == ["row >= 250", "row <= 399"], "the folder has answered for the day"
    whole = Manifest.read(str(tmp_path), SCHEMA, filters=[("day", "=", 2)])
    assert whole.filters == () and whole.rows == 1000
    assert len({manifest.fingerprint, whole.fingerprint}) == 2


@settings(max_examples=80)
@given(seed=st.integers(0, 1 << 30))
def test_statistics_leave_out_no_row_that_passes(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    rng = random.Random(seed)
    day = datetime.date(2024, 1, 1)
    kind, values = rng.choice(
        [
            (pa.int32(), range(-20, 20)),
            (pa.uint64(), [0, 5, 2**63, 2**64 - 1]),
            (pa.float32(), [0.1, -1.5, float("nan"), 1e30, -0.0, 0.0]),
            (pa.string(), ["", "a", "ab", "z" * 90, "ü"]),
            (pa.string_view(), ["", "a", "ab"]),
            (pa.dictionary(pa.int8(), pa.string()), ["a", "b", "c"]),
            (pa.bool_(), [True, False]),
            (pa.decimal128(9, 2), [Decimal("1.10"), Decimal("-3.00"), Decimal("7.25")]),
            (pa.date32(), [day, day + datetime.timedelta(40)]),
            (pa.timestamp("ns", "UTC"), [datetime.datetime(2024, 1, d, tzinfo=datetime.UTC) for d in (1, 2, 9)]),
        ]
    )
    rows = [rng.choice([*values, None]) for _ in range(60)]
    plain = [v for v in values if v == v]
    op = rng.choice([op for op in OPERATORS if kind != pa.bool_() or op not in ("<", "<=", ">", ">=")])
    given = [rng.choice(plain) for _ in range(3)]
    given = [
        float(v) if isinstance(v, Decimal) else v.isoformat() if isinstance(v, datetime.date) else v for v in given
    ]
    condition = Condition.parse(["x", op, given if "in" in op else given[0]])
    column = pa.array(rows, kind) if kind != pa.string_view() else pa.array(rows, pa.string()).cast(kind)
    file = tmp_path_factory.mktemp("s") / "x.parquet"
    pq.write_table(pa.table({"x": column, "row": range(60), "label": [0] * 60}), file, row_group_size=7)
    passing = np.flatnonzero(rows_that_pass(pq.read_table(file), [condition])).tolist()
    assert passing == [k for k, v in enumerate(rows) if v is not None and _slow(v, op, given, kind)], condition
    schema = Schema.model_validate({"sparse": [{"name": "row"}]})
    try:
        manifest = Manifest.read(str(file), schema, filters=[condition])
    except DataError as error:
        assert "no row can pass" in str(error) and not passing
        return
    batches = BatchStream(
        manifest, schema, {"row": 60}, batch_rows=9, rank=0, world_size=1, cursor=Cursor.start(0), seed=0, options=LOCAL
    )
    assert sorted(row_ids([b for b, _ in batches])) == passing


def _slow(value: Any, op: str, given: list[Any], kind: pa.DataType) -> bool:
    """One value at a time, in Python."""
    if kind == pa.float32():
        given, value = [float(np.float32(v)) for v in given], float(np.float32(value))
    given = [Decimal(str(v)) if isinstance(value, Decimal) else v for v in given]
    value = value.isoformat() if isinstance(value, datetime.date) else value
    first = given[0]
    found = {
        "=": value == first,
        "==": value == first,
        "!=": value != first,
        "in": value in given,
        "not in": value not in given,
    }
    if op in found:
        return found[op]
    return {"<": value < first, "<=": value <= first, ">": value > first, ">=": value >= first}[op]


HIVE = Schema.model_validate(
    {
        "sparse": [
            {"name": "row"},
            {"name": "hour", "on_null": "empty"},
            {"name": "place", "mapping": {"kind": "hash"}, "on_null": "empty"},
        ],
    }
)


def test_folders_are_columns(tmp_path: Path) -> None:
    places = ["a%20b%2Fc", "ü=x", "__HIVE_DEFAULT_PARTITION__"]
    for number, place in enumerate(places):
        below = tmp_path / f"place={place}" / f"hour={number:02d}"
        below.mkdir(parents=True)
        own = {"hour": [9] * 10, "place": ["own"] * 10} if number == 0 else {}
        pq.write_table(table(10, 10 * number, **own), below / "x=1.parquet")
    manifest = Manifest.read(f"{tmp_path}/place=*/**/*.parquet", HIVE)
    assert dict(manifest.columns) == {"label": pa.int64(), "row": pa.int64(), "hour": pa.int64(), "place": pa.string()}
    assert sorted(dict(f.partition)["place"] or "" for f in manifest.files) == ["", "a b/c", "ü=x"]
    rows_of = {"row": 100, "hour": 24, "place": 1 << 20}
    with BatchStream(
        manifest, HIVE, rows_of, batch_rows=64, rank=0, world_size=1, cursor=Cursor.start(0), seed=0, options=LOCAL
    ) as batches:
        [(batch, _)] = list(batches)
    hours = dict(zip(batch.sparse["row"].values().tolist(), batch.sparse["hour"].values().tolist(), strict=True))
    assert hours == {row: row // 10 for row in range(30)}
    assert sorted(batch.sparse["place"].lengths().tolist()) == [0] * 10 + [1] * 20
    assert len(set(batch.sparse["place"].values().tolist())) == 2
    count_column(str(tmp_path), "place", tmp_path / "words.parquet")
    assert pq.read_table(tmp_path / "words.parquet", partitioning=None).to_pydict() == {
        "id": ["a b/c", "ü=x"],
        "count": [10, 10],
    }
    alone = Manifest.read(f"file://{tmp_path}/place=a%2520b%252Fc", HIVE)
    assert dict(alone.files[0].partition) == {"place": "a b/c", "hour": 0}


def test_ids_of_other_types_to_train_and_evaluate_on_are_refused(tmp_path: Path) -> None:
    for part, hour in (("train", "03"), ("eval", "night")):
        below = tmp_path / part / f"hour={hour}"
        below.mkdir(parents=True)
        pq.write_table(table(10), below / "x.parquet")
    schema = Schema.model_validate({"sparse": [{"name": "hour", "mapping": {"kind": "hash"}}]})
    train = Manifest.read(str(tmp_path / "train"), schema)
    schema = kept(schema, dict(train.columns))
    assert Manifest.read(str(tmp_path / "train"), schema).columns == train.columns
    with pytest.raises(DataError, match=r"trained on integer ids .*; the column's type is string") as caught:
        Manifest.read(str(tmp_path / "eval"), schema)
    assert caught.value.column == "hour" and "eval" in (caught.value.file or "")


def test_check_vocabulary_and_inspect_see_what_training_sees(folder: Path, tmp_path: Path) -> None:
    data = DataSet.model_validate({"path": str(folder), "filters": [["day", "=", "2024-01-01"], ["age", "<", 20]]})
    manifest = Manifest.of(data, SCHEMA)
    wanted = oracle(folder, [("day", "=", "2024-01-01"), ("age", "<", 20)])
    report = check(manifest, SCHEMA, ROWS_OF)
    assert report.rows == len(wanted) and report.bad_rows == 0
    count_column(data.path, "row", tmp_path / "words.parquet", filters=data.filters)
    assert sorted(pq.read_table(tmp_path / "words.parquet")["id"].to_pylist()) == wanted
    with pytest.raises(DataError, match="column 'usr' is missing"):
        count_column(data.path, "row", tmp_path / "words.parquet", filters=[["usr", "=", 1]])
    found = inspect(data.path, filters=data.filters)
    assert found.inspected_rows == len(wanted) and found.rows == 790
    roles = {c.name: c.role for c in found.columns}
    assert roles["day"] == "unused" and {c.name: c.distinct for c in found.columns}["day"] == 1
    with pytest.raises(DataError, match="column 'dya' is missing; the file has row"):
        inspect(data.path, filters=[["dya", "=", 1]])


@settings(max_examples=4)
@given(data=st.data())
def test_rows_are_divided_at_random_but_always_alike(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """For any number of ranks and windows, and where the files are moved; with other filters beside it."""
    share, world_size = data.draw(st.sampled_from([0.1, 0.37, 0.9])), data.draw(st.integers(1, 3))
    others: list[Any] = data.draw(st.sampled_from([[], [("day", ">=", "2024-01-02")], [("age", ">", 50.0)]]))
    moved = tmp_path_factory.mktemp("moved")
    shutil.copytree(folder, moved, dirs_exist_ok=True)
    sides = []
    for operator in ("<", ">="):
        filters = [["row_share", operator, share], *others]
        found = []
        for place in (folder, moved):
            manifest = Manifest.read(
                str(place), SCHEMA, filters=filters, window_rows=data.draw(st.sampled_from([90, 900]))
            )
            ids = []
            for rank in range(world_size):
                with stream(manifest, Cursor.start(1), rank, world_size) as batches:
                    ids += row_ids([batch for batch, _ in batches])
            found.append(sorted(ids))
        assert found[0] == found[1]
        twice = [WeightedDataSet(path=str(moved), filters=filters)] * 2
        assert check(manifest, SCHEMA, ROWS_OF).rows == len(found[0]) == Mix.of(twice, SCHEMA).passing[0]
        assert inspect(str(moved), filters=filters).inspected_rows == len(found[0])
        count_column(str(moved), "row", moved / "words.parquet", filters=filters)
        assert sorted(pq.read_table(moved / "words.parquet")["id"].to_pylist()) == found[0]
        (moved / "words.parquet").unlink()
        sides.append(found[0])
    every = oracle(folder, others)
    assert sorted(sides[0] + sides[1]) == every and abs(len(sides[0]) / len(every) - share) < 0.15


def test_a_column_that_is_named_as_the_share_is_itself(tmp_path: Path) -> None:
    rows = table(100, 0).append_column("row_share", pa.array(np.arange(100) / 10))
    pq.write_table(rows, tmp_path / "x.parquet")
    manifest = Manifest.read(str(tmp_path), SCHEMA, filters=[["row_share", "<", 2.5]])
    with stream(manifest, Cursor.start(0), 0, 1, shuffle=False) as batches:
        assert row_ids([batch for batch, _ in batches]) == list(range(25))
    schema = Schema.model_validate({**SCHEMA.model_dump(), "dense": [{"name": "row_share"}]})
    pq.write_table(table(100, 0), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="column 'row_share' is missing"):  # only filters see it
        Manifest.read(str(tmp_path), schema)


def test_a_file_that_is_gone_is_not_taken_for_filtered(tmp_path: Path) -> None:
    for name in "ab":
        pq.write_table(table(50), tmp_path / f"{name}.parquet")
    manifest = Manifest.read(str(tmp_path), SCHEMA, filters=[("age", ">", 1000.0), ("row", ">", 3)][1:])
    (tmp_path / "b.parquet").unlink()
    with stream(manifest, Cursor.start(0), 0, 1) as batches, pytest.raises(DataError, match="the file is gone"):
        list(batches)
    options = ReadOptions(reader="local", bad_rows=BadRows(policy="skip"))
    with stream(manifest, Cursor.start(0), 0, 1, options=options) as batches:
        assert sorted(row_ids([b for b, _ in batches])) == list(range(4, 50)) and batches.skipped.count == 50


def test_rows_that_are_filtered_out_need_not_be_good(tmp_path: Path) -> None:
    bad = table(100, label=[7 if i % 3 else 1 for i in range(100)])
    pq.write_table(bad, tmp_path / "x.parquet", row_group_size=30)
    manifest = Manifest.read(str(tmp_path), SCHEMA, filters=[("label", "in", [0, 1])])
    with stream(manifest, Cursor.start(0), 0, 1) as batches:
        assert sorted(row_ids([b for b, _ in batches])) == list(range(0, 100, 3)) and not batches.skipped.count
    late = Manifest.read(str(tmp_path), SCHEMA, filters=[("row", ">", 40)])
    with stream(late, Cursor.start(0), 0, 1) as batches, pytest.raises(DataError) as caught:
        list(batches)
    assert (caught.value.row_group, caught.value.value) == (1, "7") and caught.value.row >= 41


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ([["day", "~", 1]], r"'~' in .* is not an operator; allowed: =, "),
        (["day"], "'day' is not a condition; write it as"),
        ([["day", "="]], "is not a condition"),
        ([[["day", "=", "x"]]], "joined by `and`"),
        ([["day", "in", "x"]], "'in' needs a list of values"),
        ([["day", "=", ["x"]]], "'=' needs one value"),
        ([["day", "in", []]], "the list of values is empty"),
        ([["day", "=", None]], "None is not a text, number or boolean"),
        ([["age", ">", float("nan")]], "nan is not a text"),
        ([["dya", "=", "x"]], "column 'dya' is missing; the file has row, .* fix: correct .* in the filter"),
        ([["day", ">", 20240101]], "`day > 20240101` does not fit the column's type string"),
        ([["hour", "=", "03"]], "`hour = '03'` does not fit the column's type int64"),
        ([["user_id", "in", [1.5]]], "does not fit the column's type int64"),
        ([["genres", "=", 1]], "does not fit the column's type list"),
        ([["day", "=", "2025-01-01"]], "no row can pass the filters `day = '2025-01-01'`"),
        ([["row", "<", 0], ["hour", "=", 0]], "no row can pass the filters `row < 0` and `hour = 0`"),
    ],
)
def test_nonsense_is_refused_by_name(folder: Path, filters: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Manifest.read(str(folder), SCHEMA, filters=filters)


def test_a_day_in_yaml_is_a_day(folder: Path) -> None:
    data = DataSet(path=str(folder), filters=[["day", ">=", datetime.date(2024, 1, 3)]])
    assert data.filters == [["day", ">=", "2024-01-03"]] and Manifest.of(data, SCHEMA).rows == 401
    assert DataSet.model_validate(data.model_dump(mode="json")) == data


def test_numbers_that_no_value_of_the_column_can_have(tmp_path: Path) -> None:
    pq.write_table(table(50), tmp_path / "x.parquet")
    for condition, rows in (
        (("user_id", "<", 10.5), None),
        (("user_id", "<", 10**30), 50),
        (("row", ">=", -(10**30)), 50),
    ):
        mask = rows_that_pass(pq.read_table(tmp_path / "x.parquet"), [Condition.parse(condition)])
        users = pq.read_table(tmp_path / "x.parquet")["user_id"].to_pylist()
        assert mask.sum() == (sum(u < 10.5 for u in users) if rows is None else rows)


def test_decimals_are_compared_with_more_digits_than_they_have() -> None:
    kind = pa.decimal128(4, 2)
    column = pa.array([Decimal("1.00"), Decimal("1.01"), None], kind)
    for op, wanted in (("<", [True, False, False]), (">", [False, True, False]), ("=", [False] * 3)):
        condition = Condition.parse(["x", op, 1.005])
        condition.check(kind, "x.parquet")
        assert condition.holds(column).tolist() == wanted
    assert Condition.parse(["x", "in", [1.01, 7]]).holds(column).tolist() == [False, True, False]
    assert Condition.parse(["x", "not in", [1.01]]).holds(column).tolist() == [True, False, False]
    with pytest.raises(DataError, match="does not fit the column's type decimal"):
        Condition.parse(["x", "in", [1.005]]).check(kind, "x.parquet")


@pytest.mark.parametrize(
    ("kind", "lowest", "highest"),
    [(pa.int8(), -128, 127), (pa.uint8(), 0, 255), (pa.int64(), -(2**63), 2**63 - 1), (pa.uint64(), 0, 2**64 - 1)],
)
def test_numbers_at_the_ends_of_a_type_and_beyond_them(kind: pa.DataType, lowest: int, highest: int) -> None:
    column = pa.array([lowest, highest], kind)
    for op, value, wanted in (
        (">", lowest, [False, True]),
        (">=", lowest, [True, True]),
        ("<", highest, [True, False]),
        ("=", highest, [False, True]),
        ("<", highest + 1, [True, True]),
        (">", lowest - 1, [True, True]),
        ("<", float("inf"), [True, True]),
        ("<=", -float("inf"), [False, False]),
        ("=", highest + 1, [False, False]),
        ("!=", lowest - 1, [True, True]),
        ("<", 0.5, [True, False]),
        (">=", 0.5, [False, True]),
    ):
        condition = Condition.parse(["x", op, value])
        condition.check(kind, "x.parquet")
        assert condition.holds(column).tolist() == wanted, condition
        assert condition.may_hold(column, column).tolist() == (wanted if op != "!=" else [True, True]), condition
    for beyond in (lowest - 1, highest + 1):
        with pytest.raises(DataError, match="does not fit"):
            Condition.parse(["x", "in", [beyond]]).check(kind, "x.parquet")


def test_a_time_without_a_zone_is_utc() -> None:
    zoned = pa.timestamp("ms", "UTC")
    column = pa.array([datetime.datetime(2024, 1, day, tzinfo=datetime.UTC) for day in (1, 2)], zoned)
    assert Condition.parse(["t", ">=", "2024-01-02"]).holds(column).tolist() == [False, True]
    assert Condition.parse(["t", "<", "2024-01-02T01:00:00+02:00"]).holds(column).tolist() == [True, False]
    for kind in (zoned, pa.timestamp("s"), pa.date32()):
        with pytest.raises(DataError, match="does not fit the column's type"):
            Condition.parse(["t", "=", "monday"]).check(kind, "x.parquet")


def test_both_zeros_are_equal() -> None:
    column = pa.array([0.0, -0.0, 1.0, None])
    for op, value, wanted in (
        ("in", [0.0], [True, True, False, False]),
        ("in", [1.0], [False, False, True, False]),
        ("not in", [-0.0], [False, False, True, False]),
        ("not in", [1.0], [True, True, False, False]),
    ):
        assert Condition.parse(["x", op, value]).holds(column).tolist() == wanted
