"""The folder of a run: its files, its lock, and whether an earlier run of the same name can be continued."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rayrec.checkpoint.errors import InUseError
from rayrec.checkpoint.ownership import Lease
from rayrec.storage.folder import LocalFolder, open_folder
from rayrec.storage.locations import cache_folder, inside
from rayrec.train.config.relaunch import refused_changes
from rayrec.train.config.removed import without_removed
from rayrec.train.errors import RunInUseError, StorageError

if TYPE_CHECKING:
    from rayrec.checkpoint.manifest import Checkpoint

REMOTE = ".storage"


class _File:
    """A file or folder of a run, as its path."""

    def __init__(self, name: str, doc: str | None = None) -> None:
        self._name, self.__doc__ = name, doc

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`<storage path>/<run name>/` and what lies in it.

    Where the storage path is a URI, this is a folder in the user's cache that stands for it: it names the URI, where
    checkpoints lie and small files are copied to (`mirror.py`).
    """

    path: Path

    @classmethod
    def at(cls, storage: str, name: str) -> RunFolder:
        """The folder of a run below a path or URI."""
        if "://" not in storage:
            return cls(Path(storage) / name)
        uri = inside(storage, name)
        folder = cls(cache_folder("runs") / hashlib.sha256(uri.encode()).hexdigest()[:12] / name)
        folder.path.mkdir(parents=True, exist_ok=True)
        (folder.path / REMOTE).write_text(uri, encoding="utf-8")
        return folder

    @property
    def remote(self) -> str | None:
        """URI of the run's storage; None where that is this folder."""
        try:
            return (self.path / REMOTE).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None

    config = _File("config.yaml", "The config with all that the run has resolved.")
    given = _File("given.yaml", "The config as the last launch gave it, with absolute paths and defaults.")
    plan = _File("plan.json")
    metrics = _File("metrics.jsonl")
    footers = _File("footers.arrow", "What the data's footers said, so that the same command again need not read all.")
    result = _File("result.json")
    exports = _File("exports.jsonl", "A line for each export that was made of the run.")
    report = _File("report.html")
    tensorboard = _File("tensorboard")
    ray_state = _File(".ray_train", "Where Ray Train keeps its own notes; not a part of the run.")

    @property
    def checkpoints(self) -> str:
        """Path or URI of the folder of checkpoints."""
        return inside(self.remote or str(self.path), "checkpoints")

    @property
    def converted(self) -> str:
        """Path or URI of Parquet of the data's files in other formats."""
        return inside(self.remote or str(self.path), "converted")

    def create(self) -> None:
        """Make the folder and prove that it can be written.

        Raises:
            StorageError: it cannot.
        """
        probe = self.path / f".probe-{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe.write_text("rayrec", encoding="utf-8")
            probe.unlink()
        except OSError as error:
            raise StorageError(
                f"storage.path: the run folder {self.path} cannot be written ({error.strerror or error}); "
                f"set storage.path to a folder that this user may write"
            ) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder, so that no two runs of one name write into it at the same time.

        Raises:
            StorageError: another process holds it.
        """
        with open(self.path / ".lock", "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunInUseError(
                    f"run folder {self.path} is in use by a run that is still going; "
                    f"wait for it, or choose another name"
                ) from None
            except OSError:
                pass  # a file system without locks; `leased` refuses a second run there too
            yield

    def read_config(self) -> dict[str, Any] | None:
        """The resolved config of the last launch of this run."""
        return _read_config(self.config)

    def read_given(self) -> dict[str, Any] | None:
        """The config as the last launch gave it; the resolved one of a run that was begun before both were kept."""
        return _read_config(self.given) or self.read_config()

    def read_result(self) -> dict[str, Any] | None:
        """The result of an earlier run of this name, if it got to its end."""
        try:
            raw = json.loads(self.result.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return raw if isinstance(raw, dict) else None

    def last_attempt(self) -> int:
        """The highest attempt in the metrics so far; 0 when there is none."""
        return max((int(record.get("attempt") or 0) for record in self.read_metrics()), default=0)

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """The lines of `metrics.jsonl`; a half-written last line is left out."""
        if not self.metrics.exists():
            return
        with open(self.metrics, encoding="utf-8") as file:
            for line in file:
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    continue

    def set_aside(self) -> Path | None:
        """Move the folder away so that a fresh run can take its name; returns where it went.

        Raises:
            StorageError: it cannot be moved.
        """
        if not self.path.exists():
            return None
        if self.remote is not None:
            raise StorageError(f"--fresh: {self.remote} is no folder that could be set aside; take another --name")
        aside = self.path.with_name(f"{self.path.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
        number = 1
        while aside.exists():
            number += 1
            aside = aside.with_name(f"{self.path.name}.before-{time.strftime('%Y%m%d-%H%M%S')}-{number}")
        try:
            self.path.rename(aside)
        except OSError as error:
            raise StorageError(f"--fresh: {self.path} cannot be moved to {aside}: {error.strerror}") from None
        return aside


def _read_config(path: Path) -> dict[str, Any] | None:
    """The config in a file of a run, without options of earlier versions; None where there is none."""
    if not path.exists():
        return None
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    return without_removed(raw, of_run=True) if isinstance(raw, dict) else None


def newest_checkpoint(folder: RunFolder) -> Checkpoint | None:
    """The newest checkpoint of a run; None where it never made one.

    Raises:
        StorageError: checkpoints cannot be read. That is not the same as there being none.
        CheckpointError: there are some, but none is whole.
    """
    try:
        from rayrec.checkpoint import CheckpointStore  # with torch, which a report does not need

        return CheckpointStore(folder.checkpoints).latest()
    except OSError as error:
        raise _unusable(folder, error, "read") from error


def _unusable(folder: RunFolder, error: OSError, how: str) -> StorageError:
    return StorageError(
        f"{error.filename or folder.checkpoints} cannot be {how} ({error.strerror or error}); nothing was started, "
        f"so that no checkpoint is lost: check storage and permissions, and run the same command again"
    )


@contextmanager
def leased(folder: RunFolder, tell: Callable[[str], object]) -> Iterator[Lease]:
    """Hold a run's checkpoints for this launch: the lock of a folder does not reach other machines.

    Args:
        tell: called with a line where another launch is waited for.

    Raises:
        StorageError: another launch is still going, or the folder cannot be written.
    """
    try:
        lease = Lease(open_folder(folder.checkpoints), tell).take()
    except InUseError as error:
        raise RunInUseError(str(error)) from None
    except OSError as error:
        raise _unusable(folder, error, "written") from error
    with lease:
        yield lease


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file so that a reader sees the old or the new content, never a part, also after a loss of power."""
    LocalFolder(path.parent).write(path.name, content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def write_yaml(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True))


def refuse_other_config(folder: RunFolder, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume a checkpoint with a config that makes another model or another order of rows.

    Args:
        before, now: plain values of the configs of the earlier launch and of this one, filled alike with what the run
            has resolved.

    Raises:
        StorageError: names the fields that differ, and what to do.
    """
    changes = refused_changes(before, now)
    if changes:
        raise StorageError(
            f"run folder {folder.path} holds checkpoints of a run with another config ({'; '.join(changes)}); take "
            f"another --name, go back to that config, or start over with --fresh (the earlier run is set aside, not "
            f"deleted)"
        )
