"""What the tools that look at data and prepare it decide by, at the ends where it changes."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.synthetic.clicks import SyntheticSpec, write_files
from rayrec.data import DataError, Layout, Schema, inspect
from rayrec.data.arrays.arrow_types import UNITS, is_list
from rayrec.data.arrays.hashing import hash_strings, seed_of
from rayrec.data.formats.binary_files import _arrow
from rayrec.data.formats.parquet_writer import write_parts
from rayrec.data.formats.text_options import arrow_type
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.targets import LATEST_S, map_targets, unknown_targets
from rayrec.data.stream.downsampling import keep_mask
from rayrec.data.tools import vocabulary
from rayrec.data.tools.init.column_facts import column_facts, time_unit
from rayrec.data.tools.init.outcomes import _auc

BEAUTY = runpy.run_path(str(Path(__file__).parents[2] / "data/beauty/prepare.py"))
CRITEO = runpy.run_path(str(Path(__file__).parents[2] / "data/criteo/prepare.py"))


def test_the_units_of_times() -> None:
    assert UNITS == {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9} and np.datetime64(LATEST_S, "s") == np.datetime64(
        "2200"
    )
    for unit, each in UNITS.items():
        assert time_unit(10**8 * each, LATEST_S * each - 1) == unit
        assert time_unit(10**8 * each, LATEST_S * each) is None
    assert time_unit(10**8 - 1, 10**8) is None


def facts(name: str, values: Any, kind: pa.DataType | None = None) -> tuple[str, str]:
    found = column_facts(name, pa.chunked_array([pa.array(values, kind)]), 1.0)
    return found.role, found.note.partition(":")[0]


def test_times_that_a_schema_can_read() -> None:
    seconds = pa.timestamp("s")
    assert facts("x", [0, LATEST_S - 1], seconds) == ("timestamp", "")
    outside = ("unused", "a time with nulls, or outside 1970 to 2200")
    assert (
        facts("x", [0, LATEST_S], seconds) == facts("x", [-1, 5], seconds) == facts("x", [None, 5], seconds) == outside
    )
    assert (
        facts("x", [0, 90_000], pa.date32())[0] == "unused" and facts("x", [0, 80_000], pa.date32())[0] == "timestamp"
    )
    assert facts("ts", [1_700_000_000 + second for second in range(50)])[0] == "timestamp", "an event a second"
    assert facts("ts", [1_700_000_000] * 3)[0] == "timestamp" and facts("ts", [5, 6, 7])[0] == "id"


def test_rows_are_counted_only_where_nearly_all_go_up_by_one() -> None:
    def with_jumps(rows: int, jumps: int) -> list[int]:
        steps = np.ones(rows, int)
        steps[:jumps] = 5
        return np.cumsum(steps).tolist()

    counts = ("unused", "counts the rows")
    assert facts("n_id", with_jumps(201, 2)) == counts and facts("n_id", with_jumps(201, 3))[0] == "id"
    assert facts("n_id", with_jumps(10, 0)) == counts and facts("n_id", with_jumps(9, 0))[0] == "id"
    assert facts("n_id", with_jumps(100, 1)) == counts, "the first number is no step"
    assert facts("n_id", with_jumps(100, 2))[0] == "id"
    assert facts("Index", [4, 4, 9]) == counts and facts("index", [0.5, 0.1]) == counts


def test_columns_that_are_told_by_name() -> None:
    numbers = [0.5, 1.5, 0.0]
    assert facts("Weight", numbers)[0] == "sample_weight" and facts("weight", [0.5, -0.1, 2])[0] == "dense"
    assert facts("weight", [0.5, None, 2.0])[0] == "dense" and facts("weight", [0.5, np.inf])[0] == "unused"
    assert facts("PScore", numbers)[0] == "unused" and facts("session_id", [3, 3, 9])[0] == "group"
    assert facts("session_id", [3, None, 9])[0] == "id" and facts("y", [0, 1, 1])[0] == "label"
    assert facts("y", [0, 1, None])[0] == "id" and facts("y", [True, None])[0] == "unused"


@pytest.mark.parametrize(("highest", "log"), [(100, False), (101, True)])
def test_a_logarithm_is_taken_of_what_reaches_far_above_the_others(highest: int, log: bool) -> None:
    assert column_facts("x", pa.chunked_array([[0.0] * 20 + [float(highest)]]), 1.0).log is log


def test_how_well_a_column_tells_the_label() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        counts = rng.integers(0, 4, (2, 5)) + np.eye(2, 5, dtype=int)
        won = sum(
            zeros * ones * (1.0 if high > low else 0.5 if high == low else 0.0)
            for low, zeros in enumerate(counts[0])
            for high, ones in enumerate(counts[1])
        )
        auc = won / counts[0].sum() / counts[1].sum()
        assert _auc(counts) == pytest.approx(max(auc, 1 - auc))


def looked_at(folder: Path, **columns: Any) -> dict[str, str]:
    pq.write_table(pa.table(columns), folder / "x.parquet")
    return {one.name: one.role for one in inspect(str(folder)).columns}


def test_columns_made_of_the_label_are_left_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    label = np.arange(400) % 4 == 0
    noise = rng.normal(size=400)
    columns = {
        "label": label.astype(int),
        "copy": np.where(label, -3.0, 2.0) + noise / 100,
        "hint": label + noise,
        "word": np.where(label, "yes", rng.choice(["no", "never"], 400)),
        "city": rng.choice(["a", "b"], 400),
        "null": pa.array(np.where(label, np.nan, noise), from_pandas=True),
    }
    roles = looked_at(tmp_path, **columns)
    assert roles == {
        "label": "label", "copy": "unused", "hint": "dense", "word": "unused", "city": "id", "null": "unused",
    }  # fmt: skip
    few = {name: column[:99] for name, column in columns.items()}
    assert looked_at(tmp_path, **few)["copy"] == "dense", "too few rows to tell"
    assert looked_at(tmp_path, **{name: column[:100] for name, column in columns.items()})["copy"] == "unused"
    rare = np.arange(400) < 8  # 2 %
    assert looked_at(tmp_path, label=rare.astype(int), x=rare + noise / 100)["x"] == "dense"
    assert (
        looked_at(tmp_path, label=(np.arange(400) < 9).astype(int), x=(np.arange(400) < 9) + noise / 100)["x"]
        == "unused"
    )


def test_one_column_keeps_a_role_that_there_is_once(tmp_path: Path) -> None:
    flags = np.arange(40) % 2
    roles = looked_at(tmp_path, first=flags, Click=flags[::-1], weight=flags + 0.5, sample_weight=flags + 0.5)
    assert roles == {"first": "id", "Click": "label", "weight": "sample_weight", "sample_weight": "unused"}
    assert looked_at(tmp_path, a=flags, b=flags[::-1])["b"] == "label", "the last one where none is named"
    found = {one.name: one for one in inspect(str(tmp_path)).columns}["a"]
    assert (found.distinct, found.ids_estimate) == (2, 2)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.integers(1, 30), st.integers(1, 9), max_size=9), st.integers(1, 20))
def test_ranges_of_counts_hold_about_so_many_ids(sizes: dict[int, int], at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "_RANGE_IDS", at_once)
        ranges = list(vocabulary._ranges(Counter(sizes)))
    held = [[count for count in sorted(sizes, reverse=True) if low <= count <= high] for low, high in ranges]
    assert [count for some in held for count in some] == sorted(sizes, reverse=True)
    for number, some in enumerate(held):
        ids = sum(sizes[count] for count in some)
        assert len(some) == 1 or ids <= at_once
        if number + 1 < len(held):
            assert ids + sizes[held[number + 1][0]] > at_once


@pytest.mark.parametrize("limits", [{}, {"_SPILL_IDS": 3}, {"_SPILL_IDS": 3, "_RANGE_IDS": 2, "_PARTS": 3}])
@pytest.mark.parametrize(("min_count", "max_size"), [(1, None), (2, None), (1, 5), (3, 4), (1, 100)])
def test_ids_are_counted_whatever_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], min_count: int, max_size: int | None
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(vocabulary, name, value)
    rng = np.random.default_rng(2)
    ids = [(rng.random(60) ** 2 * 20).astype(int) for _ in range(3)]
    (tmp_path / "in").mkdir()
    for number, some in enumerate(ids):
        pq.write_table(pa.table({"id": some}), tmp_path / "in" / f"{number}.parquet")
    found = vocabulary.count_column(
        str(tmp_path / "in"), "id", tmp_path / "out.parquet", min_count=min_count, max_size=max_size
    )
    counts = Counter(np.concatenate(ids).tolist())
    wanted = sorted(((-times, one) for one, times in counts.items() if times >= min_count))[:max_size]
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == [{"id": one, "count": -n} for n, one in wanted]
    assert (found.kept, found.seen) == (len(wanted), len(counts))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.parquet"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 12), st.integers(1, 12))
def test_files_and_row_groups_have_the_rows_that_are_asked_for(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], file_rows: int, group_rows: int
) -> None:
    folder, total = tmp_path_factory.mktemp("x") / "new", sum(sizes)
    ends = np.cumsum([0, *sizes]).tolist()
    batches = [pa.record_batch({"n": np.arange(a, b)}) for a, b in zip(ends, ends[1:], strict=False)]
    files = write_parts(batches, folder, "x", Layout(rows_per_file=file_rows, row_group_rows=group_rows))
    assert [file.name for file in files] == [f"x-{n:05d}.parquet" for n in range(-(-total // file_rows))]
    groups = [[len(g) for g in cut(len(of), group_rows)] for of in cut(total, file_rows)]
    metadata = [pq.read_metadata(file) for file in files]
    assert [[one.row_group(n).num_rows for n in range(one.num_row_groups)] for one in metadata] == groups
    assert [n for file in files for n in pq.read_table(file)["n"].to_pylist()] == list(range(total))


def cut(rows: int, size: int) -> list[range]:
    return [range(first, min(first + size, rows)) for first in range(0, rows, size)]


@pytest.mark.parametrize(
    ("sizes", "share", "held_rows"),
    [([3, 4, 3], 0.3, 3), ([3, 4, 3], 0.35, 4), ([5, 5], 0.0, 1), ([2, 2], 1.0, 3), ([1, 1], 0.5, 1)],
)
def test_the_last_rows_are_held_out(tmp_path: Path, sizes: list[int], share: float, held_rows: int) -> None:
    ends = np.cumsum([0, *sizes]).tolist()
    files = [tmp_path / f"{n}.parquet" for n in range(len(sizes))]
    for file, first, last in zip(files, ends, ends[1:], strict=False):
        pq.write_table(pa.table({"n": np.arange(first, last)}), file)
    train, held = tmp_path / "new" / "train", tmp_path / "other" / "held"
    total = sum(sizes)
    assert CRITEO["hold_out"](files, share, train, held, Layout()) == (total - held_rows, held_rows)
    rows = [
        [n for file in sorted(side.iterdir()) for n in pq.read_table(file)["n"].to_pylist()] for side in (train, held)
    ]
    assert rows == [list(range(total - held_rows)), list(range(total - held_rows, total))]
    assert not list(tmp_path.glob("*.parquet"))


def test_beauty_replaces_its_own_files_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = tmp_path / "Beauty.txt", tmp_path / "out"
    source.write_text("1 4 2 9\n2 1 2 3 4 5\n")
    monkeypatch.setattr("sys.argv", ["prepare.py", str(source), "--out", str(out)])

    def contents() -> dict[str, bytes]:
        return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}

    BEAUTY["main"]()
    first = contents()
    source.write_text("1 4 2 9\n")
    BEAUTY["main"]()
    assert contents().keys() == first.keys() and contents() != first
    mine = out / "train" / "mine.parquet"
    for path, wanted in ((mine, "train/mine.parquet"), (out / "manifest.json", "manifest.json")):
        path.write_text("{}")
        before = contents()
        with pytest.raises(SystemExit, match=rf"contains files that this script did not write \({wanted}, …\)"):
            BEAUTY["main"]()
        assert contents() == before
        mine.unlink(missing_ok=True)


def test_criteo_removes_no_folder_that_was_there(tmp_path: Path) -> None:
    mine = tmp_path / "out" / "_incoming" / "mine"
    mine.parent.mkdir(parents=True)
    mine.touch()
    assert CRITEO["main"]([str(tmp_path / "nowhere.txt"), "--out", str(tmp_path / "out")]) == 1
    assert mine.exists() and [*(tmp_path / "out").iterdir()] == [mine.parent]


def test_one_row_cannot_be_split(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="cannot split 1 rows"):
        CRITEO["hold_out"]([tmp_path / "x.parquet"], 0.5, tmp_path / "a", tmp_path / "b", Layout())


def test_hexadecimal_digits() -> None:
    texts = [
        "00000000",
        "0009afAF",
        "ffffffff",
        "FFFFFFFF",
        "0000000g",
        "0000000/",
        "0000000:",
        "0000000@",
        "0000000`",
        "000000 0",
    ]
    values, valid = CRITEO["_parse"](np.frombuffer("".join(texts).encode(), np.uint8).reshape(-1, 8))
    assert valid.tolist() == [True] * 4 + [False] * 6
    assert values[:4].tolist() == [int(text, 16) for text in texts[:4]]
    names = CRITEO["COLUMNS"]
    assert names[:2] == ("label", "I1") and names[13:15] == ("I13", "C1") and len(names) == 40


def test_avro_types_as_arrow_has_them() -> None:
    def arrow(kind: Any) -> pa.DataType:
        return _arrow(kind, {}, "x.avro", "c")

    assert [arrow(kind) for kind in ("int", "long", "float", "bytes")] == [
        pa.int32(),
        pa.int64(),
        pa.float32(),
        pa.binary(),
    ]
    assert arrow(["null", "string"]) == arrow({"type": "string"}) == pa.string()
    assert (
        arrow(["int", "long"]) == pa.int64() and arrow(["int", "double"]) == arrow(["float", "double"]) == pa.float64()
    )
    assert arrow({"type": "long", "logicalType": "timestamp-micros"}) == pa.timestamp("us", "UTC")
    assert arrow({"type": "bytes", "logicalType": "decimal", "precision": 5}) == pa.decimal128(5, 0)
    assert arrow({"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2}) == pa.decimal128(5, 2)
    assert arrow({"type": "array", "items": ["null", "int"]}) == pa.list_(pa.int32())
    record = {"type": "record", "name": "r", "fields": [{"name": "id", "type": "long"}, {"name": "w", "type": "float"}]}
    assert arrow(record) == pa.struct({"id": pa.int64(), "w": pa.float32()})
    color, code = {"type": "enum", "name": "color", "symbols": ["a"]}, {"type": "fixed", "name": "code", "size": 3}
    assert (arrow(color), arrow(code)) == (pa.string(), pa.binary(3))
    twice = {
        "type": "record",
        "name": "t",
        "fields": [{"name": "one", "type": code}, {"name": "other", "type": "code"}],
    }
    assert arrow(twice) == pa.struct({"one": pa.binary(3), "other": pa.binary(3)})
    for kind in (["string", "int"], {"type": "map", "values": "int"}, "unknown", ["null"]):
        with pytest.raises(DataError, match="unsupported Avro type"):
            arrow(kind)


def test_types_as_users_write_them() -> None:
    assert (arrow_type("c", "list<int64>"), arrow_type("c", "double")) == (pa.list_(pa.int64()), pa.float64())
    for wrong in ("list<int64", "int64>", "list<>"):
        with pytest.raises(DataError, match="unknown type"):
            arrow_type("c", wrong)
    kinds = [
        pa.list_(pa.int8()),
        pa.large_list(pa.int8()),
        pa.list_(pa.int8(), 2),
        pa.list_view(pa.int8()),
        pa.large_list_view(pa.int8()),
    ]
    assert [is_list(kind) for kind in kinds] == [True] * 5
    assert not any(map(is_list, (pa.int8(), pa.string(), pa.struct({"a": pa.int8()}))))


class Nowhere:
    def locate(self, row: int) -> tuple[str, int, int]:
        return "x.parquet", 0, row


def targets(schema: dict[str, Any], **columns: pa.Array) -> tuple[Any, dict[int, str]]:
    """The targets, and the bad rows with what is wrong."""
    problems = Problems(Nowhere())
    whole = Schema.model_validate({"dense": [{"name": "x"}], **schema})
    found = map_targets(columns, whole, problems)
    return found, {int(row): str(problems.error(int(row)).value) for row in problems.rows()}


def test_labels_of_every_type() -> None:
    one = {"label": {"column": "y"}}
    for values in (
        pa.array([0, 1, 1]),
        pa.array([False, True, True]),
        pa.array([0.0, 1.0, 1.0]),
        pa.array([0, 1, 1]).dictionary_encode(),
    ):
        found, bad = targets(one, y=values)
        assert (found.label.tolist(), found.label.dtype, bad) == ([0, 1, 1], np.float32, {})
    assert targets(one, y=pa.array([0.5, 2.0, -1.0, 1.0]))[1] == {0: "0.5", 1: "2.0", 2: "-1.0"}
    found, bad = targets(one, y=pa.array([None, 1]))
    assert bad == {0: "None"} and found.label.tolist() == [0, 1]
    number = {"label": {"column": "y", "kind": "number"}}
    found, bad = targets(number, y=pa.array([-3.5, float("inf"), float("nan"), 1e39, 7.0]))
    assert list(bad) == [1, 2, 3] and found.label.tolist() == [-3.5, 0, 0, 0, 7.0]
    several = {"labels": [{"name": "a", "on_null": "ignore"}, {"name": "b", "kind": "number"}]}
    found, bad = targets(several, a=pa.array([None, True]), b=pa.array([4, None]))
    assert np.array_equal(found.label, [[np.nan, 4], [1, 0]], equal_nan=True) and list(bad) == [1]
    assert unknown_targets(Schema.model_validate({**several, "dense": [{"name": "x"}]}), 3).label.shape == (3, 2)


def test_weights_groups_and_times() -> None:
    label = {"y": pa.array([0, 1, 1, 0])}
    found, bad = targets(
        {"label": {"column": "y"}, "sample_weight": {}}, **label, weight=pa.array([0.0, 0.5, -0.1, None])
    )
    assert (found.weight.tolist(), list(bad)) == ([0, 0.5, 0, 0], [2, 3]) and found.group is found.time is None
    group = {"label": {"column": "y"}, "group": {}}
    assert targets(group, **label, group=pa.array([5, -1, 5, 1 << 62]))[0].group.tolist() == [5, -1, 5, 1 << 62]
    assert targets(group, **label, group=pa.array([5, 7, 5, 7]).dictionary_encode())[0].group.tolist() == [5, 7, 5, 7]
    texts = pa.array(["a", "b", "a", None])
    for given_texts in (texts, texts.dictionary_encode(), texts.cast(pa.large_string())):
        found, bad = targets(group, **label, group=given_texts)
        assert found.group[0] == found.group[2] != found.group[1] and list(bad) == [3]
    assert found.group[:2].tolist() == hash_strings([b"a", b"b"], seed_of(3)).view(np.int64).tolist()
    time_ = {"label": {"column": "y"}, "timestamp": {"unit": "ms"}}
    for given_times, wanted in (
        (pa.array([0, 999, 1000, LATEST_S * 1000 - 1]), [0, 0, 1, LATEST_S - 1]),
        (pa.array([0, 1, 1, 2], pa.date32()), [0, 86_400, 86_400, 172_800]),
        (pa.array([0, 1, 1, 2], pa.date64()), [0, 0, 0, 0]),
        (pa.array([0, 10**9, 1, 2 * 10**9], pa.timestamp("ns")), [0, 1, 0, 2]),
        (pa.array([0, 1000, 0, 2000]).dictionary_encode(), [0, 1, 0, 2]),
    ):
        found, bad = targets(time_, **label, timestamp=given_times)
        assert found.time.tolist() == wanted and not bad
    found, bad = targets(time_, **label, timestamp=pa.array([-1, LATEST_S * 1000, None, 5]))
    assert list(bad) == [0, 1, 2] and found.time.tolist() == [0, 0, 0, 0]


def test_negatives_are_drawn_by_their_place_alone() -> None:
    labels = pa.chunked_array([pa.array([0, 1, 0, None, 0, 2] * 500)])
    how = {"seed": 1, "epoch": 2, "window": 3}
    whole = keep_mask(labels, 0.25, first=0, **how)
    kept = whole.reshape(-1, 6)
    assert kept[:, [1, 3, 5]].all() and 0.2 < kept[:, [0, 2, 4]].mean() < 0.3
    assert keep_mask(labels.slice(700), 0.25, first=700, **how).tolist() == whole[700:].tolist()
    assert not keep_mask(labels, 0.0, first=0, **how)[::6].any()
    for change in ({"seed": 2}, {"epoch": 3}, {"window": 4}):
        assert keep_mask(labels, 0.25, first=0, **{**how, **change}).tolist() != whole.tolist()
    assert (
        keep_mask(pa.chunked_array([labels.chunk(0).dictionary_encode()]), 0.25, first=0, **how).tolist()
        == whole.tolist()
    )


def test_generated_files_share_the_rows(tmp_path: Path) -> None:
    spec = SyntheticSpec(rows=10, files=3, single=1, multi=1, dense=1, smallest=3, largest=5, max_list=2)
    assert [pq.read_metadata(path).num_rows for path in write_files(spec, tmp_path / "new")] == [3, 3, 4]
    few = SyntheticSpec(rows=1, files=2, single=0, multi=0, dense=0)
    assert [pq.read_metadata(path).num_rows for path in write_files(few, tmp_path / "few")] == [0, 1]
    assert spec.schema_dict()["sparse"] == [
        {"name": "id_0", "kind": "id", "mapping": {"kind": "identity"}},
        {"name": "ids_0", "kind": "id_list", "mapping": {"kind": "identity"}},
    ]
    assert spec.schema_dict("hash")["dense"] == [{"name": "dense_0", "transforms": [{"kind": "log1p"}]}]
