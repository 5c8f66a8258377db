"""Batches of a rank: every row once, exact sizes, exact resume, errors in order, the same through Ray."""

from __future__ import annotations

import decimal
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data import (
    BadRows,
    BatchStream,
    Cursor,
    DataError,
    DataUnavailable,
    Manifest,
    ReadOptions,
    Schema,
    empty_batch,
)
from rayrec.models import Batch
from rayrec.storage import parquet
from tests.data.sets import ROWS_OF, SCHEMA, table, write

LOCAL, RAY, AUTO = (ReadOptions(reader=reader, cpus_per_read=0.25) for reader in ("local", "ray", "auto"))


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = write(tmp_path_factory.mktemp("set"), [730, 0, 12, 1301], row_group_size=150)
    return Manifest.read(str(folder), SCHEMA, window_rows=300)


def stream(manifest: Manifest, cursor: Cursor, rank: int, world_size: int, **more) -> BatchStream:
    settings = {"batch_rows": 64, "seed": 0, "options": LOCAL} | more
    return BatchStream(manifest, SCHEMA, ROWS_OF, rank=rank, world_size=world_size, cursor=cursor, **settings)


def row_ids(batches: list[Batch]) -> list[int]:
    return [i for batch in batches for i in batch.sparse["row"].values().tolist()]


def same(a: Batch, b: Batch) -> bool:
    return (
        torch.equal(a.dense, b.dense)
        and torch.equal(a.label, b.label)
        and torch.equal(a.sparse.values(), b.sparse.values())
        and torch.equal(a.sparse.lengths(), b.sparse.lengths())
    )


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_once_with_its_own_values(manifest: Manifest, shuffle: bool) -> None:
    source = pq.ParquetDataset([f.uri for f in manifest.files]).read().to_pydict()
    ids = []
    for rank in range(3):
        with stream(manifest, Cursor.start(0), rank, 3, shuffle=shuffle) as batches:
            planned, found = batches.batches_left, list(batches)
            assert len(found) == planned and batches.batches_left == 0
            assert sum(b.rows for b, _ in found) == batches.rows == found[-1][1].rows_done
            assert all(b.rows == 64 for b, _ in found[:-1])
        for batch, _ in found:
            rows = batch.sparse["row"].values().tolist()
            ids += rows
            assert batch.sparse["user"].values().tolist() == [source["user_id"][r] for r in rows]
            assert batch.sparse["genres"].values().tolist() == [g for r in rows for g in source["genres"][r]]
            assert batch.sparse["genres"].lengths().tolist() == [len(source["genres"][r]) for r in rows]
            assert batch.label.tolist() == [source["label"][r] for r in rows]
            dense = [[(source["age"][r] - 30) / 10, source["price"][r] or 0.0] for r in rows]
            np.testing.assert_allclose(batch.dense.numpy(), dense, rtol=1e-6)
    assert sorted(ids) == list(range(manifest.rows))
    assert (ids == sorted(ids)) is False or not shuffle


def test_same_seed_same_batches_and_other_epoch_other_order(manifest: Manifest) -> None:
    def epoch(number: int, seed: int = 0) -> list[int]:
        with stream(manifest, Cursor.start(number), 0, 1, seed=seed) as batches:
            return row_ids([b for b, _ in batches])

    assert epoch(0) == epoch(0)
    assert epoch(0) != epoch(1) != epoch(1, seed=1)
    assert sorted(epoch(1)) == list(range(manifest.rows))


@settings(max_examples=12)
@given(data=st.data())
def test_exactly_once_under_stops_and_resizes(manifest: Manifest, data: st.DataObject) -> None:
    cursor, ids = Cursor.start(1), []
    for _ in range(4):
        world_size, batch_rows = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 200))
        steps = data.draw(st.integers(0, 6))
        after = []
        for rank in range(world_size):
            with stream(manifest, cursor, rank, world_size, batch_rows=batch_rows) as batches:
                last: Cursor = batches.start_cursor
                for _ in range(min(steps, batches.batches_left)):
                    batch, last = next(batches)
                    ids += row_ids([batch])
                after.append(last)
        cursor = Cursor.from_dict(Cursor.merge(after).to_dict())
        assert cursor.rows_done == len(ids)
    with stream(manifest, cursor, 0, 1) as batches:
        for batch, last in batches:
            ids += row_ids([batch])
            cursor = Cursor.merge([last])
    assert sorted(ids) == list(range(manifest.rows))
    assert cursor.rows_done == manifest.rows


