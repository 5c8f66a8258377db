"""Footers kept for a relaunch, or for everybody: only new and changed files are read, a damaged index is no index."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import FooterIndex, FooterReading, Manifest
from rayrec.data.source import footers
from rayrec.data.source.footers import read_footers
from rayrec.data.source.lake import TableFiles
from rayrec.storage.files import NEVER, Found, find_files
from rayrec.storage.parquet import Footer
from tests.data.sets import SCHEMA, table, write

Read = Callable[[], Manifest]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose footers were read from the files themselves."""
    names: list[str] = []

    def spy(uri: str) -> Footer:
        names.append(Path(uri).name)
        return read_footer(uri)

    read_footer = footers.read_footer
    monkeypatch.setattr(footers, "read_footer", spy)
    return names


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """The manifest of three files, as a run that is started makes it."""
    write(tmp_path / "set", [50, 60, 70])

    def relaunch() -> Manifest:
        index = FooterIndex.open(tmp_path / "footers.arrow")
        manifest = Manifest.read(str(tmp_path / "set"), SCHEMA, reading=FooterReading(index))
        index.save()
        return manifest

    return relaunch


def test_a_relaunch_reads_no_footer(read: Read, opened: list[str], tmp_path: Path) -> None:
    first = read().fingerprint
    assert sorted(set(opened)) == ["part-000.parquet", "part-001.parquet", "part-002.parquet"]
    written = (tmp_path / "footers.arrow").stat().st_mtime_ns
    opened.clear()
    assert read().fingerprint == first and not opened
    assert Manifest.read(str(tmp_path / "set"), SCHEMA).fingerprint == first
    assert (tmp_path / "footers.arrow").stat().st_mtime_ns == written, "nothing new, nothing written"


def test_new_and_changed_files_are_noticed_and_lost_ones_forgotten(
    read: Read, opened: list[str], tmp_path: Path
) -> None:
    read()
    opened.clear()
    pq.write_table(table(65), tmp_path / "set" / "part-001.parquet")
    pq.write_table(table(5), tmp_path / "set" / "part-003.parquet")
    (tmp_path / "set" / "part-002.parquet").unlink()
    assert read().rows == 50 + 65 + 5
    assert sorted(set(opened)) == ["part-001.parquet", "part-003.parquet"]
    opened.clear()
    assert read().rows == 120 and not opened, "what was known before and is still there stays in the index"
    same_size = tmp_path / "set" / "part-000.parquet"
    os.utime(same_size, ns=(0, same_size.stat().st_mtime_ns + 1_000_000))
    assert read().rows == 120
    assert set(opened) == {"part-000.parquet"}, "the same number of bytes, but another time"


@pytest.mark.parametrize("damage", [b"", b"ARROW1 and no more", None, "columns"])
def test_a_damaged_cache_is_read_anew(
    read: Read, opened: list[str], tmp_path: Path, damage: bytes | str | None
) -> None:
    first, path = read().fingerprint, tmp_path / "footers.arrow"
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    elif damage is None:
        path.write_bytes(path.read_bytes()[:-200])
    else:
        with pa.ipc.new_file(str(path), (other := table(3)).schema) as writer:
            writer.write_table(other)
    opened.clear()
    assert read().fingerprint == first
    assert len(set(opened)) == 3
    opened.clear()
    assert read().fingerprint == first and not opened


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    write(tmp_path / "set", [50])
    nowhere = FooterIndex.open(tmp_path / "no such folder" / "footers.arrow")
    assert Manifest.read(str(tmp_path / "set"), SCHEMA, reading=FooterReading(nowhere)).rows == 50
    nowhere.save()
    assert not (tmp_path / "no such folder").exists()


def test_an_index_that_cannot_take_its_place_leaves_nothing_half_written(tmp_path: Path) -> None:
    write(tmp_path / "set", [50])
    taken = tmp_path / "kept" / "footers.arrow"
    taken.mkdir(parents=True)
    index = FooterIndex.open(taken)
    Manifest.read(str(tmp_path / "set"), SCHEMA, reading=FooterReading(index))
    assert index.save() is False
    assert [path.name for path in taken.parent.iterdir()] == ["footers.arrow"]


def test_two_that_write_one_index_do_not_share_a_half_written_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "set", [50])
    halves: list[set[str]] = []
    for _ in range(2):
        index = FooterIndex.open(tmp_path / "footers.arrow")
        Manifest.read(str(tmp_path / "set"), SCHEMA, reading=FooterReading(index))
        with monkeypatch.context() as patch:
            patch.setattr("rayrec.storage.folder.os.replace", lambda one, _: halves.append({one.name}))
            index.save()
    assert len(set.union(*halves)) == 2


