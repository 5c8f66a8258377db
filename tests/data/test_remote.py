"""Object storage: a local S3 server, from globs and footers to batches through Ray; what is missing is named."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from rayrec.data import (
    BadRows,
    Cursor,
    DataError,
    Manifest,
    ReadOptions,
    convert,
    count_column,
    inspect,
)
from rayrec.storage import files, locate
from rayrec.train import Display, Trainer, parse_config
from tests.data.sets import SCHEMA, table
from tests.data.test_stream import LOCAL, RAY, row_ids, same, stream
from tests.s3 import Door
from tests.train import small


@pytest.fixture(scope="module")
def uri(server: str) -> str:
    """A data set of two days, the second one with a blank and a percent sign in its name."""
    options = f"?endpoint_override={server}&scheme=http&region=us-east-1&allow_bucket_creation=true"
    filesystem, _ = pafs.FileSystem.from_uri(f"s3://clicks{options}")
    filesystem.create_dir("clicks")
    first = 0
    for day in ("day=1", "day=2/place=a%20b c"):
        for number in range(2):
            name = f"clicks/train set/{day}/part-{number}.parquet"
            pq.write_table(table(150, first), name, filesystem=filesystem, row_group_size=60)
            first += 150
    return f"s3://clicks/train%20set{options}"


def at(uri: str, path: str) -> str:
    """Another path with the options of `uri`."""
    return path + "?" + uri.partition("?")[2]


def test_every_row_through_ray_from_s3(uri: str, running_ray: None) -> None:
    manifest = Manifest.read(uri, SCHEMA, window_rows=130)
    assert manifest.rows == 600
    assert [unquote(f.uri.partition("?")[0]).removeprefix("s3://clicks/train set/") for f in manifest.files] == [
        "day=1/part-0.parquet",
        "day=1/part-1.parquet",
        "day=2/place=a%20b c/part-0.parquet",
        "day=2/place=a%20b c/part-1.parquet",
    ]
    ids = []
    for rank in range(2):
        with stream(manifest, Cursor.start(0), rank, 2, options=RAY) as through_ray:
            found = list(through_ray)
        with stream(manifest, Cursor.start(0), rank, 2, options=LOCAL) as local:
            assert all(same(a, b) for (a, _), (b, _) in zip(found, local, strict=True))
        ids += row_ids([b for b, _ in found])
    assert sorted(ids) == list(range(600))


def test_globs_filters_and_single_files_on_s3(uri: str, tmp_path: Path) -> None:
    assert Manifest.read(uri, SCHEMA, filters=[("day", "=", 2), ("row", ">=", 450)]).rows == 150
    assert Manifest.read(at(uri, "s3://clicks/train set/*/part-*.parquet"), SCHEMA).rows == 300
    assert Manifest.read(at(uri, "s3://clicks/**/*.parquet"), SCHEMA).rows == 600
    one = at(uri, "s3://clicks/train%20set/day=2/place=a%2520b%20c/part-1.parquet")
    assert Manifest.read(one, SCHEMA).rows == 150
    assert inspect(one).rows == 150
    count_column(one, "row", tmp_path / "words.parquet", filters=[("row", "<", 460)])
    assert pq.read_table(tmp_path / "words.parquet")["id"].to_pylist() == list(range(450, 460))


def test_keys_and_endpoint_may_come_from_the_environment(
    uri: str, server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{server}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    assert Manifest.read("s3://clicks/train%20set/day=1", SCHEMA).rows == 300
    filesystem, _ = pafs.FileSystem.from_uri(uri)
    with filesystem.open_output_stream("clicks/logs/x.csv") as file:
        file.write(b"label,user\n1,7\n0,9\n")
    assert [done.rows for done in convert("s3://clicks/logs", tmp_path / "out")] == [2]


def test_a_run_trains_and_evaluates_on_s3(uri: str, tmp_path: Path) -> None:
    filesystem, _ = pafs.FileSystem.from_uri(uri)
    for day in (1, 2):
        path = f"clicks/small/day={day}/x.parquet"
        pq.write_table(small.table(300, seed=day), path, filesystem=filesystem, row_group_size=100)
    sets = {
        part: {"path": at(uri, "s3://clicks/small"), "filters": [["day", "=", day]]}
        for part, day in (("train", 1), ("eval", 2))
    }
    raw = small.raw_config(tmp_path, data={**sets, "read": {"reader": "local"}}, trainer__epochs=1)
    result = Trainer(parse_config(raw), display=Display(Console(file=io.StringIO()))).fit()
    assert result.eval is not None
    assert (result.train["samples"], result.eval["samples"]) == (300, 300)


def outage(
    uri: str, server: str, reader: str, policy: Literal["error", "skip"], seconds: float
) -> tuple[list[int], int]:
    """The rows of an epoch in whose midst the storage is away, and how many were skipped."""
    door = Door(server)
    remote = uri.replace(server, door.address)
    manifest = Manifest.read(remote, SCHEMA, window_rows=30)
    options = ReadOptions(
        reader=reader,  # type: ignore[arg-type]
        prefetch_batches=1,
        concurrent_reads=1,
        bad_rows=BadRows(policy=policy),
    )
    ids: list[int] = []
    with stream(manifest, Cursor.start(0), 0, 1, options=options, batch_rows=20) as batches:
        for number, (batch, _) in enumerate(batches):
            ids += batch.sparse["row"].values().tolist()
            if number == 2:
                door.shut()
                threading.Timer(seconds, door.reopen).start()
        door.shut()
        return ids, batches.skipped.count


def test_a_listing_is_tried_again_and_finds_files_however_deep_they_lie(uri: str, tmp_path: Path) -> None:
    remote = locate(uri)
    looks = iter([OSError("SlowDown"), OSError("SlowDown")])

    class Busy:  # a file system that its storage refuses at first
        def get_file_info(self, wanted: pafs.FileSelector) -> list[pafs.FileInfo]:
            for error in looks:
                raise error
            found: list[pafs.FileInfo] = remote.filesystem.get_file_info(wanted)
            return found

    place = replace(remote, filesystem=Busy())  # type: ignore[arg-type]
    assert [info.path for info in files._below(place, place.path)] == [
        "clicks/train set/day=1/part-0.parquet",
        "clicks/train set/day=1/part-1.parquet",
        "clicks/train set/day=2/place=a%20b c/part-0.parquet",
        "clicks/train set/day=2/place=a%20b c/part-1.parquet",
    ]
    assert next(looks, None) is None
    wanted = []
    for number in range(40):  # more folders of one level than are listed at once, and some alone
        folder = tmp_path / ("narrow/" * (number % 5) + f"wide={number % 20}") / "x" / str(number)
        folder.mkdir(parents=True)
        (folder / "a.parquet").touch()
        wanted.append(str(folder / "a.parquet"))
    assert [file.uri for file in files.find_files(str(tmp_path))] == sorted(wanted)


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_an_outage_is_waited_for(uri: str, server: str, policy: Literal["error", "skip"]) -> None:
    ids, skipped = outage(uri, server, "local", policy, 2.0)
    assert sorted(ids) == list(range(600)) and skipped == 0


def test_auto_reads_on_ray_what_is_not_on_a_disk(
    uri: str, running_ray: None, auto_reader: Callable[..., None], on_ray: list[Any]
) -> None:
    """With any number of cores: a thread would wait for one answer at a time."""
    auto_reader(100, 3)
    manifest = Manifest.read(uri, SCHEMA, window_rows=100)
    with stream(manifest, Cursor.start(0), 0, 1, options=ReadOptions()) as batches:
        ids = row_ids([batch for batch, _ in batches])
    assert sorted(ids) == list(range(600)) and on_ray


@pytest.mark.long
def test_an_outage_of_10_s_costs_no_row(uri: str, server: str, running_ray: None) -> None:
    """Of either reader, under either policy; all at once, as it is waiting."""
    cases: list[tuple[str, Literal["error", "skip"]]] = [
        ("ray", "error"), ("ray", "skip"), ("local", "error"), ("local", "skip"),
    ]  # fmt: skip
    started = time.monotonic()
    with ThreadPoolExecutor(len(cases)) as pool:
        ended = list(pool.map(lambda case: outage(uri, server, *case, 10.0), cases))
    for case, (ids, skipped) in zip(cases, ended, strict=True):
        assert sorted(ids) == list(range(600)) and skipped == 0, case
    assert time.monotonic() - started > 10


def test_a_file_that_changes_or_goes_is_noticed(uri: str) -> None:
    filesystem, _ = pafs.FileSystem.from_uri(uri)
    names = [f"clicks/changing/{n}.parquet" for n in "ab"]
    for name in names:
        pq.write_table(table(100), name, filesystem=filesystem)
    manifest = Manifest.read(at(uri, "s3://clicks/changing"), SCHEMA)
    pq.write_table(table(101), names[0], filesystem=filesystem)
    with (
        stream(manifest, Cursor.start(0), 0, 1, shuffle=False) as batches,
        pytest.raises(DataError, match="changed while the run was going on") as caught,
    ):
        list(batches)
    assert caught.value.file == manifest.files[0].uri
    pq.write_table(table(100), names[0], filesystem=filesystem)
    filesystem.delete_file(names[1])
    with (
        stream(manifest, Cursor.start(0), 0, 1, shuffle=False) as batches,
        pytest.raises(DataError, match="the file is gone") as caught,
    ):
        list(batches)
    assert caught.value.file == manifest.files[1].uri


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://nowhere/x", "the bucket 'nowhere' does not exist .* region, endpoint and credentials"),
        ("s3://nowhere/*.parquet", "the bucket 'nowhere' does not exist"),
        ("s3://clicks/nothing", "the path does not exist"),
        ("s3://clicks/train%20set/a%20b", "in a URI, write a % in a name as %25"),
        ("s3://clicks/train%20set/*.csv", "the pattern matches no file"),
    ],
)
def test_what_is_missing_on_s3_is_named(uri: str, path: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        Manifest.read(at(uri, path), SCHEMA)
    assert caught.value.file == at(uri, path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hdfs://namenode:8020/clicks", r"cannot open this file system: .* JAVA_HOME, HADOOP_HOME"),
        ("s3://clicks/x?endpoint=here", r"Unexpected query parameter .*'endpoint'"),
        ("ftp://host/x", r"Unrecognized filesystem type .* s3://, gs:// or hdfs://"),
    ],
)
def test_file_systems_that_cannot_be_opened(path: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.startswith("hdfs") and "HADOOP_HOME" in os.environ:
        pytest.skip("Hadoop is here")
    with pytest.raises(DataError, match=message) as caught:
        Manifest.read(path, SCHEMA)
    assert caught.value.file == path


def test_a_pyarrow_without_google_cloud_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(uri: str) -> None:
        raise pa.ArrowNotImplementedError("Got GCS URI but Arrow compiled without GCS support")

    class Old:
        from_uri = staticmethod(refuse)

    monkeypatch.setattr(pafs, "FileSystem", Old)
    with pytest.raises(DataError, match=r"without GCS support .* as the wheels of PyPI are"):
        locate("gs://a-bucket-of-this-test-alone/x")
