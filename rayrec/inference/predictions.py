"""The folder of predictions: a file for each part, which appears whole or not at all, on any file system of pyarrow."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.storage.errors import first_line
from rayrec.storage.folder import open_folder

_PART = re.compile(r"part-(\d{6,})\.parquet")


class Output:
    """Where a job writes.

    Args:
        place: a path, or a URI as `s3://bucket/folder`.

    Raises:
        DataError: a URI that is not known, or with credentials in it.
        ValueError: also of every method: it cannot be read or written.
    """

    def __init__(self, place: str | Path) -> None:
        self._local = Path(place).absolute() if "://" not in str(place) else None
        self._folder = open_folder(self._local or str(place))

    @property
    def path(self) -> str:
        """As a user would write it; for other processes, too."""
        return self._folder.path

    def parts(self) -> set[int]:
        """Numbers of the parts that are there."""
        with self._as_value_error("read"):
            found = (_PART.fullmatch(name) for name in self._folder.names())
        return {int(match[1]) for match in found if match}

    def write_part(self, number: int, table: pa.Table) -> None:
        """Two may write the same part at the same time: they write the same."""
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        with self._as_value_error("written"):
            self._folder.write(f"part-{number:06d}.parquet", sink.getvalue().to_pybytes())

    def read(self, name: str) -> dict[str, Any] | None:
        """A small JSON file; None where it is not there."""
        with self._as_value_error("read"):
            try:
                found: dict[str, Any] = json.loads(self._folder.read(name))
            except FileNotFoundError:
                return None
        return found

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """A small JSON file."""
        with self._as_value_error("written"):
            self._folder.write(name, (json.dumps(value) + "\n").encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One job a folder, where it is a local one; what an interrupted job left half written is removed."""
        if self._local is None:
            yield  # no locks there; two jobs would write the same files
            return
        with self._as_value_error("written"):
            self._local.mkdir(parents=True, exist_ok=True)
            lock = open(self._local / "_lock", "a+", encoding="utf-8")  # noqa: SIM115
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another job is writing predictions into {self.path}; wait for it") from None
            except OSError:
                pass  # a file system without locks
            for path in self._local.glob(".part-*"):
                path.unlink(missing_ok=True)
            yield

    @contextmanager
    def _as_value_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or first_line(error)
            raise ValueError(
                f"{self.path} cannot be {what} ({reason}); check address, permissions and room, and run the same "
                "command again: parts that are there stay"
            ) from error
