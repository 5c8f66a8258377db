"""Vocabularies: counted from data, read from files, looked up with rows for the ids they lack."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Callable
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
from rayrec.data import DataError, Mapping, Schema, count_column, load_vocabulary, to_batch
from rayrec.data.mapping import id_index
from rayrec.data.mapping import vocabulary as vocabularies
from rayrec.data.mapping.fingerprint import as_before, mapping_fingerprint
from rayrec.data.tools import vocabulary
from rayrec.train import Trainer, TrainError, load_config, parse_config
from tests.data.reference import hashed_row, seed_of, text_hash
from tests.data.sets import write
from tests.train import small


def feature(path: Path | str, kind: str = "id", **more) -> Schema:
    mapping = {"kind": "vocabulary", "path": str(path), "oov_rows": more.pop("oov_rows", 2)}
    return Schema.model_validate({"sparse": [{"name": "x", "kind": kind, "mapping": mapping} | more]})


def ids_of(values: pa.Array, schema: Schema, rows: int = 100) -> list[int]:
    label = pa.array([0] * len(values))
    return to_batch(pa.table({"label": label, "x": values}), schema, {"x": rows}).sparse.values().tolist()


def counted_in(*arguments: Any, **options: Any) -> tuple[int, int]:
    """How many ids were written, and how many there are."""
    done = count_column(*arguments, **options)
    return done.kept, done.seen


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("suffix", [".txt", ".parquet"])
def test_known_ids_have_rows_of_their_own(tmp_path: Path, text: bool, suffix: str) -> None:
    ids = ["30", "-4", "12"] if not text else ["b", "ü", "a b"]
    path = tmp_path / f"v{suffix}"
    known = pa.array(ids) if text else pa.array([int(i) for i in ids], pa.int32())
    if suffix == ".txt":
        path.write_text("\n".join(ids) + "\n")
    else:
        pq.write_table(pa.table({"id": known}), path)
    schema = feature(path)
    assert ids_of(known, schema) == [2, 3, 4]
    assert ids_of(known.dictionary_encode(), schema) == [2, 3, 4]
    unknown = pa.array([f"u{i}" for i in range(50)]) if text else pa.array(range(100, 150))
    assert set(ids_of(unknown, schema)) == {0, 1}
    lists = pa.array([known.to_pylist(), [], known.to_pylist()[:1]])
    assert ids_of(lists, feature(path, "id_list")) == [2, 3, 4, 2]


def test_without_rows_for_others_an_unknown_id_is_reported(tmp_path: Path) -> None:
    for ids, unknown in [(["1", "2"], 7), (["a", "b"], "c")]:
        path = tmp_path / f"{ids[0]}.txt"
        path.write_text("\n".join(ids))
        known: list = [int(i) for i in ids] if isinstance(unknown, int) else ids
        schema = feature(path, oov_rows=0)
        assert ids_of(pa.array(known), schema) == [0, 1]
        with pytest.raises(DataError, match="not in its vocabulary") as caught:
            ids_of(pa.array([*known, unknown]), schema)
        assert caught.value.row == 2 and caught.value.value == str(unknown)
        assert ids_of(pa.array([known[0], None]), feature(path, oov_rows=0, on_null="empty")) == [0]


def test_a_relative_path_starts_from_the_config_wherever_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = small.raw_config(tmp_path / "runs")
    raw["schema"]["sparse"][0]["mapping"] = {"kind": "vocabulary", "path": "words/ids.txt"}
    (tmp_path / "project" / "words").mkdir(parents=True)
    (tmp_path / "project" / "words" / "ids.txt").write_text("1\n2\n")
    (tmp_path / "project" / "train.yaml").write_text(yaml.safe_dump(raw))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    wanted = str(tmp_path / "project" / "words" / "ids.txt")
    config = load_config(tmp_path / "project" / "train.yaml")
    assert config.data_schema.sparse[0].mapping.path == wanted
    mapping = Mapping.from_config(raw, folder=tmp_path / "project")
    assert mapping == Mapping.from_config(config)


def test_wrong_vocabularies(tmp_path: Path) -> None:
    path = tmp_path / "v.txt"
    with pytest.raises(DataError, match="cannot read"):
        ids_of(pa.array([1]), feature(path))
    path.write_text("1\n2\n1\n")
    with pytest.raises(DataError, match="twice"):
        ids_of(pa.array([1]), feature(path))
    good = tmp_path / "good.txt"
    good.write_text("1\n2\n")
    with pytest.raises(DataError, match="has a vocabulary of integers; it must be an integer"):
        ids_of(pa.array(["a"]), feature(good))
    with pytest.raises(DataError, match="has 3 rows, its vocabulary needs 4"):
        Mapping(feature(good), {"x": 3})
    pq.write_table(pa.table({"name": [1]}), tmp_path / "v.parquet")
    with pytest.raises(DataError, match="needs a column `id`"):
        ids_of(pa.array([1]), feature(tmp_path / "v.parquet"))


@pytest.mark.parametrize(
    ("raw", "ids"),
    [
        ("\ufeffberlin\nrome\n", ["berlin", "rome"]),
        ("\ufeff7\r\n-3", [7, -3]),
        ("a\x85b\nc\u2028d\ne\x0cf\rg\n", ["a\x85b", "c\u2028d", "e\x0cf\rg"]),
        ("1_000\n2\n", ["1_000", "2"]),
        ("01234\n2\n", ["01234", "2"]),
        ("+1\n 2\n٣\n-0\n", ["+1", " 2", "٣", "-0"]),
        (f"{1 << 63}\n2\n", [str(1 << 63), "2"]),
        (f"{(1 << 63) - 1}\n{-(1 << 63)}\n", [(1 << 63) - 1, -(1 << 63)]),
        ("a\n\n", ["a", ""]),
    ],
)
def test_a_line_of_a_text_file_is_one_id_as_it_is_written(tmp_path: Path, raw: str, ids: list[int] | list[str]) -> None:
    path = tmp_path / "v.txt"
    path.write_bytes(raw.encode())
    assert [one for chunk in vocabularies.ids_in(str(path)) for one in chunk.tolist()] == ids
    assert load_vocabulary(str(path)).find(pa.array(ids) if isinstance(ids[0], str) else np.array(ids)).tolist() == [
        *range(len(ids))
    ]


def test_an_id_that_is_no_integer_is_named_where_ids_are_integers(tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("12\n01234\n")
    with pytest.raises(DataError, match=r"vocabulary of strings.*'01234' in the vocabulary is not an integer"):
        ids_of(pa.array([12]), feature(tmp_path / "v.txt"))


@pytest.mark.parametrize("suffix", [".txt", ".parquet"])
@pytest.mark.parametrize("text", [False, True])
def test_an_index_beside_a_vocabulary_that_changed_is_refused(tmp_path: Path, suffix: str, text: bool) -> None:
    path = tmp_path / f"v{suffix}"

    def save(*ids: int) -> None:
        named = [f"u{one}" if text else one for one in ids]
        if suffix == ".txt":
            path.write_text("\n".join(map(str, named)))
        else:
            pq.write_table(pa.table({"id": named}), path, row_group_size=2)
        vocabularies.close_vocabularies()

    save(3, 1, 2)
    index = vocabularies.index_beside(str(path))
    load_vocabulary(str(path)).write(index)
    save(3, 1, 2)
    assert load_vocabulary(str(path)).size == 3
    for ids in ([3, 1, 2, 4], [1, 3, 2], [3, 1, 4]):
        save(*ids)
        with pytest.raises(DataError, match=rf"index does not contain the ids of {path}.*remove the index"):
            load_vocabulary(str(path))
    save(*range(6))
    index.unlink()
    load_vocabulary(str(path)).write(index)
    save(0, 1, 3, 2, 4, 5)  # neither in the first nor in the last row group
    with pytest.raises(DataError, match="index does not contain the ids"):
        load_vocabulary(str(path))
    index.unlink()
    load_vocabulary(str(path)).write(index)
    os.utime(index, ns=(0, 0))  # a copy may be older than its vocabulary
    vocabularies.close_vocabularies()
    assert load_vocabulary(str(path)).find(pa.array(["u3"]) if text else np.array([3])).tolist() == [2]
    vocabularies.close_vocabularies()
    for size in (20, 40):
        os.truncate(index, size)
        with pytest.raises(DataError, match="the index is damaged"):
            load_vocabulary(str(path))


def test_counting_a_vocabulary_anew_removes_its_index(tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    pq.write_table(pa.table({"x": [1, 1, 2]}), tmp_path / "x.parquet")
    count_column(str(tmp_path / "x.parquet"), "x", path)
    load_vocabulary(str(path)).write(vocabularies.index_beside(str(path)))
    pq.write_table(pa.table({"x": [5, 6]}), tmp_path / "x.parquet")
    count_column(str(tmp_path / "x.parquet"), "x", path, extend=str(path))
    assert load_vocabulary(str(path)).find(np.array([1, 2, 5, 6])).tolist() == [0, 1, 2, 3]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["v.parquet", "x.parquet"]


def test_the_index_of_a_removed_export_takes_no_disk_once_another_is_opened(tmp_path: Path) -> None:
    def mapped() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]

    vocabularies.close_vocabularies()
    for name in "ab":
        path = tmp_path / name / "0.txt"
        path.parent.mkdir()
        path.write_text("3\n1\n")
        id_index.IdIndex.of(id_index.hashes_of(np.array([3, 1])), False).write(vocabularies.index_beside(str(path)))
    first = load_vocabulary(str(tmp_path / "a" / "0.txt"))
    assert first.find(np.array([1])).tolist() == [1] and mapped()
    del first
    shutil.rmtree(tmp_path / "a")
    load_vocabulary(str(tmp_path / "b" / "0.txt"))
    assert mapped() and not any("(deleted)" in line for line in mapped())


def test_built_from_data_and_used(tmp_path: Path) -> None:
    write(tmp_path / "data", [300, 200])
    everything = pq.ParquetDataset(str(tmp_path / "data")).read()
    for column in ("user_id", "genres", "city"):
        values = [v for row in everything[column].to_pylist() for v in (row if isinstance(row, list) else [row])]
        expected = sorted({v: values.count(v) for v in values}.items(), key=lambda p: (-p[1], p[0]))
        path = tmp_path / f"{column}.parquet"
        assert count_column(str(tmp_path / "data"), column, path).kept == len(expected)
        built = pq.read_table(path)
        assert list(zip(built["id"].to_pylist(), built["count"].to_pylist(), strict=True)) == expected
        assert ids_of(pa.array([expected[0][0]]), feature(path, oov_rows=1)) == [1]


@pytest.mark.parametrize("text", [False, True])
def test_a_column_is_counted_exactly_in_bounded_memory(
    tmp_path: Path, text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With spills and ranges so small that every file writes several, and ids of one count lie in several parts."""
    monkeypatch.setattr(vocabulary, "_SPILL_IDS", 50)
    monkeypatch.setattr(vocabulary, "_RANGE_IDS", 20)
    rng = np.random.default_rng(0)
    wanted: Counter = Counter()
    (tmp_path / "data").mkdir()
    for number in range(3):
        raw = rng.zipf(1.3, 700) % 300 - 20
        ids = [f"id {i}" for i in raw] if text else raw.tolist()
        wanted.update(ids)
        lists = [ids[i : i + 2] if i % 5 else None for i in range(0, 700, 2)]
        wanted.subtract([one for i in range(0, 700, 2) if not i % 5 for one in ids[i : i + 2]])
        pq.write_table(pa.table({"x": lists}), tmp_path / "data" / f"{number}.parquet", row_group_size=100)
    wanted = +wanted
    in_order = sorted(wanted.items(), key=lambda pair: (-pair[1], pair[0]))
    out = tmp_path / "words" / "of" / "x.parquet"
    for limits in ({}, {"min_count": 3}, {"max_size": 37}, {"min_count": 2, "max_size": 10_000}):
        found = count_column(str(tmp_path / "data"), "x", out, **limits)
        kept = [pair for pair in in_order if pair[1] >= limits.get("min_count", 1)][: limits.get("max_size")]
        table = pq.read_table(out)
        assert list(zip(table["id"].to_pylist(), table["count"].to_pylist(), strict=True)) == kept
        assert (found.kept, found.seen) == (len(kept), len(wanted))
    assert [path.name for path in out.parent.iterdir()] == ["x.parquet"]
    assert ids_of(table["id"].combine_chunks()[:3], feature(out), 10_000) == [2, 3, 4]


