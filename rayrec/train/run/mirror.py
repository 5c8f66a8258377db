"""Mirrors the small files of a run between a local cache folder and remote storage (a URI).

The run writes local files, which are copied to the storage. The remote copy is authoritative when a run is resumed or
read, also on another machine; lines of metrics.jsonl that a killed driver did not copy are kept. Checkpoints and
profiles are not mirrored: workers write them directly to the storage.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rayrec.storage.errors import first_line
from rayrec.storage.folder import Folder, open_folder
from rayrec.train.errors import StorageError, TrainError
from rayrec.train.run.folder import RunFolder, write_atomically

FILES = (
    "config.yaml",
    "given.yaml",
    "run_id",
    "plan.json",
    "footers.arrow",
    "result.json",
    "report.html",
    "evaluation.json",
    "importance.json",
    "exports.jsonl",
)
METRICS = "metrics.jsonl"
_SEGMENT = re.compile(r"metrics\.jsonl(?:\.(\d{15}))?")
JOINED = 8  # consecutive segments of one level to merge into one of the next


class _Log:
    """An append-only file, stored as segments because object stores cannot append.

    A segment is named by its byte offset in the file. Each push writes the new bytes as a segment. `JOINED` segments of
    one level are merged into one of the next, as in a log-structured merge tree, so the number of segments and the
    bytes sent grow only logarithmically.
    """

    def __init__(self, path: Path, remote: Folder) -> None:
        self._path, self._remote = path, remote
        self._segments: list[tuple[int, int]] = []  # (offset, level)
        self._end = 0

    def pull(self, names: Collection[str]) -> bytes | None:
        """The content of the remote file; None if it does not exist."""
        data, self._segments = b"", []
        for name, match in ((name, _SEGMENT.fullmatch(name)) for name in sorted(names)):
            offset = int(match[1] or 0) if match else -1
            # Segments that were merged into an earlier one may remain after a crash.
            if offset == len(data):
                data += self._remote.read(name)
                self._segments.append((offset, 0))
        self._end = len(data)
        return data if self._segments else None

    def push(self) -> None:
        """Write the new bytes to the storage."""
        size = self._path.stat().st_size
        if size < self._end:  # the local file was restarted
            old, self._segments, self._end = self._segments, [], 0
            for offset, _ in old:
                self._remote.remove(_segment_name(offset))
        if size == self._end:
            return
        merged: list[tuple[int, int]] = []
        segments = [*self._segments, (self._end, 0)]
        while len(segments) >= JOINED and len({level for _, level in segments[-JOINED:]}) == 1:
            offset, level = segments[-JOINED]
            merged = [*segments[1 - JOINED :], *merged]
            segments[-JOINED:] = [(offset, level + 1)]
        with open(self._path, "rb") as file:
            file.seek(segments[-1][0])
            self._remote.write(_segment_name(segments[-1][0]), file.read(size - segments[-1][0]))
        self._segments, self._end = segments, size
        for offset, _ in merged:
            self._remote.remove(_segment_name(offset))


def _segment_name(offset: int) -> str:
    return f"{METRICS}.{offset:015d}" if offset else METRICS


class Mirror:
    """Mirrors the files of one run. Does nothing if its storage is a folder.

    Args:
        writes_records: whether this process writes the run's records. Other processes copy neither metrics.jsonl nor
            the files of TensorBoard to the storage, and need no permission to write there.
        files: files to copy besides the records.

    Raises:
        StorageError: no file system supports the URI.
    """

    def __init__(self, folder: RunFolder, writes_records: bool = True, files: Sequence[str] = FILES) -> None:
        self._local, self._writes_records, self._files = folder, writes_records, files
        self._sent: dict[str, tuple[int, int]] = {}
        try:
            self._remote = None if folder.remote is None else open_folder(folder.remote)
        except ValueError as error:
            raise StorageError(f"storage.path: {error}") from error
        self._log = None if self._remote is None else _Log(folder.metrics, self._remote)

    def pull(self) -> None:
        """Replace the local files with the files in the storage. Newer local records of the same run are kept.

        Raises:
            StorageError: the storage cannot be read, or not be written by a process that writes records.
        """
        if self._remote is None or self._log is None:
            return
        try:
            names = self._remote.names()
            self._pull_records(self._remote, self._log.pull(names), names)
            for name in self._files:
                path = self._local.path / name
                if name in names:
                    data = self._remote.read(name)
                    if not path.exists() or path.read_bytes() != data:
                        write_atomically(path, data)
                    self._sent[name] = _state(path)
                else:
                    path.unlink(missing_ok=True)
            if self._writes_records:
                self._remote.write("probe", b"rayrec")
                self._remote.remove("probe")
        except OSError as error:
            raise StorageError(
                f"storage.path: the run folder {self._remote.path} cannot be read and written "
                f"({error.strerror or error}); check address, credentials and permissions"
            ) from error

    def _pull_records(self, remote: Folder, log: bytes | None, names: Collection[str]) -> None:
        """Replace metrics.jsonl, unless the local file continues the remote one: a killed driver did not copy its end.

        Args:
            log: content of the remote file; None if it does not exist.
        """
        metrics, board = self._local.metrics, self._local.tensorboard
        if not self._is_same_run(remote, log, names):
            metrics.unlink(missing_ok=True)
            shutil.rmtree(board, ignore_errors=True)
        if log is not None and not (metrics.exists() and metrics.read_bytes().startswith(log)):
            write_atomically(metrics, log)
        if self._writes_records and board.name in names:
            for name in remote.sub(board.name).names():
                if not (board / name).exists():  # a local file was written here, so it is the newest
                    write_atomically(board / name, remote.sub(board.name).read(name))
                    self._sent[f"{board.name}/{name}"] = _state(board / name)

    def _is_same_run(self, remote: Folder, log: bytes | None, names: Collection[str]) -> bool:
        """Whether the local files are of the run in the storage. Another machine may have started it over."""
        id_file = self._local.id_file
        if id_file.name in names:
            return id_file.exists() and id_file.read_bytes() == remote.read(id_file.name)
        return log is not None  # a run of a version without ids, or an empty storage

    def push(self, report: Callable[[str], object]) -> None:
        """Copy the changed files to the storage. Reports a failure; the next push tries again."""
        if self._remote is None or self._log is None:
            return
        try:
            if self._writes_records and self._local.metrics.exists():
                self._log.push()
            for name in (*self._files, *(self._board_files() if self._writes_records else ())):
                path = self._local.path / name
                if not path.exists():
                    continue
                state = _state(path)
                if self._sent.get(name) != state:
                    folder, _, file = name.rpartition("/")
                    (self._remote.sub(folder) if folder else self._remote).write(file, path.read_bytes())
                    self._sent[name] = state
        except OSError as error:
            reason = error.strerror or error
            report(f"cannot write files of the run to {self._remote.path} ({reason}); training continues")

    def _board_files(self) -> list[str]:
        board = self._local.tensorboard
        return [f"{board.name}/{path.name}" for path in sorted(board.glob("*")) if path.is_file()]


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def holds(location: str, *names: str) -> bool:
    """Whether a path or URI contains one of these files; raises StorageError if it cannot be read."""
    try:
        if "://" not in location:
            return any((Path(location) / name).exists() for name in names)
        return not set(names).isdisjoint(open_folder(location).names())
    except OSError as error:
        raise StorageError(f"{location} cannot be read: {first_line(error)}") from error


def storage_and_name(location: str) -> tuple[str, str]:
    """(`storage.path`, `name`) of the run at a path or URI."""
    uri, mark, options = location.partition("?") if "://" in location else (str(Path(location).absolute()), "", "")
    above, _, name = uri.rstrip("/").rpartition("/")
    return f"{above}{mark}{options}", name


@contextmanager
def run_here(location: str, report: Callable[[str], object], files: Sequence[str] = FILES) -> Iterator[Path]:
    """The local path of a run or of one of its checkpoints.

    Copies the small files of a URI to the cache folder, and changed files back at the end.

    Args:
        location: A path or URI.
        report: Called with each failure to copy files back.
        files: Files to copy besides metrics.jsonl.

    Raises:
        TrainError: the URI is not a run.
        StorageError: the URI cannot be read.
    """
    uri, mark, options = location.partition("?")
    if "://" not in location:
        yield Path(location)
        return
    above, _, name = uri.rstrip("/").rpartition("/")
    checkpoint = name if above.endswith("/checkpoints") else ""
    if checkpoint:
        above, _, name = above.removesuffix("/checkpoints").rpartition("/")
    folder = RunFolder.at(f"{above}{mark}{options}", name)
    mirror, in_training = Mirror(folder, writes_records=False, files=files), False
    with ExitStack() as stack:
        try:
            stack.enter_context(folder.locked())
        except StorageError:
            in_training = True  # on this machine, so the local files are the newest
        else:
            mirror.pull()
    if not folder.config.exists():
        raise TrainError(f"{location} is not a run folder: it has no config.yaml")
    yield folder.path / "checkpoints" / checkpoint if checkpoint else folder.path
    if not in_training:
        mirror.push(report)
