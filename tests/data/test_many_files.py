"""Many files: the manifest is small, a worker gets its part of it, an index saves the footers, a rewrite is noticed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.bench import many_files
from rayrec.cli import run
from rayrec.data import (
    BadRows,
    BatchStream,
    Cursor,
    DataError,
    DataSet,
    FileChanged,
    FooterIndex,
    FooterReading,
    Manifest,
    Mix,
    ReadOptions,
    WeightedDataSet,
    write_index,
)
from rayrec.data.order.epoch_planner import EpochPlanner, Ordering
from rayrec.data.stream.shared_manifest import shared
from tests.data.sets import ROWS_OF, SCHEMA, table, write
from tests.data.test_stream import LOCAL, row_ids, same

FILES, GROUPS = 300, 10


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So many files of so many row groups, indexed."""
    folder = tmp_path_factory.mktemp("many") / "set"
    many_files.make(folder, FILES, GROUPS)
    done = write_index([str(folder)])
    assert (done.files, done.row_groups) == (FILES, FILES * GROUPS)
    return folder


def test_a_manifest_takes_100_bytes_a_row_group_and_a_rank_gets_its_part(many: Path) -> None:
    manifest = many_files.read(str(many))
    groups = len(manifest.files.group_rows)
    assert groups == FILES * GROUPS
    sent = len(pickle.dumps(manifest))
    assert manifest.nbytes <= 100 * groups and sent <= 100 * groups
    planner, world, parts = EpochPlanner(manifest), 16, []
    for rank in range(world):
        part = planner.open(Cursor.start(0), Ordering(seed=0), rank, world)
        rows, size = 0, 0
        while rows < part.rows:
            columns = planner.next_blocks(part, rows)
            rows, size = rows + columns.rows, size + len(pickle.dumps(columns))
        parts.append((rows, size))
    assert sum(rows for rows, _ in parts) == manifest.rows
    assert max(size for _, size in parts) < sent / 4


def test_the_index_of_a_folder_is_found_and_filters_are_asked_of_it(many: Path, opened: list[str]) -> None:
    data = DataSet(path=str(many), filters=[["day", ">=", 3], ["price", "<", 1e9]])
    manifest = Manifest.of(data, many_files.SCHEMA, window_rows=1)
    assert not opened
    without = Manifest.read(data.path, many_files.SCHEMA, filters=data.filters, window_rows=1)
    assert opened and without.fingerprint == manifest.fingerprint and without.columns == manifest.columns
    # templates hold the days 0 … 9, or 4 … 13, one a row group
    assert manifest.rows == FILES // 2 * (7 + 10) * many_files.ROWS


def test_the_command_writes_an_index(tmp_path: Path, opened: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, [50, 60], row_group_size=20)
    assert run(["data", "index", str(folder), "--column", "row"]) == 0
    assert "2 files, 6 row groups, 110 rows" in capsys.readouterr().out
    opened.clear()
    assert Manifest.of(DataSet(path=str(folder), filters=[["row", "<", 20]]), SCHEMA).rows == 20 and not opened


def test_new_and_changed_files_are_read_beside_an_index(tmp_path: Path, opened: list[str]) -> None:
    folder = write(tmp_path / "set", [50, 60])
    out = tmp_path / "elsewhere.arrow"
    write_index([str(folder)], str(out), ["row"])
    opened.clear()
    data = DataSet(path=str(folder), index=str(out), filters=[["row", ">=", 70]])
    assert Manifest.of(data, SCHEMA).rows == 60 and not opened
    pq.write_table(table(30, 110), folder / "part-002.parquet")
    assert Manifest.of(data, SCHEMA).rows == 90
    assert {Path(name).name for name in opened} == {"part-002.parquet"}
    opened.clear()
    with pytest.raises(DataError, match=r"does not exist \(file .*nowhere\.arrow"):
        Manifest.of(data.model_copy(update={"index": str(tmp_path / "nowhere.arrow")}), SCHEMA)
    other = DataSet(path=str(folder), index=str(out), filters=[["age", ">", 0]])
    assert Manifest.of(other, SCHEMA).rows == 140 and len(set(opened)) == 3, "the index knows nothing of this column"
    opened.clear()
    assert write_index([str(folder)], str(out), ["row"]).files == 3
    assert {Path(name).name for name in opened} == {"part-002.parquet"}
    with pytest.raises(DataError, match="--out FILE"):
        write_index([str(folder), str(folder)])
    with pytest.raises(DataError, match="cannot write the index"):
        write_index([str(folder)], str(tmp_path / "nowhere" / "x.arrow"))
    write_index([str(folder)])
    assert (folder / "_rayrec_index.arrow").exists() and Manifest.of(DataSet(path=f"{folder}/*"), SCHEMA).rows == 140


def streamed(manifest: Any, cursor: Cursor, rank: int, world: int, options: ReadOptions = LOCAL) -> BatchStream:
    return BatchStream(
        manifest, SCHEMA, ROWS_OF, batch_rows=16, rank=rank, world_size=world, cursor=cursor, seed=0, options=options
    )