def test_resume_continues_the_very_same_batches(manifest: Manifest) -> None:
    with stream(manifest, Cursor.start(0), 1, 2) as batches:
        whole = list(batches)
    with stream(manifest, Cursor.start(0), 0, 2) as batches:
        other = [next(batches)[1] for _ in range(5)][-1]
    with stream(manifest, Cursor.merge([other, whole[4][1]]), 1, 2) as batches:
        rest = list(batches)
    assert len(rest) == len(whole) - 5
    assert all(same(a, b) for (a, _), (b, _) in zip(rest, whole[5:], strict=True))


def test_more_ranks_than_rows(tmp_path: Path) -> None:
    manifest = Manifest.read(str(write(tmp_path, [3])), SCHEMA)
    ids = []
    for rank in range(5):
        with stream(manifest, Cursor.start(0), rank, 5) as batches:
            planned, found = batches.batches_left, list(batches)
            assert len(found) == (rank < 3) == planned
            ids += row_ids([b for b, _ in found])
    assert sorted(ids) == [0, 1, 2]
    empty = empty_batch(SCHEMA)
    assert empty.rows == 0 and empty.dense.shape == (0, 2) and empty.sparse.stride() == 0


def test_large_row_groups_are_read_in_parts(tmp_path: Path) -> None:
    manifest = Manifest.read(str(write(tmp_path, [1000], row_group_size=1000)), SCHEMA, window_bytes=30_000)
    assert len(manifest.windows) > 2 and manifest.files.offsets[1] == 1
    with stream(manifest, Cursor.start(0), 0, 1) as batches:
        assert sorted(row_ids([b for b, _ in batches])) == list(range(1000))


def test_a_footer_is_read_once_however_many_windows_a_file_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write(tmp_path / "set", [600, 600], row_group_size=50)
    monkeypatch.setattr(parquet, "_raw_footer", read := Mock(wraps=parquet._raw_footer))
    manifest = Manifest.read(str(files), SCHEMA, window_rows=50)
    for epoch in range(2):
        with stream(manifest, Cursor.start(epoch), 0, 1) as batches:
            assert sorted(row_ids([b for b, _ in batches])) == list(range(1200))
    assert len(manifest.windows) == 24 and read.call_count == 2


@pytest.mark.parametrize("head_rows", [1, 400, 10_000])
def test_ray_and_local_give_the_same_batches(
    manifest: Manifest, running_ray: None, head_rows: int, auto_reader: Callable[..., None]
) -> None:
    """Also if the first rows are read here and the rest, or nothing, through Ray."""
    auto_reader(head_rows)

    def take(options: ReadOptions) -> list[tuple[Batch, Cursor]]:
        with stream(manifest, Cursor.start(3), 1, 2, options=options) as batches:
            return list(batches)

    local = take(LOCAL)
    for other in (take(RAY), take(AUTO)) if head_rows == 1 else (take(AUTO),):
        assert len(local) == len(other)
        for (a, after_a), (b, after_b) in zip(local, other, strict=True):
            assert same(a, b) and after_a.to_dict() == after_b.to_dict()


