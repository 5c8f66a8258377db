"""Footers kept for a relaunch, or for everybody: only new and changed files are read, a damaged index is no index."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import FooterIndex, FooterReading, Manifest
from rayrec.data.source import footers
from rayrec.data.storage.opening import Footer
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
    first = read()
    assert sorted(set(opened)) == ["part-000.parquet", "part-001.parquet", "part-002.parquet"]
    written = (tmp_path / "footers.arrow").stat().st_mtime_ns
    opened.clear()
    assert read() == first and not opened
    assert Manifest.read(str(tmp_path / "set"), SCHEMA) == first
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
    first, path = read(), tmp_path / "footers.arrow"
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    elif damage is None:
        path.write_bytes(path.read_bytes()[:-200])
    else:
        with pa.ipc.new_file(str(path), (other := table(3)).schema) as writer:
            writer.write_table(other)
    opened.clear()
    assert read() == first
    assert len(set(opened)) == 3
    opened.clear()
    assert read() == first and not opened


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    write(tmp_path / "set", [50])
    nowhere = FooterIndex.open(tmp_path / "no such folder" / "footers.arrow")
    assert Manifest.read(str(tmp_path / "set"), SCHEMA, reading=FooterReading(nowhere)).rows == 50
    nowhere.save()
    assert not (tmp_path / "no such folder").exists()