def test_workers_that_ask_an_actor_read_the_same_batches(tmp_path: Path, running_ray: None) -> None:
    manifest = Manifest.read(str(write(tmp_path, [230, 170])), SCHEMA, window_rows=30)
    mix = Mix((manifest, manifest), (1, 1), (400, 400))
    with shared(manifest, mix, None, manifest, sent_whole=0) as (held, of_mix, nothing, again):
        assert nothing is None and again.holder is held.holder is of_mix.parts[1].holder
        assert len(pickle.dumps(held)) < len(pickle.dumps(manifest)) and held.rows == 400
        cursors = []
        for rank in range(2):
            with (
                streamed(manifest, Cursor.start(1), rank, 2) as whole,
                streamed(held, Cursor.start(1), rank, 2) as part,
            ):
                assert all(same(a, b) and x == y for (a, x), (b, y) in zip(whole, part, strict=True))
            with streamed(held, Cursor.start(1), rank, 2) as part:
                cursors.append([next(part)[1] for _ in range(5)][-1])
        cursor = Cursor.merge(cursors)
        for rank in range(3):
            with streamed(manifest, cursor, rank, 3) as whole, streamed(held, cursor, rank, 3) as part:
                assert row_ids([b for b, _ in whole]) == row_ids([b for b, _ in part])
        with streamed(Manifest.read(str(tmp_path), SCHEMA), Cursor.start(1), 0, 1) as other:
            wrong = Cursor.merge([other.start_cursor])
        with pytest.raises(DataError, match="does not fit"):
            streamed(held, wrong, 0, 1)
    with shared(manifest) as (whole_manifest,):
        assert whole_manifest is manifest, "a small one is sent as it is"


def test_a_worker_gets_its_part_piece_by_piece(many: Path, running_ray: None) -> None:
    manifest = many_files.read(str(many))
    with shared(manifest, sent_whole=0) as (held,):
        found = [many_files.grown(held, rank, 2) for rank in range(2)]
    assert sum(one["rows"] for one in found) == manifest.rows
    assert sum(one["pieces"] for one in found) >= len(manifest.windows)
    assert sum(one["sent"] for one in found) < 100 * len(manifest.files.group_rows)


def test_footers_are_read_by_ray_tasks(many: Path, running_ray: None, opened: list[str]) -> None:
    assert len(Manifest.read(str(many), many_files.SCHEMA, window_rows=1).files) == FILES
    assert len(opened) == 1, "one file tells the types, and other processes read the rest"


@pytest.mark.parametrize("how", ["bytes", "footer", "time", "no Parquet"])
@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_file_that_is_rewritten_in_place_is_noticed(tmp_path: Path, how: str, policy: Any) -> None:
    file = write(tmp_path, [100]) / "part-000.parquet"
    manifest = Manifest.read(str(tmp_path), SCHEMA)
    before, stat = file.read_bytes(), file.stat()
    changed = table(100, label=[1] * 100) if how == "footer" else table(101 if how == "bytes" else 100)
    pq.write_table(changed, file, row_group_size=100)
    if how == "footer":  # of the same length and time: only its own hash tells
        data = bytearray(before)
        at = data.rfind(b"parquet-cpp-arrow")
        data[at : at + 7] = b"PARQUET"
        file.write_bytes(data)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif how == "time":
        file.write_bytes(before)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 5_000_000_000))
    elif how == "no Parquet":
        file.write_bytes(b"x" * len(before))
    what = "footer" if how == "no Parquet" else how
    options = ReadOptions(reader="local", bad_rows=BadRows(policy=policy))
    with (
        streamed(manifest, Cursor.start(0), 0, 1, options) as batches,
        pytest.raises(FileChanged, match=f"changed .* {what}") as caught,
    ):
        next(batches)
    assert caught.value.file == str(file) and batches.skipped.count == 0, "its rows are not bad ones"


def test_a_rewritten_file_does_not_fit_a_cursor(tmp_path: Path) -> None:
    folder = write(tmp_path, [100])
    with streamed(Manifest.read(str(folder), SCHEMA), Cursor.start(0), 0, 1) as batches:
        _, cursor = next(batches)
    other = table(100, label=[1] * 100)
    pq.write_table(other, folder / "part-000.parquet", row_group_size=100)
    with pytest.raises(DataError, match="does not fit"):
        streamed(Manifest.read(str(folder), SCHEMA), Cursor.merge([cursor]), 0, 1)
    pq.write_table(table(20, 100), folder / "part-001.parquet")
    with streamed(Manifest.read(str(folder), SCHEMA), Cursor.start(1), 0, 1) as batches:
        assert sorted(row_ids([b for b, _ in batches])) == list(range(120)), "new files come with the next epoch"


def test_mixes_and_several_paths_share_one_index(tmp_path: Path, opened: list[str]) -> None:
    sets = [WeightedDataSet(path=str(write(tmp_path / name, [30, 20]))) for name in "ab"]
    index = FooterIndex.open(tmp_path / "run.arrow")
    Mix.of(sets, SCHEMA, FooterReading(index))
    assert index.save()
    opened.clear()
    again = FooterIndex.open(tmp_path / "run.arrow")
    assert Mix.of(sets, SCHEMA, FooterReading(again)).num_files == 4 and not opened
