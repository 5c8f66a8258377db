"""Training on a folder to which files are added: every row once, in the order of arrival, until the run is ended."""

from __future__ import annotations

import io
import os
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist
from rich.console import Console

from rayrec import cli
from rayrec.data import DataError, DataSet, Follower
from rayrec.storage import open_folder
from rayrec.train import Display, Interrupted, Result, RunFolder, Trainer, parse_config
from tests.ranks import RankError, on_ranks
from tests.train import small
from tests.train.row_log import Noted, noted, train_noted, with_row_ids
from tests.train.small import make_job
from tests.train.test_exactly_once import committed

FILE_ROWS = 40


def write(folder: Path, numbers: Sequence[int], *, rows: int = FILE_ROWS) -> None:
    """Files that arrive whole; their rows are numbered through, one a second."""
    folder.mkdir(exist_ok=True)
    for number in numbers:
        part = small.table(2000, seed=0).slice(number * FILE_ROWS, rows)
        at = pa.array(np.arange(number * FILE_ROWS, number * FILE_ROWS + rows), pa.timestamp("s"))
        pq.write_table(part.append_column("when", at), folder / f".{number}.parquet", row_group_size=16)
        (folder / f".{number}.parquet").rename(folder / f"{number:03d}.parquet")


def config(folder: Path, workers: int = 0, **follow: Any) -> dict[str, Any]:
    raw = with_row_ids(folder, 2000, trainer__batch_size=32, trainer__num_workers=workers)
    raw["schema"]["timestamp"] = {"column": "when"}
    raw["data"] = {"train": str(folder / "log"), "follow": {"poll": "1s", "idle": "1s", **follow}}
    return raw


def fit(raw: dict[str, Any], log: Path) -> Result:
    display = Display(Console(file=io.StringIO()))
    return Trainer(parse_config(raw), factory=partial(Noted, str(log), {}), display=display).fit()


def follower(raw: dict[str, Any], folder: Path, told: list[str], **more: Any) -> Follower:
    settings = parse_config(raw)
    assert isinstance(settings.data.train, DataSet) and settings.data.follow is not None
    return Follower(
        settings.data.train, settings.data.follow, settings.training_schema, settings.data_schema.timestamp,
        open_folder(folder / "followed"), folder / "joined", folder / "landed", told.append, **more,
    )  # fmt: skip


def rows_of(log: Path, ranks: int = 1) -> list[int]:
    return [row for rank in range(ranks) for step in noted(log, rank) for row in step]


def records(folder: Path) -> list[dict[str, Any]]:
    return list(RunFolder(folder / "runs" / "small").read_metrics())


def test_files_are_trained_on_as_they_arrive_and_a_relaunch_goes_on(tmp_path: Path) -> None:
    log, raw = tmp_path / "log", config(tmp_path)
    write(log, [0, 1])
    pq.write_table(pq.read_table(log / "000.parquet").slice(0, 0), log / "000-empty.parquet")
    whole = (log / "001.parquet").read_bytes()

    def later() -> None:
        while not records(tmp_path):
            time.sleep(0.01)
        (log / "003.parquet").write_bytes(whole[:100])  # is being written
        write(log, [2])

    thread = threading.Thread(target=later)
    thread.start()
    result = fit(raw, tmp_path / "first")
    thread.join()
    assert rows_of(tmp_path / "first") == list(range(3 * FILE_ROWS))
    assert result.ended == "no new files for 1s (data.follow.idle)" and result.limit is None
    told = [record["message"] for record in records(tmp_path) if record.get("event") == "waiting"]
    assert len(told) == 1 and "not complete" in told[0] and "003.parquet" in told[0]

    again = fit(raw, tmp_path / "nothing-new")
    assert (again.steps, again.ended) == (result.steps, result.ended) and not rows_of(tmp_path / "nothing-new")

    # The log removes old files. One has changed, and one is late.
    (log / "000.parquet").unlink()
    os.utime(log / "001.parquet", (1, 1))
    write(log, [3])
    write(log, [0], rows=8)
    (log / "000.parquet").rename(log / "004.parquet")
    fit(raw, tmp_path / "second")
    assert rows_of(tmp_path / "second") == [*range(3 * FILE_ROWS, 4 * FILE_ROWS), *range(8)]
    train = [record for record in records(tmp_path) if record["kind"] == "train"]
    assert train[-1]["late_rows"] == 8 and train[-1]["watermark"] == "1970-01-01 00:02:39"
    told = [record["message"] for record in records(tmp_path) if record.get("event") == "waiting"]
    assert len(told) == 2 and "has changed" in told[1] and "001.parquet" in told[1]