def test_files_of_a_table_never_change_and_are_known_by_their_size(tmp_path: Path, opened: list[str]) -> None:
    (file,) = find_files(str(write(tmp_path / "set", [50])))
    found = Found(file.uri, file.size_bytes, NEVER)
    index = FooterIndex.open(tmp_path / "footers.arrow")
    Manifest.read(TableFiles((found,), hive=False), SCHEMA, reading=FooterReading(index))
    assert index.save() and opened
    opened.clear()
    again = FooterIndex.open(tmp_path / "footers.arrow")
    assert Manifest.read(TableFiles((found,), hive=False), SCHEMA, reading=FooterReading(again)).rows == 50
    assert not opened
    assert not len(FooterIndex.open(tmp_path / "footers.arrow").known([replace(found, size_bytes=1)], ())[0])
    assert not len(FooterIndex.open(tmp_path / "footers.arrow").known([file], ())[0]), "a file of a folder may change"


def names_in(index: Path) -> list[str]:
    with pa.ipc.open_file(str(index)) as reader:
        return sorted(reader.read_all()["name"].to_pylist())


def test_an_index_keeps_what_was_asked_for_and_all_where_nothing_was(read: Read, tmp_path: Path) -> None:
    read()
    path = tmp_path / "footers.arrow"
    assert FooterIndex.open(path).save() is True
    assert names_in(path) == ["part-000.parquet", "part-001.parquet", "part-002.parquet"], "nothing was asked for"
    (tmp_path / "set" / "part-001.parquet").unlink()
    assert read().rows == 120 and names_in(path) == ["part-000.parquet", "part-002.parquet"], "one is lost, none is new"


def test_a_file_whose_time_is_not_known_is_not_kept(read: Read, tmp_path: Path) -> None:
    read()
    files = find_files(str(tmp_path / "set"))
    timeless = [Found(files[0].uri, files[0].size_bytes, None), *files[1:]]
    index = FooterIndex.open(tmp_path / "other.arrow")
    assert read_footers(timeless, (), FooterReading(index)).num_rows == 3
    assert index.save() is True
    assert names_in(tmp_path / "other.arrow") == ["part-001.parquet", "part-002.parquet"]
    places, facts = FooterIndex.open(tmp_path / "other.arrow").known(timeless, ())
    assert places.tolist() == [1, 2] and facts["group_rows"].to_pylist() == [[60], [70]]
    places, facts = FooterIndex.open(tmp_path / "footers.arrow").known(timeless[::-1], ())
    assert places.tolist() == [0, 1] and facts["group_rows"].to_pylist() == [[70], [60]]


def test_one_index_is_asked_after_the_other(tmp_path: Path, opened: list[str]) -> None:
    """The second knows what the first does not; what both know counts once."""
    write(tmp_path / "set", [50, 60, 70, 80])
    files = find_files(str(tmp_path / "set"))
    for name, some in (("a", files[:2]), ("b", files[1:3])):
        index = FooterIndex.open(tmp_path / name)
        read_footers(some, (), FooterReading(index))
        index.save()
    opened.clear()
    both = FooterIndex.open(tmp_path / "a", [str(tmp_path / "b")])
    assert read_footers(files, (), FooterReading(both))["group_rows"].to_pylist() == [[50], [60], [70], [80]]
    assert set(opened) == {"part-003.parquet"}


@pytest.mark.parametrize(("most", "connected"), [(3, 0), (2, 1)])
def test_ray_is_connected_for_more_files_than_a_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, connected: int
) -> None:
    monkeypatch.setattr(footers, "FILES_FOR_RAY", most)
    write(tmp_path / "set", [50, 60, 70])
    inside: list[bool] = []

    @contextmanager
    def connect() -> Iterator[None]:
        inside.append(True)
        yield

    assert Manifest.read(str(tmp_path / "set"), SCHEMA, reading=FooterReading(connect=connect)).rows == 180
    assert len(inside) == connected


def test_options_of_a_uri_do_not_matter_to_an_index_and_names_of_paths_do(tmp_path: Path) -> None:
    (file,) = find_files(str(write(tmp_path / "set", [50])))
    facts = read_footers([file], (), FooterReading())

    def named(uri: str) -> Found:
        return Found(uri, file.size_bytes, file.changed_ns)

    index = FooterIndex.open(tmp_path / "x.arrow")
    for uri in ("s3://b/d/x?region=eu", "/d?1/x"):
        index.add([named(uri)], facts)
    assert index.save()
    asked = [named(uri) for uri in ("/d?2/x", "s3://b/d/x?region=us", "s3://b/d/y?region=eu", "/d?1/x")]
    assert sorted(FooterIndex.open(tmp_path / "x.arrow").known(asked, ())[0].tolist()) == [1, 3]
