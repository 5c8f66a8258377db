"""Folders that processes of a node share: each is made once, and what was opened longest ago makes room for others."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CACHE_BYTES = 100 << 30  # that copies of exports may take on a node, if nothing else is said


@dataclass(frozen=True)
class Held:
    """A folder on this node; as long as this object lives, no process of this node removes it from its cache."""

    folder: Path


class Cache:
    """Folders in the folder `root`, named by what they hold.

    Args:
        most_bytes: that they may take together.
    """

    def __init__(self, root: Path, most_bytes: int) -> None:
        self.root, self._most_bytes = root, most_bytes

    def folder(self, key: str, needed: int, make: Callable[[Path, int], str]) -> Held:
        """The folder of a key, made where it is not there.

        Args:
            needed: bytes that it will take, about.
            make: gets an empty folder to fill, and how many bytes there is room for; gives the name of what the folder
                holds: keys of one name share it.

        Raises:
            OSError: the cache cannot be written; and what `make` raises.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        link, making = self.root / key, self.root / "making"
        with open(self.root / "lock", "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)  # another process may be making the same
            if not link.exists():
                shutil.rmtree(making, ignore_errors=True)  # what a kill left
                room = self._room_for(needed)
                making.mkdir()
                try:
                    whole = self.root / make(making, room)
                    if not whole.exists():
                        making.rename(whole)
                finally:
                    shutil.rmtree(making, ignore_errors=True)
                if link != whole:
                    link.unlink(missing_ok=True)
                    link.symlink_to(whole.name)
            os.utime(link, ns=(now := time.time_ns(), now))  # more exact than the system's own
            return _hold(link.resolve())

    def _room_for(self, needed: int) -> int:
        """Bytes that there is room for, after what was opened longest ago and is not held was removed to make it."""
        folders = [one for one in self.root.iterdir() if one.is_dir() and not one.is_symlink()]
        sizes = {one: sum(file.stat().st_size for file in one.rglob("*") if file.is_file()) for one in folders}
        for one in sorted(folders, key=lambda one: one.stat().st_mtime_ns):
            if sum(sizes.values()) + needed > self._most_bytes and _remove_unless_held(one):
                del sizes[one]
        for link in self.root.iterdir():
            if link.is_symlink() and not link.exists():
                link.unlink()
        return self._most_bytes - sum(sizes.values())


def _hold(folder: Path) -> Held:
    held, lock = Held(folder), os.open(folder, os.O_RDONLY)
    weakref.finalize(held, os.close, lock)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return held


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