def test_a_file_of_the_chunk_in_training_that_is_gone_or_has_changed_is_named(tmp_path: Path) -> None:
    write(tmp_path / "log", [0, 1])
    raw = config(tmp_path)
    with closing(follower(raw, tmp_path, [])) as following:
        assert (chunk := following.chunk(0)) is not None and chunk.manifest.rows == 2 * FILE_ROWS
    with closing(follower(raw, tmp_path, [])) as following:  # after a relaunch
        assert (chunk := following.chunk(0)) is not None and chunk.manifest.rows == 2 * FILE_ROWS
        write(tmp_path / "log", [1], rows=3)
        with pytest.raises(DataError, match=r"missing or has changed.*log/001\.parquet"):
            following.chunk(0)
        (tmp_path / "log/001.parquet").unlink()
        with pytest.raises(DataError, match=r"missing or has changed.*log/001\.parquet"):
            following.chunk(0)


def test_times_of_files_may_be_floats_or_texts(tmp_path: Path) -> None:
    write(tmp_path / "log", [0, 1, 2], rows=2)
    times: list[list[Any]] = [[1.25, 2.5], ["1970-01-01T00:00:03.500Z", "1970-01-01 00:00:04"], ["1970", "soon"]]
    for number, values in enumerate(times):
        path = tmp_path / f"log/{number:03d}.parquet"
        table = pq.read_table(path)
        pq.write_table(table.set_column(table.column_names.index("when"), "when", pa.array(values)), path)
    with closing(follower(config(tmp_path, files=1), tmp_path, [])) as following:
        for number, watermark in enumerate([2_500_000, 4_000_000]):
            assert (chunk := following.chunk(number)) is not None and chunk.watermark_us == watermark
        with pytest.raises(DataError, match=r"not times.*002\.parquet.*'when'.*ISO 8601"):
            following.chunk(2)


def test_the_ledger_keeps_the_chunks_that_a_checkpoint_needs(tmp_path: Path) -> None:
    write(tmp_path / "log", range(12), rows=1)
    raw, needed = config(tmp_path, files=1), 3
    small_ledger: dict[str, Any] = {"entries": 4, "needed_from": lambda: needed}

    def entries() -> list[int]:
        return sorted(int(path.stem) for path in (tmp_path / "followed").iterdir() if path.stem.isdigit())

    with closing(follower(raw, tmp_path, [], **small_ledger)) as following:
        for number in range(9):
            assert following.chunk(number) is not None
        assert entries() == list(range(3, 9))
    needed = 8
    with closing(follower(raw, tmp_path, [], **small_ledger)) as following:  # continues from the oldest checkpoint
        for number in range(3, 12):
            assert (chunk := following.chunk(number)) is not None
            assert len(chunk.manifest.files) == 1 and chunk.manifest.files[0].uri.endswith(f"/{number:03d}.parquet")
        assert entries()[0] in (7, 8) and entries()[-1] == 11
        assert following.chunk(12) is None


def test_the_wait_for_the_first_rows_can_be_stopped_and_names_what_is_missing(tmp_path: Path) -> None:
    raw, told = config(tmp_path, idle=None), io.StringIO()
    raw["data"]["follow"]["join"] = {"events": str(tmp_path / "events"), "window": "20s"}
    (tmp_path / "log").mkdir()

    def stop() -> None:
        while "waiting" not in told.getvalue():
            time.sleep(0.01)
        cli.run(["stop", str(tmp_path / "runs/small"), "--wait", "0"])

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Interrupted, match="stopped while it waited for rows"):
        Trainer(parse_config(raw), display=Display(Console(file=told, width=500))).fit()
    thread.join()
    assert f"waiting for rows in {tmp_path / 'events'}, which does not exist" in told.getvalue()


