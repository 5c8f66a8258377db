"""How files are named, told from one another, and waited for; without any storage but a folder."""

from __future__ import annotations

import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import (
    Cursor,
    DataError,
    DataSet,
    DataUnavailable,
    FileChanged,
    Manifest,
    Schema,
    WeightedDataSet,
    data_sets,
    write_index,
)
from rayrec.storage import parallel, retries
from rayrec.storage.locations import Location, Server, locate, plain_path
from tests.data.sets import SCHEMA, write
from tests.data.test_stream import stream


def test_all_data_sets_of_a_config() -> None:
    one, several = DataSet(path="p"), [WeightedDataSet(path="p"), WeightedDataSet(path="q")]
    assert data_sets(one) == [one] and data_sets(several) == several


def partitions_of(top: Path, *folders: str) -> tuple[list[dict[str, Any]], dict[str, pa.DataType]]:
    """The values of folders, by file, and their types."""
    for folder in folders:
        (top / folder).mkdir(parents=True)
        pq.write_table(pa.table({"label": [1], "row": [1]}), top / folder / "x.parquet")
    names = {part.partition("=")[0] for folder in folders for part in folder.split("/")}
    names = {unquote(name) for name in names}
    hashed: dict[str, Any] = {"mapping": {"kind": "hash"}, "on_null": "empty"}
    sparse = [{"name": f"f{number}", "column": name, **hashed} for number, name in enumerate(sorted(names))]
    manifest = Manifest.read(str(top), Schema.model_validate({"sparse": sparse}))
    types = {name: kind for name, kind in manifest.columns if name in names}
    return [dict(file.partition) for file in manifest.files], types


def test_partitions_are_numbers_where_all_are(tmp_path: Path) -> None:
    names = ("day=-02/c=7", "day=1/c=de", "day=__HIVE_DEFAULT_PARTITION__/c=x")
    values, types = partitions_of(tmp_path / "days", *names)
    assert types == {"day": pa.int64(), "c": pa.string()}
    assert values == [{"day": -2, "c": "7"}, {"day": 1, "c": "de"}, {"day": None, "c": "x"}]
    assert partitions_of(tmp_path / "odd", "a b=1/x%3D=a%20b/n=__HIVE_DEFAULT_PARTITION__") == (
        [{"a b": 1, "x=": "a b", "n": None}],
        {"a b": pa.int64(), "x=": pa.string(), "n": pa.string()},
    )
    assert partitions_of(tmp_path / "large", f"n={'9' * 18}")[0] == [{"n": int("9" * 18)}]
    for number, text in enumerate(("9" * 19, "١٢", "1_000", "+1", " 1", "1.0")):  # the first is too large for int64
        assert partitions_of(tmp_path / f"text {number}", f"n={text}") == ([{"n": text}], {"n": pa.string()})
    with pytest.raises(DataError, match="two folders of the path are named n="):
        partitions_of(tmp_path / "twice", "n=1/n=2")


def test_question_marks_of_local_names_are_no_options(tmp_path: Path) -> None:
    folder = write(tmp_path / "d?1", [5])
    (folder / "part-000.parquet").rename(folder / "x?y.parquet")
    (file,) = Manifest.read(str(folder), SCHEMA).files
    assert file.uri == f"{folder}/x?y.parquet"
    write_index([str(folder)])
    assert sorted(path.name for path in folder.iterdir()) == ["_rayrec_index.arrow", "x?y.parquet"]


