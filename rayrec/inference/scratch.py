"""A temporary folder next to the result; the next export of the same name removes what a killed one left."""

from __future__ import annotations

import fcntl
import glob
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = "export.lock"


@contextmanager
def scratch_beside(out: Path) -> Iterator[Path]:
    """An empty hidden folder next to `out`, removed at the end.

    Raises:
        OSError: it cannot be made.
    """
    prefix = f".{out.name}."
    for lock in out.parent.glob(f"{glob.escape(prefix)}*/{_LOCK}"):
        _remove_unless_held(lock)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=prefix) as made, open(Path(made) / _LOCK, "w") as held:
        with suppress(OSError):  # a file system without locks: nothing is removed there
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Path(made)


def _remove_unless_held(lock: Path) -> None:
    """A process that ended in whatever way holds no lock."""
    with suppress(OSError), open(lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent)
