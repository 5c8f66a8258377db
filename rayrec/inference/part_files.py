"""The output folder of a job over files: a file per part, written atomically, on any file system of pyarrow."""

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


class PartFiles:
    """The output folder of a job.

    Args:
        path: A path or URI (`s3://bucket/folder`).

    Raises:
        DataError: The scheme of the URI is unknown, or it contains credentials.
        ValueError: In all methods: the folder cannot be read or written.
    """

    def __init__(self, path: str | Path) -> None:
        self._local = Path(path).absolute() if "://" not in str(path) else None
        self._folder = open_folder(self._local or str(path))

    @property
    def path(self) -> str:
        """Path or URI of the folder."""
        return self._folder.path

    def parts(self) -> set[int]:
        """Numbers of the parts that exist."""
        with self._as_value_error("read"):
            matches = [_PART.fullmatch(name) for name in self._folder.names()]
        return {int(match[1]) for match in matches if match}

    def write_part(self, number: int, table: pa.Table) -> None:
        """Writes a part. Two processes may write the same part: their content is the same."""
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        with self._as_value_error("written"):
            self._folder.write(f"part-{number:06d}.parquet", sink.getvalue().to_pybytes())

    def read(self, name: str) -> dict[str, Any] | None:
        """Reads a small JSON file; None if it does not exist."""
        with self._as_value_error("read"):
            try:
                value: dict[str, Any] = json.loads(self._folder.read(name))
            except FileNotFoundError:
                return None
        return value

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes a small JSON file."""
        with self._as_value_error("written"):
            self._folder.write(name, (json.dumps(value) + "\n").encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks a local folder for one job, and removes partial files of an interrupted one."""
        if self._local is None:
            yield  # object storage has no locks; two jobs would write the same files
            return
        with self._as_value_error("written"):
            self._local.mkdir(parents=True, exist_ok=True)
            lock = open(self._local / "_lock", "a+", encoding="utf-8")  # noqa: SIM115
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another job is writing to {self.path}; wait for it") from None
            except OSError:
                pass  # a file system without locks
            for path in self._local.glob(".part-*"):
                path.unlink(missing_ok=True)
            yield

    @contextmanager
    def _as_value_error(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or first_line(error)
            raise ValueError(
                f"{self.path} cannot be {action} ({reason}); check address, permissions and disk space, then run the "
                "same command again: existing parts are kept"
            ) from error