def test_what_cannot_be_counted_is_named(tmp_path: Path) -> None:
    for name, values in (("a", [1, 2]), ("b", ["x", "y"]), ("c", [0.5, 1.5])):
        pq.write_table(pa.table({"x": values}), tmp_path / f"{name}.parquet")
    out = tmp_path / "out" / "x.parquet"
    for paths, column, message in (
        ("a.parquet", "y", "'y' is missing"),
        ("[ab].parquet", "x", "strings in some files and integers in others"),
        ("c.parquet", "x", "integers or strings, not double"),
    ):
        with pytest.raises(DataError, match=message):
            count_column(str(tmp_path / paths), column, out)
        assert not list(out.parent.iterdir())
    with pytest.raises(DataError, match="cannot write the vocabulary"):
        count_column(str(tmp_path / "a.parquet"), "x", tmp_path / "a.parquet" / "x.parquet")
    with pytest.raises(DataError, match="would be empty: no id occurs 2 times"):
        count_column(str(tmp_path / "a.parquet"), "x", out, min_count=2)
    assert not list(out.parent.iterdir())


ITEMS = st.one_of(st.none(), st.integers(-5, 9))
HISTORIES = st.one_of(st.none(), st.lists(ITEMS, max_size=5))


@settings(max_examples=15)
@given(rows=st.lists(st.tuples(ITEMS, HISTORIES), min_size=1, max_size=30), text=st.booleans(), files=st.integers(1, 3))
def test_counts_of_several_columns_add_up(
    rows: list[tuple[int | None, list[int | None] | None]], text: bool, files: int, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("joint")

    def raw(id: int | None) -> Any:
        return id if id is None or not text else f"id {id}"

    items = [raw(item) for item, _ in rows]
    histories = [ids and [raw(id) for id in ids] for _, ids in rows]
    kind = pa.string() if text else pa.int32()
    for number in range(files):
        columns = {
            "item": pa.array(items[number::files], kind).dictionary_encode(),
            "history": pa.array(histories[number::files], pa.list_(pa.string() if text else pa.int64())),
        }
        pq.write_table(pa.table(columns), folder / f"{number}.parquet")
    expected = Counter(items) + Counter(id for ids in histories for id in ids or ())
    del expected[None]
    out = folder / "out" / "ids.parquet"
    columns = ["item", "history", "item"]
    if not expected:
        with pytest.raises(DataError, match="the columns contain no ids"):
            count_column(str(folder), columns, out)
        return
    in_order = sorted(expected.items(), key=lambda pair: (-pair[1], pair[0]))
    assert counted_in(str(folder), columns, out) == (len(expected), len(expected))
    counted = pq.read_table(out)
    assert list(zip(counted["id"].to_pylist(), counted["count"].to_pylist(), strict=True)) == in_order


def test_an_old_vocabulary_is_extended_by_several_columns(tmp_path: Path) -> None:
    old = tmp_path / "v.parquet"
    data = tmp_path / "x.parquet"
    pq.write_table(pa.table({"item": [7, 7, 2]}), data)
    count_column(str(data), "item", old)
    pq.write_table(pa.table({"item": [2, 5, 9], "history": [[7, 9], [], [5, 9]]}), data)
    assert counted_in(str(data), ["item", "history"], old, extend=str(old), min_count=2) == (2, 2)
    counted = pq.read_table(old)
    assert counted.to_pydict() == {"id": [7, 2, 9, 5], "count": [0, 0, 3, 2]}


def test_columns_that_have_no_common_vocabulary_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"item": [1, 2], "history": [["1"], ["2"]], "score": [0.5, 1.0]}), "x.parquet")
    for columns, message in (
        (("item", "history"), "'item' is int64 and 'history' is list<element: string>"),
        (("history", "item"), "'history' is list<element: string> and 'item' is int64"),
        (("item", "score"), "integers or strings, not double"),
        (("item", "seen"), "'seen' is missing"),
    ):
        options = [word for column in columns for word in ("--column", column)]
        assert run(["data", "vocabulary", "x.parquet", "--out", "v.parquet", *options]) == 1
        error = " ".join(capsys.readouterr().err.split())
        assert message in error
    with pytest.raises(ValueError, match="name at least one"):
        count_column("x.parquet", [], tmp_path / "v.parquet")
    assert not Path("v.parquet").exists()
    pq.write_table(pa.table({"item": [1, 2], "history": [[2], [3, 2]]}), "y.parquet")
    assert (
        run(["data", "vocabulary", "y.parquet", "--out", "v.parquet", "--column", "item", "--column", "history"]) == 0
    )
    assert "3 of 3 ids in" in capsys.readouterr().out
    assert pq.read_table("v.parquet").to_pydict() == {"id": [2, 1, 3], "count": [3, 1, 1]}


