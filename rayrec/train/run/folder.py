"""The run folder: its files, its lock, and the check that an earlier run of the same name can be resumed."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rayrec.checkpoint.errors import InUseError
from rayrec.checkpoint.ownership import Lease
from rayrec.storage.copying import move_folder
from rayrec.storage.errors import first_line
from rayrec.storage.folder import LocalFolder, open_folder
from rayrec.storage.locations import cache_folder, inside
from rayrec.train.config.relaunch import refused_changes
from rayrec.train.config.removed import without_removed
from rayrec.train.errors import RunInUseError, StorageError

if TYPE_CHECKING:
    from rayrec.checkpoint.manifest import Checkpoint

REMOTE, LOCK = ".storage", ".lock"


class _File:
    """Descriptor: the path of a file or folder in the run folder."""

    def __init__(self, name: str, doc: str | None = None) -> None:
        self._name, self.__doc__ = name, doc

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`<storage path>/<run name>/` and the paths of its files.

    If the storage path is a URI, this is a local cache folder: it records the URI, `mirror.py` copies its small files
    there, and checkpoints are written there directly.
    """

    path: Path

    @classmethod
    def at(cls, storage: str, name: str) -> RunFolder:
        """The folder of run `name` in storage (a path or URI). For a URI, creates the cache folder."""
        if "://" not in storage:
            return cls(Path(storage) / name)
        uri = inside(storage, name)
        folder = cls(cache_folder("runs") / hashlib.sha256(uri.encode()).hexdigest()[:12] / name)
        folder.path.mkdir(parents=True, exist_ok=True)
        (folder.path / REMOTE).write_text(uri, encoding="utf-8")
        return folder

    @property
    def remote(self) -> str | None:
        """URI of the remote storage; None if the run is stored in this folder."""
        try:
            return (self.path / REMOTE).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None

    config = _File("config.yaml", "The config with all resolved values.")
    given = _File("given.yaml", "The config passed to the last launch, with absolute paths and defaults.")
    id_file = _File("run_id", "Unique id of the run.")
    plan = _File("plan.json")
    metrics = _File("metrics.jsonl")
    footers = _File("footers.arrow", "Cached footers of the data files, so that a relaunch need not read them again.")
    result = _File("result.json")
    exports = _File("exports.jsonl", "One line per export of the run.")
    report = _File("report.html")
    tensorboard = _File("tensorboard")
    ray_state = _File(".ray_train", "Ray Train's state, which is not part of the run.")

    def run_id(self) -> str:
        """The unique id of the run, which is created by the first launch and kept."""
        try:
            return self.id_file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            pass
        # Runs that began before runs had ids have entries in trackers under an id of the path.
        is_old = self.metrics.exists()
        run_id = hashlib.sha256(str(self.path).encode()).hexdigest()[:32] if is_old else uuid.uuid4().hex
        with suppress(OSError):  # the disk is full; the next launch tries again
            write_atomically(self.id_file, f"{run_id}\n")
        return run_id

    @property
    def checkpoints(self) -> str:
        """Path or URI of the checkpoint folder."""
        return inside(self.remote or str(self.path), "checkpoints")

    @property
    def converted(self) -> str:
        """Path or URI of the Parquet files converted from data in other formats."""
        return inside(self.remote or str(self.path), "converted")

    def create(self) -> None:
        """Create the folder and write a probe file to it.

        Raises:
            StorageError: the folder cannot be written.
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
        """Lock the folder against another run of the same name on this file system.

        Raises:
            RunInUseError: another process holds the lock.
        """
        with open(self.path / LOCK, "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunInUseError(
                    f"run folder {self.path} is in use by a run that is still going; "
                    f"wait for it, or choose another name"
                ) from None
            except OSError:
                pass  # this file system has no locks; `leased` refuses a second run there
            yield

    def read_config(self) -> dict[str, Any] | None:
        """The resolved config of the last launch; None before the first."""
        return _read_config(self.config)

    def read_given(self) -> dict[str, Any] | None:
        """The config passed to the last launch. Older runs stored only the resolved config, which is returned then."""
        return _read_config(self.given) or self.read_config()

    def read_result(self) -> dict[str, Any] | None:
        """The result of an earlier launch that finished; None without one."""
        try:
            raw = json.loads(self.result.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return raw if isinstance(raw, dict) else None

    def last_attempt(self) -> int:
        """The highest attempt number in `metrics.jsonl`; 0 without records."""
        return max((int(record.get("attempt") or 0) for record in self.read_metrics()), default=0)

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """The records of `metrics.jsonl`, without an incomplete last line."""
        if not self.metrics.exists():
            return
        with open(self.metrics, encoding="utf-8") as file:
            for line in file:
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    continue

    def set_aside(self) -> str | None:
        """Rename the folder so that a new run can use its name; returns the new path or URI, None without a folder.

        Raises:
            StorageError: the folder cannot be moved.
        """
        folder = open_folder(self.remote or self.path)
        if not folder.names():
            return None
        siblings = folder.parent()
        taken, name = set(siblings.names()), f"{folder.name}.before-{time.strftime('%Y%m%d-%H%M%S')}"
        backup = siblings.sub(
            next(free for n in itertools.count(1) if (free := f"{name}-{n}" if n > 1 else name) not in taken)
        )
        try:
            move_folder(folder, backup)
        except OSError as error:
            reason = error.strerror or first_line(error)
            raise StorageError(f"--fresh: {folder.path} cannot be moved to {backup.path}: {reason}") from None
        if self.remote is not None:
            for path in self.path.iterdir():
                if path.name not in (REMOTE, LOCK):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        return backup.path


def _read_config(path: Path) -> dict[str, Any] | None:
    """The config in a file of the run, without removed options; None if the file does not exist."""
    if not path.exists():
        return None
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    return without_removed(raw, of_run=True) if isinstance(raw, dict) else None


def newest_checkpoint(folder: RunFolder) -> Checkpoint | None:
    """The newest checkpoint of a run; None if it has none.

    Raises:
        StorageError: the checkpoint folder cannot be read, so whether there is a checkpoint is unknown.
        CheckpointError: all checkpoints are damaged.
    """
    try:
        from rayrec.checkpoint import CheckpointStore  # imports torch, which a report does not need

        return CheckpointStore(folder.checkpoints).latest()
    except OSError as error:
        raise _unusable(folder, error, "read") from error


def _unusable(folder: RunFolder, error: OSError, verb: str) -> StorageError:
    return StorageError(
        f"{error.filename or folder.checkpoints} cannot be {verb} ({error.strerror or error}); nothing was started, "
        f"so that no checkpoint is lost: check storage and permissions, and run the same command again"
    )


@contextmanager
def leased(folder: RunFolder, tell: Callable[[str], object]) -> Iterator[Lease]:
    """Hold the lease on a run's checkpoints. It also excludes launches on other machines; the folder lock does not.

    Args:
        tell: called with a message while waiting for another launch.

    Raises:
        StorageError: another launch is running, or the folder cannot be written.
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
    """Replace a file so that readers see the old or the new content, never a mix, even after a power loss."""
    LocalFolder(path.parent).write(path.name, content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def write_yaml(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True))


def refuse_other_config(folder: RunFolder, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume with a config that changes the model or the order of rows.

    Args:
        before, now: plain values of the earlier and the current config, both filled with the run's resolved values.

    Raises:
        StorageError: names the differing fields and the fix.
    """
    changes = refused_changes(before, now)
    if changes:
        raise StorageError(
            f"run folder {folder.path} holds checkpoints of a run with another config ({'; '.join(changes)}); choose "
            f"another --name, restore that config, or start over with --fresh (which renames the earlier run and does "
            f"not delete it)"
        )
