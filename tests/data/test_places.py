"""How files are named, told from one another, and waited for; without any storage but a folder."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from rayrec.data import DataError, DataSet, DataUnavailable, FileChanged, WeightedDataSet, data_sets
from rayrec.data.mapping.problems import Problems
from rayrec.data.source.file_table import COLUMNS, FileTable, folders_of, join, ranges, split
from rayrec.data.source.footer_index import index_file
from rayrec.data.source.footers import _like
from rayrec.data.source.partitions import partitions_of
from rayrec.storage import parallel, parquet, retries
from rayrec.storage.files import format_of
from rayrec.storage.locations import Location, Server, locate, plain_path
from rayrec.storage.parquet import Version, open_parquet, read_footer
from rayrec.storage.retries import Patience, with_patience


@pytest.mark.parametrize(
    ("path", "index"),
    [
        ("/d/x", "/d/x/_rayrec_index.arrow"),
        ("/d/x/", "/d/x/_rayrec_index.arrow"),
        ("/d?/x", "/d?/x/_rayrec_index.arrow"),
        ("/d/x/*.parquet", "/d/x/_rayrec_index.arrow"),
        ("/d/day=[12]/*.parquet", "/d/_rayrec_index.arrow"),
        ("/d/*/[ab]", "/d/_rayrec_index.arrow"),
        ("s3://b/x?region=eu", "s3://b/x/_rayrec_index.arrow?region=eu"),
        ("s3://b/x/*?region=eu", "s3://b/x/_rayrec_index.arrow?region=eu"),
    ],
)
def test_where_the_index_of_a_folder_lies(path: str, index: str) -> None:
    assert index_file(path) == index


@pytest.mark.parametrize(
    ("uri", "folder", "name"),
    [
        ("/d/x.parquet", "/d/", "x.parquet"),
        ("/d?/x?y.parquet", "/d?/", "x?y.parquet"),
        ("x.parquet", "", "x.parquet"),
        ("s3://b/d/x.parquet?region=eu", "s3://b/d/?region=eu", "x.parquet"),
    ],
)
def test_a_path_is_taken_apart_and_joined(uri: str, folder: str, name: str) -> None:
    assert split(uri) == (folder, name) and join(folder, name) == uri


def test_folders_are_kept_once() -> None:
    uris = ["/a/1", "/b/2", "/a/3"]
    which, names, folders = folders_of(uris, [{"day": 1}, {"day": 2}, {"day": 1}])
    assert (which, names) == ([0, 1, 0], ["1", "2", "3"])
    assert folders == [("/a/", (("day", 1),)), ("/b/", (("day", 2),))]
    assert ranges(np.array([5, 0, 9]), np.array([7, 0, 10])).tolist() == [5, 6, 9]


def test_some_files_of_a_table() -> None:
    zeros = [np.zeros(3, np.int64)] * 4
    numbers = [[0, 1, 0], ["x", "y", "z"], *zeros, [0.0, 1.0, 2.0]]
    columns = pa.record_batch([*numbers, [None] * 3, [None] * 3], schema=COLUMNS)
    left_out = np.array([False, True, False, False, False, True])
    folders = (("/a/", ()), ("/b/", (("day", 2),)))
    table = FileTable(folders, columns, np.array([0, 2, 3, 6]), np.arange(10, 16), left_out)
    assert table.uris == [one.uri for one in table] == ["/a/x", "/b/y", "/a/z"]
    assert table.rows_before.tolist() == [0, 10, 21, 33, 46, 60, 75]
    some = table.select(np.array([2, 1]))
    assert list(some) == [table[2], table[1]] and some.uris == ["/a/z", "/b/y"]
    assert (some.offsets.tolist(), some.group_rows.tolist()) == ([0, 3, 4], [13, 14, 15, 12])
    assert some.left_out.tolist() == [False, False, True, False]
    assert [file.uri for file in table.take(np.array([1]))] == ["/b/y"] and table[-1].uri == "/a/z"
    assert table[1].partition == (("day", 2),) and table.select(np.array([1])).folders == folders[1:]
    for one, files, groups in ((table, 3, 6), (some, 2, 4)):
        assert one.nbytes == one.columns.nbytes + 8 * (files + 1) + 9 * groups + len("/a/" + "/b/")


def test_statistics_that_a_table_lacks_are_not_known() -> None:
    counts = pa.array([[5, 6], [], [7]])
    other = pa.table({"group_rows": counts, "low x": pa.array([[1, 2], [], [3]])})
    found = _like(pa.table({"group_rows": counts, "low x": pa.array([["a", "b"], [], ["c"]])}), other)
    assert found["low x"].to_pylist() == [[None, None], [], [None]] and found.schema == other.schema
    assert found["group_rows"].to_pylist() == counts.to_pylist() and _like(other, other).equals(other)


def test_all_data_sets_of_a_config() -> None:
    one, several = DataSet(path="p"), [WeightedDataSet(path="p"), WeightedDataSet(path="q")]
    assert data_sets(one) == [one] and data_sets(several) == several


def test_partitions_are_numbers_where_all_are() -> None:
    uris = ["/day=1/c=de/x", "/day=-02/c=7/x", "/day=__HIVE_DEFAULT_PARTITION__/x"]
    values, types = partitions_of(uris, None)
    assert types == {"day": pa.int64(), "c": pa.string()}
    assert values == [{"day": 1, "c": "de"}, {"day": -2, "c": "7"}, {"day": None}]
    assert partitions_of(uris, {"c"})[1] == {"c": pa.string()}
    assert partitions_of(["/=1/a b=1/x%3D=a%20b/n=__HIVE_DEFAULT_PARTITION__/y=1"], None) == (
        [{"a b": 1, "x=": "a b", "n": None}],
        {"a b": pa.int64(), "x=": pa.string(), "n": pa.string()},
    )
    assert partitions_of([f"/n={'9' * 18}/x"], None)[0] == [{"n": int("9" * 18)}]
    assert partitions_of([f"/n={'9' * 19}/x"], None)[0] == [{"n": "9" * 19}], "too large for int64"
    for text in ("١٢", "1_000", "+1", " 1", "1.0"):
        assert partitions_of([f"/n={text}/x"], None) == ([{"n": text}], {"n": pa.string()})
    with pytest.raises(DataError, match="two folders of the path are named n="):
        partitions_of(["/n=1/n=2/x"], None)


def test_formats_are_told_by_names() -> None:
    known = {"a.csv": "CSV", "a.TSV.gz": "TSV", "a.json.zst": "JSON lines", "a.avro": "Avro", "a.orc": "ORC"}
    assert {name: format_of(name) for name in known} == known
    assert [format_of(name) for name in ("a.avro.gz", "a.orc.bz2", "a.parquet", "a.csv?x", "csv")] == [None] * 5
    assert format_of("s3://b/a.csv?x=1") == "CSV"


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


def test_a_file_is_told_from_one_that_was_written_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "x.parquet")
    pq.write_table(pa.table({"n": [1, 2, 3]}), path)
    version = read_footer(path).version
    assert version.size_bytes == os.path.getsize(path) and version.changed_ns == os.stat(path).st_mtime_ns
    assert version.footer is not None and version.etag is None
    open_parquet(path, version).close()
    open_parquet(path, Version(version.size_bytes)).close()
    assert version.changed_ns is not None
    for change, what in (
        ({"size_bytes": version.size_bytes + 1}, "bytes now"),
        ({"footer": version.footer + 1}, "another footer"),
        ({"changed_ns": version.changed_ns + 10**9}, "another time of change"),
    ):
        with pytest.raises(FileChanged, match=what):
            open_parquet(path, dataclasses.replace(version, **change))
    open_parquet(path, dataclasses.replace(version, etag=5)).close()  # a disk has none
    monkeypatch.setattr(parquet, "_TAIL_BYTES", 10)  # the footer is longer
    assert read_footer(path).version == version
    needed = read_footer(path).metadata.serialized_size + 8
    for size in (needed - 1, needed, needed + 1):
        monkeypatch.setattr(parquet, "_TAIL_BYTES", size)
        assert read_footer(path).metadata.num_rows == 3
    for wrong in (b"", b"PAR1", b"\x00" * 9 + b"PAR1", (10**6).to_bytes(4, "little") + b"PAR1"):
        (tmp_path / "wrong").write_bytes(wrong)
        with pytest.raises(DataError, match="not readable as Parquet"):
            read_footer(str(tmp_path / "wrong"))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (5_000_000_001, 5_000_000_001, True),
        (5_000_000_001, 5_000_000_002, False),
        (5_000_000_000, 5_000_000_002, True),  # in seconds on one node
        (5_999_999_999, 5_000_000_000, True),
        (5_000_000_000, 6_000_000_000, False),
        (6_000_000_000, 5_999_999_999, False),
    ],
)
def test_times_of_change_may_be_seen_in_seconds(one: int, other: int, same: bool) -> None:
    found, expected = Version(1, one, 7, 8), Version(1, other, 7, 8)
    assert (parquet._difference(found, expected) is None) is same
    assert parquet._difference(found, dataclasses.replace(expected, changed_ns=None)) is None
    assert parquet._difference(found, Version(1, one, 7, 9)) == "another ETag"
    assert parquet._difference(found, Version(1, one, 7, None)) is None


class Storage:
    """Fails so many times, and answers or not; time goes by as it is slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: int, answers: bool | list[bool]) -> None:
        self.left, self.waits, self.now = fails, list[float](), 1000.0
        self.answers = answers if isinstance(answers, list) else [answers] * 99
        monkeypatch.setattr(retries, "_answers", lambda uri: self.answers.pop(0))
        monkeypatch.setattr(retries.time, "sleep", self.sleep)
        monkeypatch.setattr(retries.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(retries.random, "uniform", lambda low, high: high)

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def read(self) -> int:
        self.left -= 1
        if self.left >= 0:
            raise DataError("read") from OSError("reset")
        return 7


def test_reads_are_tried_again_after_waits_that_double(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(monkeypatch, 3, True)
    assert with_patience(storage.read, "u", Patience(retries=3)) == 7 and storage.waits == [0.25, 0.5, 1.0]
    storage = Storage(monkeypatch, 4, True)
    with pytest.raises(DataError, match="read"):
        with_patience(storage.read, "u", Patience(retries=3))
    assert storage.waits == [0.25, 0.5, 1.0]
    storage = Storage(monkeypatch, 99, False)
    with pytest.raises(DataUnavailable, match="has not answered for 9 s") as caught:
        with_patience(storage.read, "u", Patience(retries=0, outage_s=9.0))
    assert storage.waits == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0] and caught.value.file == "u"
    storage = Storage(monkeypatch, 5, [True, False, False, True, True])  # an answer ends the outage
    assert with_patience(storage.read, "u", Patience(retries=3, outage_s=0.6)) == 7
    storage = Storage(monkeypatch, 99, False)
    with pytest.raises(DataUnavailable):
        with_patience(storage.read, "u", Patience(outage_s=0.0))
    assert not storage.waits


@pytest.mark.parametrize("cause", [None, FileNotFoundError("gone"), ValueError("bad")])
def test_what_does_not_pass_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, cause: Exception | None) -> None:
    storage, calls = Storage(monkeypatch, 0, True), []

    def read() -> None:
        calls.append(1)
        raise DataError("wrong") from cause

    with pytest.raises(DataError, match="wrong"):
        with_patience(read, "u", Patience())
    assert len(calls) == 1 and not storage.waits