def test_paths_and_uris(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    place = locate(f"file://{tmp_path}/a%20b/")
    assert (place.path, place.bucket) == (f"{tmp_path}/a b", None)
    assert place.uri_of(f"{tmp_path}/a b/x?y.parquet") == f"file://{tmp_path}/a%20b/x%3Fy.parquet"
    with_options = Location("", place.filesystem, "", "s3://b", "b", "region=eu")
    assert with_options.uri_of("b/d/x") == "s3://b/d/x?region=eu"
    assert locate("~/x").path == str(Path.home() / "x") and locate("x").path == f"{Path.cwd()}/x"
    assert locate("/d/x").uri_of("/other") == "/other"
    assert plain_path("s3://b/a%20b?region=eu") == "s3://b/a b" and plain_path("/a%20b?c") == "/a%20b?c"
    for uri, fix in (("hdfs:x://h/y", "s3://"), ("nofs://h/y", "s3://"), ("viewfs://h/y", "libhdfs")):
        with pytest.raises(DataError, match="cannot open this file system") as caught:
            locate(uri)
        assert fix in str(caught.value.fix)


def test_which_server_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    assert Server.of("s3://b/x") == Server(None, None) and Server.of("s3://b/x").options() == ""
    given = Server.of("s3://b/x?endpoint_override=h:9&scheme=http&region=eu")
    assert given == Server("http://h:9", "eu")
    assert given.options() == "endpoint_override=h:9&scheme=http&region=eu"
    assert given.for_delta() == {"AWS_ENDPOINT_URL": "http://h:9", "AWS_REGION": "eu", "AWS_ALLOW_HTTP": "true"}
    assert given.for_iceberg() == {"s3.endpoint": "http://h:9", "s3.region": "eu"}
    assert Server.of("s3://b?endpoint_override=h") == Server("https://h", "us-east-1")
    assert Server.of("s3://b?endpoint_override=h", "http://other", "us") == Server("http://other", "us")
    assert "AWS_ALLOW_HTTP" not in Server("https://h").for_delta()
    monkeypatch.setenv("AWS_DEFAULT_REGION", "d")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://e")
    assert Server.of("s3://b") == Server("http://e", "d")
    monkeypatch.setenv("AWS_REGION", "r")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3")
    assert Server.of("s3://b") == Server("http://s3", "r")
    assert Server.of("s3://b?region=u&endpoint_override=h") == Server("https://h", "u")


def test_a_footer_may_be_longer_than_what_is_read_first(tmp_path: Path) -> None:
    columns = {f"a column with a long name, number {number}": [1, 2, 3] for number in range(1500)}
    pq.write_table(pa.table({"label": [0, 1, 0], "row": [0, 1, 2], **columns}), tmp_path / "x.parquet")
    assert pq.read_metadata(tmp_path / "x.parquet").serialized_size > 256 << 10
    assert Manifest.read(str(tmp_path), Schema.model_validate({"sparse": [{"name": "row"}]})).rows == 3
    for wrong in (b"PAR1", b"\x00" * 9 + b"PAR1", (10**6).to_bytes(4, "little") + b"PAR1"):
        (tmp_path / "x.parquet").write_bytes(wrong)
        with pytest.raises(DataError, match="not readable as Parquet"):
            Manifest.read(str(tmp_path), SCHEMA)


@pytest.mark.parametrize(
    ("then_ns", "now_ns", "same"),
    [
        (5_000_000_001, 5_000_000_001, True),
        (5_000_000_001, 5_000_000_002, False),
        (5_000_000_000, 5_000_000_002, True),  # in seconds on one node
        (5_999_999_999, 5_000_000_000, True),
        (5_000_000_000, 6_000_000_000, False),
        (6_000_000_000, 5_999_999_999, False),
    ],
)
def test_times_of_change_may_be_seen_in_seconds(tmp_path: Path, then_ns: int, now_ns: int, same: bool) -> None:
    file = write(tmp_path, [20]) / "part-000.parquet"
    os.utime(file, ns=(then_ns, then_ns))
    manifest = Manifest.read(str(tmp_path), SCHEMA)
    os.utime(file, ns=(now_ns, now_ns))
    with stream(manifest, Cursor.start(0), 0, 1) as batches:
        if same:
            assert sum(batch.rows for batch, _ in batches) == 20
        else:
            with pytest.raises(FileChanged, match="another time of change"):
                next(batches)


AWAY = "nofs://storage/x"  # no storage answers there


class Failing:
    """Work that fails so many times."""

    def __init__(self, times: int, cause: Exception | None = None) -> None:
        self.left, self.calls, self.cause = times, 0, cause or OSError("reset")

    def __call__(self) -> int:
        self.left, self.calls = self.left - 1, self.calls + 1
        if self.left >= 0:
            raise DataError("read") from self.cause
        return 7


def test_reads_are_tried_again_while_their_storage_answers(tmp_path: Path) -> None:
    work = Failing(2)
    assert retries.with_patience(work, str(tmp_path / "x"), retries.Patience(retries=2)) == 7 and work.calls == 3
    work = Failing(2)
    with pytest.raises(DataError, match="read"):
        retries.with_patience(work, str(tmp_path), retries.Patience(retries=1, outage_s=60.0))
    assert work.calls == 2


def test_storage_that_does_not_answer_is_waited_for(tmp_path: Path) -> None:
    assert retries.with_patience(Failing(2), AWAY, retries.Patience(retries=0, outage_s=60.0)) == 7
    for outage_s, calls in ((0.2, 3), (0.0, 1)):
        work = Failing(99)
        with pytest.raises(DataUnavailable, match=f"has not answered for {outage_s:g} s") as caught:
            retries.with_patience(work, AWAY, retries.Patience(retries=0, outage_s=outage_s))
        assert work.calls <= calls and caught.value.file == AWAY


def test_waits_double_up_to_a_limit() -> None:
    assert list(islice(retries.waits_s(), 6)) == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0]


@pytest.mark.parametrize("cause", [FileNotFoundError("gone"), ValueError("bad")])
def test_what_does_not_pass_is_not_tried_again(tmp_path: Path, cause: Exception) -> None:
    work = Failing(1, cause)
    with pytest.raises(DataError, match="read"):
        retries.with_patience(work, str(tmp_path), retries.Patience())
    assert work.calls == 1


def test_an_error_names_only_the_places_that_are_known() -> None:
    assert str(DataError("p")) == "p"
    assert str(DataError("p", row=0, fix="f")) == "p (row 0); fix: f"
    whole = DataError("p", file="x", row_group=0, row=1, column="c", value="v")
    assert str(whole) == "p (file x, row group 0, row 1, column 'c', value v)"


def test_without_ray_work_is_done_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert list(parallel.each(lambda number: (os.getpid(), number), range(3))) == [(os.getpid(), n) for n in range(3)]
    assert "ray" not in sys.modules
