"""The small files of a run whose storage is no mounted folder: kept here while it goes on, copied there.

Checkpoints do not pass through here: workers write them where they belong. The copy there is what counts when a run is
taken up again, or only read, be it on another machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rayrec.storage.errors import first_line
from rayrec.storage.folder import Folder, open_folder
from rayrec.train.errors import StorageError, TrainError
from rayrec.train.run.folder import RunFolder, write_atomically

FILES = (
    "config.yaml",
    "given.yaml",
    "plan.json",
    "footers.arrow",
    "result.json",
    "report.html",
    "evaluation.json",
    "importance.json",
    "exports.jsonl",
)
METRICS = "metrics.jsonl"
_PART = re.compile(r"metrics\.jsonl(?:\.(\d{15}))?")
JOINED = 8  # parts of one level that become one of the next


class _Log:
    """A file that only grows, as parts in a folder that cannot append: each part is named by where it begins.

    What is new becomes a part; `JOINED` parts of one level become one of the next, so that each byte is sent a few
    times, however long the file becomes, and parts stay few.
    """

    def __init__(self, path: Path, there: Folder) -> None:
        self._path, self._there = path, there
        self._parts: list[tuple[int, int]] = []  # where each begins, and its level
        self._end = 0

    def pull(self, names: Collection[str]) -> bytes | None:
        """What the parts hold; None where there are none."""
        data, self._parts = b"", []
        for name, found in ((name, _PART.fullmatch(name)) for name in sorted(names)):
            begins = int(found[1] or 0) if found else -1
            if begins == len(data):  # else it has been joined
                data += self._there.read(name)
                self._parts.append((begins, 0))
        self._end = len(data)
        return data if self._parts else None

    def push(self) -> None:
        """Send what is new."""
        size = self._path.stat().st_size
        if size < self._end:  # begun again
            old, self._parts, self._end = self._parts, [], 0
            for begins, _ in old:
                self._there.remove(_part(begins))
        if size == self._end:
            return
        joined: list[tuple[int, int]] = []
        parts = [*self._parts, (self._end, 0)]
        while len(parts) >= JOINED and len({level for _, level in parts[-JOINED:]}) == 1:
            begins, level = parts[-JOINED]
            joined = [*parts[1 - JOINED :], *joined]
            parts[-JOINED:] = [(begins, level + 1)]
        with open(self._path, "rb") as file:
            file.seek(parts[-1][0])
            self._there.write(_part(parts[-1][0]), file.read(size - parts[-1][0]))
        self._parts, self._end = parts, size
        for begins, _ in joined:
            self._there.remove(_part(begins))


def _part(begins: int) -> str:
    return f"{METRICS}.{begins:015d}" if begins else METRICS


class Mirror:
    """Of one run; does nothing where its storage is a folder.

    Raises:
        StorageError: a URI that no file system is known for.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._here = folder
        self._sent: dict[str, tuple[int, int]] = {}
        try:
            self._there = None if folder.remote is None else open_folder(folder.remote)
        except ValueError as error:
            raise StorageError(f"storage.path: {error}") from error
        self._log = None if self._there is None else _Log(folder.metrics, self._there)

    def pull(self, writes: bool = True) -> None:
        """Make the files here those that are there.

        Args:
            writes: also prove that something can be written there.

        Raises:
            StorageError: it cannot be read or written.
        """
        if self._there is None or self._log is None:
            return
        try:
            names = self._there.names()
            log, metrics = self._log.pull(names), self._here.metrics
            if log is None:
                metrics.unlink(missing_ok=True)
            elif not metrics.exists() or metrics.read_bytes() != log:
                write_atomically(metrics, log)
            for name in FILES:
                path = self._here.path / name
                if name in names:
                    data = self._there.read(name)
                    if not path.exists() or path.read_bytes() != data:
                        write_atomically(path, data)
                    self._sent[name] = _state(path)
                else:
                    path.unlink(missing_ok=True)
            if writes:
                self._there.write("probe", b"rayrec")
                self._there.remove("probe")
        except OSError as error:
            raise StorageError(
                f"storage.path: the run folder {self._there.path} cannot be read and written "
                f"({error.strerror or error}); check address, credentials and permissions"
            ) from error

    def push(self, report: Callable[[str], object]) -> None:
        """Copy the files that have changed; what cannot be copied is reported, and copied the next time."""
        if self._there is None or self._log is None:
            return
        try:
            if self._here.metrics.exists():
                self._log.push()
            for name in FILES:
                path = self._here.path / name
                if not path.exists():
                    continue
                state = _state(path)
                if self._sent.get(name) != state:
                    self._there.write(name, path.read_bytes())
                    self._sent[name] = state
        except OSError as error:
            reason = error.strerror or error
            report(f"{self._there.path}: files of the run cannot be written there ({reason}); the run goes on")


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def holds(place: str, *names: str) -> bool:
    """Whether one of these files lies in a path or URI; raises StorageError where it cannot be read."""
    try:
        found = open_folder(place).names() if "://" in place else [n for n in names if (Path(place) / n).exists()]
    except OSError as error:
        raise StorageError(f"{place} cannot be read: {first_line(error)}") from error
    return any(name in found for name in names)


@contextmanager
def run_here(place: str, report: Callable[[str], object]) -> Iterator[Path]:
    """A run, or one of its checkpoints, as a path here: a URI's small files are copied here, and back what changed.

    Args:
        report: called with what cannot be copied back.

    Raises:
        TrainError: the URI is no run.
        StorageError: it cannot be read.
    """
    uri, mark, options = place.partition("?")
    if "://" not in place:
        yield Path(place)
        return
    above, _, name = uri.rstrip("/").rpartition("/")
    checkpoint = name if above.endswith("/checkpoints") else ""
    if checkpoint:
        above, _, name = above.removesuffix("/checkpoints").rpartition("/")
    folder = RunFolder.at(f"{above}{mark}{options}", name)
    mirror, trains = Mirror(folder), False
    with ExitStack() as held:
        try:
            held.enter_context(folder.locked())
        except StorageError:
            trains = True  # this machine trains it now, so its files are here
        else:
            mirror.pull(writes=False)
    if not folder.config.exists():
        raise TrainError(f"{place} is not a run folder: it has no config.yaml")
    yield folder.path / "checkpoints" / checkpoint if checkpoint else folder.path
    if not trains:
        mirror.push(report)