def test_whether_storage_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert retries._answers(str(tmp_path / "nothing")) and not retries._answers("nofs://h/y")

    def away(uri: str) -> tuple[pafs.FileSystem, str]:
        raise OSError("away")

    monkeypatch.setattr(retries, "open_filesystem", away)
    assert not retries._answers("u")


def test_work_is_begun_ahead_and_its_results_come_in_order() -> None:
    begun: list[int] = []

    def begin(item: int):  # type: ignore[no-untyped-def]
        begun.append(item)
        return lambda: (item, len(begun))

    assert list(parallel._ahead(begin, range(5), 3)) == [(0, 3), (1, 4), (2, 5), (3, 5), (4, 5)]
    begun.clear()
    assert list(parallel._ahead(begin, range(1), 3)) == [(0, 1)]


class InAFile:
    """Rows lie in one row group, the third, from its row 100 on."""

    def locate(self, row: int) -> tuple[str, int, int]:
        return "x.parquet", 2, 100 + row


@pytest.mark.parametrize("redact", [False, True])
def test_problems_are_told_by_row(redact: bool) -> None:
    problems = Problems(InAFile(), redact)
    assert not problems and problems.rows().tolist() == [] and not problems.reasons()
    problems.add(np.array([4, 1]), "c", "a problem", "mend it", lambda k: f"value {k}")
    problems.add(np.array([], np.int64), "c", "none", "")
    problems.add_error(np.array([1, 7]), DataError("gone", file="y.parquet"))
    assert problems and problems.rows().tolist() == [1, 4, 7]
    assert problems.reasons() == {"a problem": 2, "gone (y.parquet)": 2}
    assert problems.error(1).to_dict() == {
        "problem": "a problem",
        "file": "x.parquet",
        "row_group": 2,
        "row": 101,
        "column": "c",
        "value": "(redacted)" if redact else "value 1",
        "fix": "mend it",
    }
    assert problems.error(7).file == "y.parquet"


def test_an_error_names_only_the_places_that_are_known() -> None:
    assert str(DataError("p")) == "p"
    assert str(DataError("p", row=0, fix="f")) == "p (row 0); fix: f"
    whole = DataError("p", file="x", row_group=0, row=1, column="c", value="v")
    assert str(whole) == "p (file x, row group 0, row 1, column 'c', value v)"


def test_waits_are_at_least_half_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(monkeypatch, 3, True)
    monkeypatch.setattr(retries.random, "uniform", lambda low, high: low)
    assert with_patience(storage.read, "u", Patience(retries=3)) == 7 and storage.waits == [0.125, 0.25, 0.5]


def test_without_ray_work_is_done_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert list(parallel.each(lambda number: (os.getpid(), number), range(3))) == [(os.getpid(), n) for n in range(3)]
    assert "ray" not in sys.modules