def stop_after(log: Path, steps: int) -> threading.Thread:
    """Sends this process Ctrl-C when a launch has made so many steps."""

    def wait() -> None:
        end = time.monotonic() + 60
        while len(noted(log, 0)) < steps and time.monotonic() < end:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_run_that_is_stopped_in_a_chunk_and_while_it_waits_is_the_run_without_a_stop(tmp_path: Path) -> None:
    whole, raw, trained = tmp_path / "whole", config(tmp_path, idle=None, files=6), list[list[int]]()
    write(tmp_path / "log", range(8))
    write(tmp_path / "eval", [20])
    raw["data"]["eval"] = str(tmp_path / "eval")
    for total in (1, 11):  # of 8 and 3 steps of two chunks; the second stop is in the wait
        launch = tmp_path / f"launch-{total}"
        thread = stop_after(launch, total - len(trained))
        with pytest.raises(Interrupted):
            fit(raw, launch)
        thread.join()
        trained += noted(launch, 0)
    assert [row for step in trained for row in step] == list(range(8 * FILE_ROWS))
    write(tmp_path / "log", [8])
    raw["data"]["follow"]["idle"] = "1s"
    result = fit(raw, tmp_path / "last")
    trained += noted(tmp_path / "last", 0)

    # The ledger says which files were a chunk.
    shutil.copytree(tmp_path / "runs/small/followed", whole / "small/followed")
    raw["storage"]["path"] = str(whole)
    expected = fit(raw, tmp_path / "at-once")
    assert noted(tmp_path / "at-once", 0) == trained
    assert expected.eval is not None and result.eval is not None
    assert {name: expected.eval[name] for name in ("logloss", "auc")} == {
        name: result.eval[name] for name in ("logloss", "auc")
    }


def test_a_followed_log_is_joined_with_late_labels(tmp_path: Path) -> None:
    raw = config(tmp_path, join={"events": str(tmp_path / "events"), "window": "20s", "late": "correct"})
    rows = small.table(2000, seed=0).slice(0, 200).drop_columns(["label"])
    keys = {"_request": pa.array(map(str, range(200))), "_row": pa.array([0] * 200), "_score": pa.array([0.5] * 200)}
    rows = pa.table({**dict(zip(rows.column_names, rows.columns, strict=True)), **keys})
    rows = rows.append_column("_time", pa.array(np.arange(200.0)))
    positive = list(range(0, 200, 4))
    events = pa.table({"_request": pa.array(map(str, positive)), "_row": pa.array([0] * len(positive)),
                       "_time": pa.array([number + (30.0 if number % 8 else 1.0) for number in positive])})  # fmt: skip
    for name, table in (("log", rows), ("events", events.sort_by("_time"))):
        (tmp_path / name).mkdir()
        for number in range(4):
            size = -(-len(table) // 4)
            pq.write_table(table.slice(number * size, size), tmp_path / name / f"{number}.parquet")
    raw["schema"]["timestamp"] = {"column": "_label_time"}
    raw["schema"]["sample_weight"] = {"column": "_weight"}
    fit(raw, tmp_path / "noted")
    first, again = [], []
    for row in rows_of(tmp_path / "noted"):
        (again if row in first else first).append(row)
    assert first == list(range(len(first))) and len(first) > 100
    known = [number for number in positive if number % 8 and number + 30 <= len(first) + 19]
    assert again == known


def launch(group: dist.ProcessGroup, raw: dict[str, Any], log: str, dies: dict[int, int]) -> str:
    return train_noted(make_job(raw), group, log, dies)


@pytest.mark.long
def test_every_row_once_on_2_then_3_then_1_ranks_with_a_kill(tmp_path: Path) -> None:
    raw = config(tmp_path, files=2)
    raw["trainer"]["checkpoint_every"] = 2
    raw["data"]["eval"] = str(tmp_path / "eval")
    write(tmp_path / "eval", [20])
    write(tmp_path / "log", range(4))
    steps: list[list[int]] = []
    for number, (world, dies) in enumerate([(2, {1: 4}), (3, {}), (1, {})]):
        before, log = committed(tmp_path), tmp_path / f"launch-{number}"
        try:
            answers = on_ranks(world, launch, raw, str(log), dies)
        except RankError as error:
            assert set(str(error).splitlines()) == {"rank 1: the process died"} and dies
        else:
            assert not dies and answers == ["trained"] * world
        by_rank, done = [noted(log, rank) for rank in range(world)], committed(tmp_path) - before
        steps += [[row for lines in by_rank for row in lines[step]] for step in range(done)]
        write(tmp_path / "log", [4 + number])
    assert [sorted(step) for step in steps] == [
        list(range(start, min(start + 32, stop)))
        for first, stop in ((0, 80), (80, 160), (160, 200), (200, 240))
        for start in range(first, stop, 32)
    ]
