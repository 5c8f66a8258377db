"""What the tools that look at data and prepare it decide by, at the ends where it changes."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.synthetic.clicks import SyntheticSpec, write_files
from rayrec.data import DataError, Layout, Schema, inspect
from tests.data.mapped import mapped
from tests.data.reference import seed_of, text_hash

BEAUTY = runpy.run_path(str(Path(__file__).parents[2] / "data/beauty/prepare.py"))
LATEST_S = 7_258_118_400  # 2200-01-01
CRITEO = runpy.run_path(str(Path(__file__).parents[2] / "data/criteo/prepare.py"))


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


def as_int64(number: int) -> int:
    return int(np.uint64(number).astype(np.int64))


def targets(schema: dict[str, Any], **columns: pa.Array) -> tuple[Any, dict[int, str]]:
    """The targets, and the bad rows with what is wrong."""
    whole = Schema.model_validate({"dense": [{"name": "x"}], **schema})
    count = len(next(iter(columns.values())))
    rows, errors = mapped(pa.table({"x": [0.0] * count, **columns}), whole, {}, labelled=True)
    return rows.targets, {row: str(error.value) for row, error in errors.items()}


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
    assert found.group[:2].tolist() == [as_int64(text_hash(text, seed_of(3))) for text in (b"a", b"b")]
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
