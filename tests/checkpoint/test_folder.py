"""Folders of files on any storage: what they hold, what survives a loss of power, and what stays in memory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from rayrec._runtime.cgroup_limits import available_bytes
from rayrec.storage import ArrowFolder, Folder, LocalFolder, open_folder

FILES = [("local", ""), ("arrow", ""), ("arrow", "?region=x")]


@pytest.mark.parametrize("kind, options", FILES)
def test_a_folder_anywhere_holds_whole_files(tmp_path: Path, kind: str, options: str) -> None:
    inner = f"{tmp_path}/run/root"
    folder: Folder = LocalFolder(Path(inner))
    if kind == "arrow":
        folder = ArrowFolder(pafs.LocalFileSystem(), inner, f"x:/{inner}/{options}")
    assert folder.remote == (kind == "arrow") and folder.name == "root"
    assert folder.names() == []
    below = folder.sub("a")
    assert (below.name, below.parent().name, below.parent().parent().name) == ("a", "root", "run")
    prefix = "" if kind == "local" else "x:/"
    assert below.path == f"{prefix}{inner}/a{options}" and below.parent().path == f"{prefix}{inner}{options}"
    below.write("one", b"first, and long")
    below.write("one", b"12345")
    with below.create("two") as file:
        file.write(b"0123456789")
        file.write(memoryview(b"abc"))
    assert below.names() == ["one", "two"] and folder.names() == ["a"]
    assert below.read("one") == b"12345"
    with below.open("two") as source:
        room = bytearray(b"....")
        assert source.read_into(8, memoryview(room)) == 4 and room == b"89ab"
        assert source.read_into(11, memoryview(room)) == 2 and room == b"bcab"
        assert source.read_into(13, memoryview(room)) == 0
    for missing in (lambda: below.read("three"), lambda: below.open("three").__enter__()):
        with pytest.raises(FileNotFoundError):
            missing()
    below.remove("one")
    below.remove("one")
    assert below.names() == ["two"]
    below.remove_all()
    below.remove_all()
    assert below.names() == [] and folder.names() == []


def test_a_place_is_a_path_or_a_uri(tmp_path: Path) -> None:
    assert open_folder(tmp_path).path == open_folder(f"file://{tmp_path}").path == str(tmp_path)
    assert open_folder(folder := LocalFolder(tmp_path)) is folder
    with pytest.raises(ValueError, match=r"cannot open this file system: .*file nothing://x.*; fix: "):
        open_folder("nothing://x")


def test_files_and_their_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has been written outlives a loss of power: it, its folder, and the folder's own place."""
    synced: list[str] = []
    monkeypatch.setattr(
        "os.fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
    )
    folder = LocalFolder(tmp_path / "run" / "step")
    with folder.create("data") as file:
        file.write(b"x")
    assert synced == ["data", "step", "run"]
    synced.clear()
    folder.write("index", b"y")
    assert synced[0].startswith(".index.") and synced[-2:] == ["step", "run"]


def cached(path: Path) -> float:
    """Which part of a file lies in memory."""
    block, found = bytearray(4096), 0
    with open(path, "rb", buffering=0) as file:
        places = range(0, path.stat().st_size, 1 << 16)
        for place in places:
            with suppress(BlockingIOError):
                found += os.preadv(file.fileno(), [block], place, os.RWF_NOWAIT) == len(block)
    return found / len(places)


def test_bytes_that_were_read_do_not_stay_in_memory(tmp_path: Path) -> None:
    folder, size = LocalFolder(tmp_path), 48 << 20
    with folder.create("data") as file:
        file.write(os.urandom(1 << 20) * (size >> 20))
    try:
        with folder.open("data") as source:
            source.forget(0, size)
        if cached(tmp_path / "data") > 0.1:
            pytest.skip("this file system keeps its files in memory")
    except OSError:
        pytest.skip("this file system does not tell what is in memory")
    block, step = memoryview(bytearray(3_000_000)), 3_000_000  # no multiple of the system's groups of pages
    for forgets in (False, True):
        with folder.open("data") as source:
            for place in range(0, size, step):
                read = source.read_into(place, block)
                if forgets:
                    source.forget(place, read)
        assert cached(tmp_path / "data") < 0.2 if forgets else cached(tmp_path / "data") > 0.9


def test_memory_is_the_hosts_or_the_containers(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 1 << 62  # nothing is told
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    3000 kB\nMemFree: 10 kB\n")
    assert available_bytes(tmp_path) == 3000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("500\n")
    for limit, room in [("max\n", 3000 * 1024), ("2000\n", 1500), (f"{1 << 40}\n", 3000 * 1024)]:
        (group / "memory.max").write_text(limit)
        assert available_bytes(tmp_path) == room
