"""A cache of folders that the processes of a node share, evicted least recently used first."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CACHE_BYTES = 100 << 30  # default limit of the copies of exports on a node
_SIZES: dict[str, int] = {}  # of folders, which do not change: a cache may hold thousands of files


@dataclass(frozen=True)
class Held:
    """A cached folder. While this object lives, no process of the node evicts the folder."""

    folder: Path


class Cache:
    """Cached folders in the folder `root`, named by their contents.

    Args:
        most_bytes: size limit of all of them.
    """

    def __init__(self, root: Path, most_bytes: int) -> None:
        self.root, self._most_bytes = root, most_bytes

    def folder(self, key: str, needed: int, make: Callable[[Path, int], str]) -> Held:
        """The folder of a key, created if necessary.

        Args:
            needed: approximate size in bytes.
            make: called with an empty folder to fill and the bytes of free space; returns the name of the contents.
                Keys with the same name share a folder.

        Raises:
            OSError: the cache cannot be written. Errors of `make` pass through.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        link, making = self.root / key, self.root / "making"
        with open(self.root / "lock", "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)  # another process may be making the same folder
            if not link.exists():
                shutil.rmtree(making, ignore_errors=True)  # left by a killed process
                free_bytes = self._make_room(needed)
                making.mkdir()
                try:
                    folder = self.root / make(making, free_bytes)
                    if not folder.exists():
                        making.rename(folder)
                finally:
                    shutil.rmtree(making, ignore_errors=True)
                if link != folder:
                    link.unlink(missing_ok=True)
                    link.symlink_to(folder.name)
            os.utime(link, ns=(now := time.time_ns(), now))  # more exact than the time that the system would set
            return _hold(link.resolve())

    def _make_room(self, needed: int) -> int:
        """Evicts least recently used folders that no process holds; returns the bytes of free space."""
        with os.scandir(self.root) as entries:
            sizes = {entry.path: _size_of(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)}
        used = sum(sizes.values())
        if used + needed > self._most_bytes:
            for path in sorted(sizes, key=lambda path: os.stat(path).st_mtime_ns):
                if used + needed > self._most_bytes and _remove_unless_held(Path(path)):
                    used -= sizes[path]
                    del _SIZES[path]
            for link in self.root.iterdir():
                if link.is_symlink() and not link.exists():
                    link.unlink()
        return self._most_bytes - used


def _size_of(folder: str) -> int:
    if folder not in _SIZES:
        _SIZES[folder] = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return _SIZES[folder]


def _hold(folder: Path) -> Held:
    holder, lock = Held(folder), os.open(folder, os.O_RDONLY)
    weakref.finalize(holder, os.close, lock)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return holder


def _remove_unless_held(folder: Path) -> bool:
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