@pytest.mark.parametrize("ids", [range(1000), [f"u{n}" for n in range(1000)]], ids=["numbers", "texts"])
def test_unknown_ids_are_hashed_by_the_law_of_ids_without_a_vocabulary(tmp_path: Path, ids: Any) -> None:
    path = tmp_path / "v.txt"
    path.write_text("-1\n-2\n" if isinstance(ids, range) else "a\nb\n")
    numbers = ids if isinstance(ids, range) else [text_hash(one.encode(), 0) for one in ids]
    found = ids_of(pa.array(ids), feature(path, oov_rows=300), 302)
    assert found == [hashed_row(number, seed_of(0), 300) for number in numbers]


def test_ids_of_64_bits_without_a_sign(tmp_path: Path) -> None:
    ids = pa.array([(1 << 64) - 1, 1 << 63, 5], pa.uint64())
    pq.write_table(pa.table({"id": ids}), tmp_path / "v.parquet")
    assert ids_of(ids, feature(tmp_path / "v.parquet")) == [2, 3, 4]
    pq.write_table(pa.table({"x": ids.take(pa.array([0, 0, 0, 1, 1, 2]))}), tmp_path / "x.parquet")
    assert count_column(str(tmp_path / "x.parquet"), "x", tmp_path / "out.parquet").kept == 3
    assert ids_of(ids, feature(tmp_path / "out.parquet")) == [2, 3, 4]