@pytest.mark.parametrize(
    ("cores_for_ray", "ranks_here", "reads_on_ray"), [(2, None, True), (3, None, False), (2, 2, False), (1, 2, True)]
)
def test_auto_reads_on_ray_where_cores_are_left_for_it(
    manifest: Manifest,
    running_ray: None,
    cores_for_ray: int,
    ranks_here: int | None,
    reads_on_ray: bool,
    auto_reader: Callable[..., None],
    on_ray: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the tests' Ray of two cores; the rows of this data set are more than one head's."""
    auto_reader(400, cores_for_ray)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks_here:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_here))
    with stream(manifest, Cursor.start(0), 0, 1, options=AUTO) as batches:
        ids = row_ids([batch for batch, _ in batches])
    assert sorted(ids) == list(range(manifest.rows))
    assert bool(on_ray) is reads_on_ray


def data_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "rayrec-data" or "StreamingExecutor" in t.name]


def await_no_threads() -> None:
    """`close` abandons a thread after 10 s; on a busy machine Ray's tasks take longer to start, read and end."""
    deadline = time.monotonic() + 120
    while data_threads() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not data_threads(), f"these threads do not end\n{state_of_ray()}"


@pytest.mark.parametrize("options", [LOCAL, RAY, AUTO], ids=["local", "ray", "auto"])
def test_closing_in_the_middle_leaves_no_thread(
    manifest: Manifest, options: ReadOptions, running_ray: None, auto_reader: Callable[..., None]
) -> None:
    auto_reader(400)
    batches = stream(manifest, Cursor.start(0), 0, 1, batch_rows=1, options=options)
    next(batches)
    batches.close()
    batches.close()
    await_no_threads()
    with pytest.raises(StopIteration):
        next(batches)


BAD_ROWS = [
    ({"user_id": lambda v: pa.array([*v[:123], None, *v[124:]], pa.int64())}, "user_id", "null id", "null"),
    ({"user_id": lambda v: pa.array([*v[:123], 40, *v[124:]])}, "user_id", r"outside its table's rows \[0, 40\)", "40"),
    ({"user_id": lambda v: pa.array([*v[:123], -1, *v[124:]])}, "user_id", r"outside its table's rows \[0, 40\)", "-1"),
    ({"genres": lambda v: pa.array([*v[:123], [1, 6], *v[124:]])}, "genres", r"rows \[0, 6\)", "6"),
    ({"genres": lambda v: pa.array([*v[:123], [1, None], *v[124:]])}, "genres", "null id", "null"),
    ({"genres": lambda v: pa.array([*v[:123], None, *v[124:]])}, "genres", "null list", "null"),
    ({"age": lambda v: pa.array([*v[:123], float("nan"), *v[124:]])}, "age", "not a finite", "nan"),
    ({"age": lambda v: pa.array([*v[:123], float("-inf"), *v[124:]])}, "age", "not a finite", "-inf"),
    ({"age": lambda v: pa.array([*v[:123], None, *v[124:]])}, "age", "is null", None),
    ({"label": lambda v: pa.array([*v[:123], 2, *v[124:]])}, "label", "must be 0 or 1", "2"),
    ({"label": lambda v: pa.array([*v[:123], None, *v[124:]])}, "label", "the label is null", None),
    ({"city": lambda v: pa.array([*v[:123], None, *v[124:]])}, "city", "null id", "null"),
]


@pytest.mark.parametrize(("change", "column", "message", "value"), BAD_ROWS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_bad_rows_are_named(tmp_path: Path, change, column: str, message: str, value: str, shuffle: bool) -> None:
    good = table(400)
    ((name, make),) = change.items()
    bad = make(good.column(name).to_pylist())
    write(tmp_path, [90])
    pq.write_table(table(400, **{name: bad}), tmp_path / "x.parquet", row_group_size=100)
    manifest = Manifest.read(str(tmp_path), SCHEMA)
    with stream(manifest, Cursor.start(0), 0, 1, shuffle=shuffle) as batches:
        with pytest.raises(DataError, match=message) as caught:
            list(batches)
        with pytest.raises(DataError, match=message):
            next(batches)
    error = caught.value
    assert (error.file, error.row_group, error.row) == (str(tmp_path / "x.parquet"), 1, 123)
    assert error.column == column and error.value == value and error.fix


def test_rows_before_a_bad_one_are_still_given(tmp_path: Path, running_ray: None) -> None:
    write(tmp_path, [100])
    pq.write_table(table(100, label=pa.array([5] * 100)), tmp_path / "x.parquet")
    manifest = Manifest.read(str(tmp_path), SCHEMA, window_rows=1)
    for options in (LOCAL, RAY):
        with stream(manifest, Cursor.start(0), 0, 1, shuffle=False, batch_rows=50, options=options) as batches:
            assert row_ids([next(batches)[0], next(batches)[0]]) == list(range(100))
            with pytest.raises(DataError, match="must be 0 or 1") as caught:
                next(batches)
        assert caught.value.row == 0 and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("options", [LOCAL, RAY], ids=["local", "ray"])
def test_files_that_change_or_vanish(tmp_path: Path, options: ReadOptions, running_ray: None) -> None:
    manifest = Manifest.read(str(write(tmp_path, [100])), SCHEMA)
    file = tmp_path / "part-000.parquet"
    pq.write_table(table(200), file, row_group_size=100)
    with stream(manifest, Cursor.start(0), 0, 1, options=options) as batches, pytest.raises(DataError, match="changed"):
        next(batches)
    data = bytearray(file.read_bytes())
    manifest = Manifest.read(str(tmp_path), SCHEMA)
    data[4:3000] = b"\xff" * 2996
    changed_ns = file.stat().st_mtime_ns
    file.write_bytes(data)
    with stream(manifest, Cursor.start(0), 0, 1, options=options) as batches, pytest.raises(DataError, match="changed"):
        next(batches)
    os.utime(file, ns=(changed_ns, changed_ns))  # a disk that lies
    with stream(manifest, Cursor.start(0), 0, 1, options=options) as batches:
        with pytest.raises(DataError, match="not readable as Parquet") as caught:
            list(batches)
        assert caught.value.file == str(file)
    file.unlink()
    with stream(manifest, Cursor.start(0), 0, 1, options=options) as batches, pytest.raises(DataError, match="gone"):
        next(batches)


def test_tasks_of_several_windows_give_the_same_batches(tmp_path: Path, running_ray: None) -> None:
    manifest = Manifest.read(str(write(tmp_path, [800, 700], row_group_size=50)), SCHEMA, window_rows=50)
    with stream(manifest, Cursor.start(0), 0, 1) as here, stream(manifest, Cursor.start(0), 0, 1, options=RAY) as there:
        for (mine, my_cursor), (its, its_cursor) in zip(here, there, strict=True):
            assert same(mine, its) and my_cursor == its_cursor


def test_ray_without_free_cpus_ends_with_an_error(manifest: Manifest, running_ray: None) -> None:
    import ray

    options = ReadOptions(reader="ray", cpus_per_read=1000)
    batches = stream(manifest, Cursor.start(0), 0, 1, options=options)
    with pytest.raises(DataError, match="needs 1000 CPUs, but Ray has"):
        next(batches)
    everything = ray.cluster_resources()["CPU"]
    hog = ray.remote(num_cpus=everything)(threading.Event).remote()
    ray.get(hog.is_set.remote())
    options = ReadOptions(reader="ray", stall_timeout_s=2, patience_s=0)
    batches = stream(manifest, Cursor.start(0), 0, 1, options=options)
    try:
        with pytest.raises(DataError, match="no data arrived for 2 s; fix: leave CPUs free"):
            next(batches)
    finally:
        ray.kill(hog)
    await_no_threads()


def state_of_ray() -> str:
    """The free resources, and the end of each raylet's log."""
    import ray

    logs = Path(ray._private.worker._global_node.get_logs_dir_path()).glob("raylet.*")
    ends = [f"== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:]) for log in logs]
    return "\n".join([f"free: {ray.available_resources()}", *ends])


def test_wrong_arguments(manifest: Manifest) -> None:
    with pytest.raises(DataError, match="'user' is in no table"):
        BatchStream(manifest, SCHEMA, {"row": 10}, batch_rows=4, rank=0, world_size=1, cursor=Cursor.start(0), seed=0)
    with pytest.raises(ValueError, match="batch_rows=0"):
        stream(manifest, Cursor.start(0), 0, 1, batch_rows=0)
    with stream(manifest, Cursor.start(0), 0, 1) as batches:
        _, after = next(batches)
    with pytest.raises(DataError, match="does not fit"):
        stream(manifest, after, 0, 1, seed=1)


SKIP = BadRows(policy="skip")


def bad_folder(folder: Path) -> set[int]:
    """Files with some bad rows; gives the good ones."""
    write(folder, [300])
    label = np.where(np.isin(np.arange(200), [0, 7, 8, 150, 199]), 3, 1)
    pq.write_table(table(200, 300, label=pa.array(label)), folder / "x.parquet", row_group_size=60)
    return set(range(500)) - {300 + i for i in (0, 7, 8, 150, 199)}


@pytest.mark.parametrize("options", [LOCAL, RAY], ids=["local", "ray"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_bad_rows_can_be_skipped(tmp_path: Path, options: ReadOptions, shuffle: bool, running_ray: None) -> None:
    good = bad_folder(tmp_path)
    manifest = Manifest.read(str(tmp_path), SCHEMA, window_rows=130)
    options = options.model_copy(update={"bad_rows": BadRows(policy="skip", samples=2)})
    ids, after, skipped, samples = [], [], 0, []
    for rank in range(2):
        with stream(manifest, Cursor.start(0), rank, 2, options=options, shuffle=shuffle, batch_rows=32) as batches:
            found = list(batches)
        assert all(b.rows == 32 for b, _ in found[:-1])
        ids += row_ids([b for b, _ in found])
        after.append(found[-1][1])
        skipped += batches.skipped.count
        samples += batches.skipped.samples
    assert sorted(ids) == sorted(good)
    assert Cursor.merge(after).rows_done == manifest.rows
    assert skipped == 5 and 2 <= len(samples) <= 4
    assert all(s.file == str(tmp_path / "x.parquet") and s.row in (0, 7, 8, 150, 199) for s in samples)


def folder_with_bad_texts(folder: Path) -> tuple[Schema, Path]:
    """100 rows of three row groups: row 70 has a text that is not UTF-8, row 75 a key too large for its map."""
    texts = pa.array([b"\xff" if row == 70 else b"a b" for row in range(100)], pa.binary()).view(pa.string())
    maps = pa.array([[(1, 2.0)]] * 100, pa.map_(pa.int8(), pa.float64()))
    keys = pa.array([300 if row == 75 else 1 for row in range(100)])
    file = folder / "x.parquet"
    pq.write_table(
        table(100).append_column("t", texts).append_column("m", maps).append_column("k", keys), file, row_group_size=40
    )
    derived = [
        {"name": "words", "kind": "tokens", "column": "t"},
        {"name": "rate", "kind": "lookup", "column": "m", "key": "k"},
    ]
    sparse = [
        {"name": "user_id"},
        {"name": "words", "kind": "id_list", "mapping": {"kind": "hash"}, "on_null": "empty"},
    ]
    dense = [{"name": "rate", "default": 0.0}]
    return Schema.model_validate({"derived": derived, "sparse": sparse, "dense": dense}), file


@pytest.mark.parametrize("shuffle", [True, False])
def test_values_that_no_column_can_be_computed_from_are_bad_rows(tmp_path: Path, shuffle: bool) -> None:
    schema, file = folder_with_bad_texts(tmp_path)
    manifest, rows_of = Manifest.read(str(tmp_path), schema), {"user_id": 50, "words": 50}
    more: dict[str, Any] = {"seed": 0, "shuffle": shuffle, "batch_rows": 32}

    def read(bad_rows: BadRows) -> BatchStream:
        options = LOCAL.model_copy(update={"bad_rows": bad_rows})
        return BatchStream(
            manifest, schema, rows_of, rank=0, world_size=1, cursor=Cursor.start(0), options=options, **more
        )

    with read(SKIP) as batches:
        assert sum(batch.rows for batch, _ in batches) == 98 and batches.skipped.count == 2
    with read(BadRows()) as batches, pytest.raises(DataError, match="cannot be computed from this row") as caught:
        list(batches)
    error = caught.value
    assert (error.file, error.row_group) == (str(file), 1) and (error.row, error.column) in {(70, "t"), (75, "m")}


@pytest.mark.parametrize("bad", [[99], [98, 99], [63, 64, 99], [0, 99]])
def test_the_last_cursor_counts_every_skipped_row(tmp_path: Path, bad: list[int]) -> None:
    labels = pa.array([9 if row in bad else 1 for row in range(100)])
    pq.write_table(table(100, label=labels), tmp_path / "x.parquet")
    options = LOCAL.model_copy(update={"bad_rows": BadRows(policy="skip")})
    with stream(Manifest.read(str(tmp_path), SCHEMA), Cursor.start(0), 0, 1, shuffle=False, options=options) as batches:
        *_, (_, last) = batches
    assert (last.skipped, last.rows_done) == (len(bad), 100)


def test_resume_with_skipped_rows(tmp_path: Path) -> None:
    good = bad_folder(tmp_path)
    manifest = Manifest.read(str(tmp_path), SCHEMA, window_rows=130)
    for stop in range(0, 60, 7):
        ids, cursor, skipped = [], Cursor.start(0), 0
        for _ in range(2):
            passed = 0
            options = LOCAL.model_copy(update={"bad_rows": SKIP})
            with stream(manifest, cursor, 0, 1, options=options, batch_rows=9) as batches:
                for number, (batch, after) in enumerate(batches):
                    ids += row_ids([batch])
                    cursor, passed = after, after.skipped
                    if number == stop:
                        break
            skipped += passed
        with stream(manifest, cursor, 0, 1, options=options, batch_rows=9) as batches:
            rest = list(batches)
        ids += row_ids([b for b, _ in rest])
        assert sorted(ids) == sorted(good)
        assert skipped + (rest[-1][1].skipped if rest else 0) == 5, "each bad row counts for one cursor"


def test_too_many_bad_rows_end_the_run(tmp_path: Path) -> None:
    bad_folder(tmp_path)
    manifest = Manifest.read(str(tmp_path), SCHEMA)
    options = LOCAL.model_copy(update={"bad_rows": BadRows(policy="skip", limit=4)})
    batches = stream(manifest, Cursor.start(0), 0, 1, options=options)
    with pytest.raises(DataError, match=r"more than 4 bad rows were skipped, e\.g\. the label must be 0 or 1"):
        list(batches)


def test_only_bad_rows_still_finish_the_epoch(tmp_path: Path) -> None:
    pq.write_table(table(50, label=pa.array([9] * 50)), tmp_path / "x.parquet")
    manifest = Manifest.read(str(tmp_path), SCHEMA)
    options = LOCAL.model_copy(update={"bad_rows": SKIP})
    with stream(manifest, Cursor.start(0), 0, 1, options=options) as batches:
        ((batch, after),) = list(batches)
    assert batch.rows == 0 and after.rows_done == manifest.rows and batches.skipped.count == 50


def test_unreadable_files_can_be_skipped(tmp_path: Path) -> None:
    manifest = Manifest.read(str(write(tmp_path, [100, 40, 100])), SCHEMA)
    assert len(manifest.windows) == 1
    (tmp_path / "part-001.parquet").unlink()
    options = LOCAL.model_copy(update={"bad_rows": SKIP})
    ids = []
    for rank in range(3):
        with stream(manifest, Cursor.start(0), rank, 3, options=options) as batches:
            ids += row_ids([b for b, _ in batches])
        if batches.skipped.samples:
            assert "the file is gone" in str(batches.skipped.samples[0])
    assert sorted(ids) == [*range(100), *range(140, 240)]


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_patience_ends_with_an_error_that_another_attempt_may_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Literal["error", "skip"]
) -> None:
    """Storage that is away takes no row for a bad one."""
    manifest = Manifest.read(str(write(tmp_path, [100])), SCHEMA)

    class Away(pafs.LocalFileSystem):
        def open_input_file(self, path: str):
            raise OSError("connection refused")

        def get_file_info(self, path: str):
            raise OSError("connection refused")

    for module in ("parquet", "retries"):
        monkeypatch.setattr(f"rayrec.storage.{module}.open_filesystem", lambda uri: (Away(), uri))
    options = ReadOptions(reader="local", retries=0, patience_s=0.2, bad_rows=BadRows(policy=policy))
    with stream(manifest, Cursor.start(0), 0, 1, options=options) as batches:
        with pytest.raises(DataUnavailable, match=r"has not answered for 0.2 s: .*connection refused") as caught:
            list(batches)
        assert batches.skipped.count == 0
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is DataUnavailable and str(again) == str(caught.value)


INT32, UINT64 = pa.array(range(40), pa.int32()), pa.array(range(40), pa.uint64())
SAME_ROWS = {
    "dictionary-encoded": {"user_id": INT32.dictionary_encode(), "city": pa.array(["x", "y"] * 20).dictionary_encode()},
    "int32": {"user_id": INT32},
    "uint64": {"user_id": UINT64},
    "large_list": {"genres": pa.array([[1, 2], []] * 20, pa.large_list(pa.uint64()))},
    "list of int32": {"genres": pa.array([[1, 2], []] * 20, pa.list_(pa.int32()))},
    "large_string": {"city": pa.array(["x", "y"] * 20, pa.large_string())},
    "decimals": {"age": pa.array([decimal.Decimal("2.50")] * 40, pa.decimal128(10, 2))},
}


@pytest.mark.parametrize("name", SAME_ROWS)
def test_a_column_may_be_stored_in_any_type_of_its_kind(tmp_path: Path, name: str) -> None:
    """The batches are those of plain int64, list<int64>, string and double columns."""
    plain = {
        "user_id": pa.array(range(40)),
        "genres": pa.array([[1, 2], []] * 20),
        "city": pa.array(["x", "y"] * 20),
        "age": pa.array([2.5] * 40),
    }
    found = []
    for folder, columns in (("plain", plain), ("stored", plain | SAME_ROWS[name])):
        (tmp_path / folder).mkdir()
        pq.write_table(table(40, **columns), tmp_path / folder / "a.parquet")
        manifest = Manifest.read(str(tmp_path / folder), SCHEMA)
        with stream(manifest, Cursor.start(0), 0, 1, batch_rows=16, shuffle=False) as batches:
            found.append([batch for batch, _ in batches])
    assert len(found[0]) == 3 and all(same(a, b) for a, b in zip(*found, strict=True))


def test_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    """Rows of before are given as they were, and nothing of what came later."""
    manifest = Manifest.read(str(write(tmp_path, [3000], row_group_size=50)), SCHEMA, window_rows=50)
    file = tmp_path / "part-000.parquet"
    with stream(manifest, Cursor.start(0), 0, 1, shuffle=False, batch_rows=50) as batches:
        ids = row_ids([next(batches)[0]])
        pq.write_table(table(4000), file, row_group_size=50)
        with pytest.raises(DataError, match="the file changed while the run was going on") as caught:
            for batch, _ in batches:
                ids += row_ids([batch])
    assert caught.value.file == str(file)
    assert ids == list(range(len(ids))) and len(ids) < 3000


def test_no_more_samples_are_kept_than_asked_for(tmp_path: Path) -> None:
    bad_folder(tmp_path)
    manifest = Manifest.read(str(tmp_path), SCHEMA, window_rows=60)
    for samples in (0, 1, 2, 4, 9):
        options = LOCAL.model_copy(update={"bad_rows": BadRows(policy="skip", samples=samples)})
        with stream(manifest, Cursor.start(0), 0, 1, options=options) as batches:
            list(batches)
        assert (batches.skipped.count, len(batches.skipped.samples)) == (5, min(5, samples))
