"""Footers kept for a relaunch, or for everybody: only new and changed files are read, a damaged index is no index."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import FooterIndex, FooterReading, Manifest
from rayrec.data.source import lake
from rayrec.storage.files import NEVER, Found, find_files
from tests.data.sets import SCHEMA, table, write

Read = Callable[[], Manifest]


def names(uris: list[str]) -> list[str]:
    return sorted({Path(uri).name for uri in uris})


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
    assert names(opened) == ["part-000.parquet", "part-001.parquet", "part-002.parquet"]
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
    assert names(opened) == ["part-001.parquet", "part-003.parquet"]
    opened.clear()
    assert read().rows == 120 and not opened, "what was known before and is still there stays in the index"
    same_size = tmp_path / "set" / "part-000.parquet"
    os.utime(same_size, ns=(0, same_size.stat().st_mtime_ns + 1_000_000))
    assert read().rows == 120
    assert names(opened) == ["part-000.parquet"], "the same number of bytes, but another time"


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
    assert len(names(opened)) == 3
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


def test_one_index_is_asked_after_the_other(tmp_path: Path, opened: list[str]) -> None:
    """The second knows what the first does not; what both know counts once."""
    files = sorted(str(path) for path in write(tmp_path / "set", [50, 60, 70, 80]).iterdir())
    for name, some in (("a", files[:2]), ("b", files[1:3])):
        index = FooterIndex.open(tmp_path / name)
        Manifest.read(some, SCHEMA, reading=FooterReading(index))
        index.save()
    opened.clear()
    both = FooterIndex.open(tmp_path / "a", [str(tmp_path / "b")])
    manifest = Manifest.read(str(tmp_path / "set"), SCHEMA, reading=FooterReading(both))
    assert manifest.rows == 260 and names(opened) == ["part-003.parquet"]
    assert manifest.fingerprint == Manifest.read(str(tmp_path / "set"), SCHEMA).fingerprint


def test_files_of_a_table_never_change_and_are_known_by_their_size(tmp_path: Path, opened: list[str]) -> None:
    (file,) = find_files(str(write(tmp_path / "set", [50])))
    found = Found(file.uri, file.size_bytes, NEVER)
    index = FooterIndex.open(tmp_path / "footers.arrow")
    Manifest.read(lake.TableFiles((found,), hive=False), SCHEMA, reading=FooterReading(index))
    assert index.save() and opened
    opened.clear()
    again = FooterIndex.open(tmp_path / "footers.arrow")
    assert Manifest.read(lake.TableFiles((found,), hive=False), SCHEMA, reading=FooterReading(again)).rows == 50
    assert not opened
    assert not len(FooterIndex.open(tmp_path / "footers.arrow").known([replace(found, size_bytes=1)], ())[0])
    assert not len(FooterIndex.open(tmp_path / "footers.arrow").known([file], ())[0]), "a file of a folder may change"