def test_a_shared_index_is_opened_before_another_process_may_remove_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index_above: Callable[[int], None]
) -> None:
    """Who has a newer version of the file removes the older index, as soon as it holds the lock."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    index_above(1)
    (tmp_path / "v.txt").write_text("3\n1\n2\n")
    opened = id_index.IdIndex.open

    def opening(path: Path, held: object = None) -> id_index.IdIndex:
        folder = os.open(path.parent, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(folder)
        return opened(path, held)

    monkeypatch.setattr(id_index.IdIndex, "open", opening)
    assert ids_of(pa.array([2, 3]), feature(tmp_path / "v.txt")) == [4, 2]


def test_an_extended_vocabulary_keeps_the_rows_of_its_ids_and_appends_the_new_ones(tmp_path: Path) -> None:
    old = tmp_path / "v.parquet"
    pq.write_table(pa.table({"x": [7, 7, 7, 2, 2, 5]}), tmp_path / "x.parquet")
    assert counted_in(str(tmp_path / "x.parquet"), "x", old) == (3, 3)
    before = mapping_fingerprint(feature(old), {"x": 10})
    pq.write_table(pa.table({"x": [9, 8, 8, 2, 1, 1, 1]}), tmp_path / "y.parquet")
    how = {"extend": str(old), "min_count": 2}
    assert counted_in(str(tmp_path / "y.parquet"), "x", old, **how) == (2, 3), "9 comes once, 2 is there"
    assert pq.read_table(old)["id"].to_pylist() == [7, 2, 5, 1, 8]
    assert ids_of(pa.array([7, 2, 5, 1, 8]), feature(old)) == [2, 3, 4, 5, 6]
    now = mapping_fingerprint(feature(old), {"x": 10})
    assert now != before == as_before(now, before, feature(old)) and as_before(now, None, feature(old)) == now
    assert counted_in(str(tmp_path / "x.parquet"), "x", old, extend=str(old)) == (0, 0), "nothing is new"
    pq.write_table(pa.table({"x": ["a"]}), tmp_path / "z.parquet")
    with pytest.raises(DataError, match="the vocabulary to extend contains integers, the data strings"):
        count_column(str(tmp_path / "z.parquet"), "x", old, extend=str(old))
    pq.write_table(pa.table({"id": [2, 7, 5, 1, 8]}), old)
    vocabularies.close_vocabularies()
    other = mapping_fingerprint(feature(old), {"x": 10})
    assert as_before(other, before, feature(old)) == other, "the first ids are not those"


def test_a_resumed_run_takes_a_vocabulary_that_grew_at_its_end(tmp_path: Path) -> None:
    small.write_all(tmp_path)
    path = tmp_path / "items.parquet"
    some = [["item", "<", 40]]
    count_column(str(tmp_path / "train"), "item", path, filters=some)
    raw = small.raw_config(tmp_path, trainer__epochs=1, trainer__num_workers=0)
    (item,) = (one for one in raw["schema"]["sparse"] if one["name"] == "item")
    item["mapping"] = {"kind": "vocabulary", "path": str(path)}
    first = Trainer(parse_config(raw)).fit()
    count_column(str(tmp_path / "train"), "item", path, extend=str(path))
    raw["trainer"]["epochs"] = 2
    second = Trainer(parse_config(raw)).fit()
    assert second.train["samples"] == 2 * first.train["samples"]
    ids = pq.read_table(path)["id"].to_pylist()
    pq.write_table(pa.table({"id": ids[::-1]}), path)
    vocabularies.close_vocabularies()
    raw["trainer"]["epochs"] = 3
    with pytest.raises(TrainError, match="feature 'item': its ids would mean other rows: vocabulary checksum"):
        Trainer(parse_config(raw)).fit()
