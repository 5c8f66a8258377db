"""Ownership of a run's folder of checkpoints: by one launch of the driver at a time, and by one attempt of that launch.

`launch.json` names the launch. The driver writes it when it starts, again every few seconds, and removes it when it
ends. A launch is alive as long as its file changes, whatever the clocks of two machines say. `stop.json` asks the
launch that it names to stop.

`attempt.json` names the attempt. Rank 0 of a worker group claims the folder with a new number and a random token. A
process that reads a different token later has been replaced: a rank that hung while its run restarted must not commit
or remove anything. Folder names contain the attempt, so no attempt overwrites the files of another.

These are separate files because two processes write them, and storage has no compare-and-swap: in a common file the
driver's heartbeat could overwrite the claim of a new attempt.

A rank that freezes between `check` and its write may still commit. This is harmless: checkpoints are ordered by
attempt, and the attempt of that rank is older than the current one.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from rayrec.checkpoint.errors import FencedError, InUseError, NotSharedError, TakenOverError
from rayrec.storage.folder import Folder
from rayrec.storage.retries import waits_s

LAUNCH_FILE = "launch.json"
STOP_FILE = "stop.json"
SHOWN_WITHIN_S = 60.0  # other nodes see a new file; NFS clients cache listings for so long
STALE_S = 1800.0

_ATTEMPT_FILE = "attempt.json"
_FOLDER_NAME = re.compile(r"step_(\d{8,})(?:-(\d{4,}))?(?:\.increment-(\d{8,})-(\d{4,}))?")
_tokens_here: set[str] = set()  # of launches in this process


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How often a launch sends heartbeats, and for how long others wait for one.

    Args:
        heartbeat_s: seconds between two heartbeats.
        dead_s: a launch without a heartbeat for so long is dead.
        silent_s: as `dead_s`, for a launch whose last heartbeat looks older than half an hour; two missed heartbeats.
        release_s: time limit for unresponsive storage at the end of a launch.
    """

    heartbeat_s: float = 15.0
    dead_s: float = 60.0
    silent_s: float = 40.0
    release_s: float = 10.0

    @property
    def poll_s(self) -> float:
        """Seconds between two looks for a heartbeat."""
        return min(1.0, self.dead_s / 20)


TIMING = Timing()


@dataclass(frozen=True, slots=True)
class Launch:
    """A start of a run's driver.

    Args:
        space: namespace of process ids; each container of a host may have its own.
        began: start time, in seconds since 1970.
    """

    token: str
    host: str
    space: str
    pid: int
    began: float

    @classmethod
    def here(cls) -> Launch:
        """A new launch of this process."""
        return cls(uuid.uuid4().hex, socket.gethostname(), _pid_namespace(), os.getpid(), time.time())

    @classmethod
    def from_dict(cls, raw: Any) -> Launch | None:
        """The launch that `asdict` wrote; None for other data."""
        try:
            return cls(str(raw["token"]), str(raw["host"]), str(raw["space"]), int(raw["pid"]), float(raw["began"]))
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def ended(self) -> bool:
        """Whether its process has certainly ended. Always false on another host."""
        if (self.host, self.space) != (socket.gethostname(), _pid_namespace()):
            return False
        if self.pid == os.getpid():
            return self.token not in _tokens_here  # if unknown here, an earlier process had the same id
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # another user's process
            return False
        return False

    def __str__(self) -> str:
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.began))
        return f"process {self.pid} on {self.host}, started {began}"


def current_launch(root: Folder) -> Launch | None:
    """The launch that holds a folder; None without a `launch.json`.

    Raises:
        OSError: the file cannot be read.
    """
    return _read_launch(root)[0]


def request_stop(root: Folder) -> Launch | None:
    """Ask the launch that holds a folder to stop; its driver looks for the request every few seconds.

    Returns:
        The launch; None if no launch holds the folder, or if its process has certainly ended.

    Raises:
        OSError: the folder cannot be read or written.
    """
    launch = current_launch(root)
    if launch is None or launch.ended:
        return None
    root.write(STOP_FILE, json.dumps({"token": launch.token}).encode())
    return launch


def stop_requested(root: Folder, launch: Launch) -> bool:
    """Whether `request_stop` has asked this launch to stop.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        return bool(json.loads(root.read(STOP_FILE))["token"] == launch.token)
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return False


def await_end(root: Folder, launch: Launch, within_s: float, timing: Timing = TIMING) -> bool:
    """Wait until a launch has ended; returns False if it still runs after `within_s` seconds.

    Raises:
        TimeoutError: the launch has sent no heartbeat for `timing.dead_s`, so it may be dead.
        OSError: the folder cannot be read.
    """
    end, (state, beat_at) = time.monotonic() + within_s, (_read_launch(root), time.monotonic())
    while state[0] is not None and state[0].token == launch.token and not launch.ended:
        now = time.monotonic()
        if now >= end:
            return False
        if now - beat_at >= timing.dead_s:
            raise TimeoutError(errno.ETIMEDOUT, f"no heartbeat of {launch} for {timing.dead_s:g} s", root.path)
        time.sleep(timing.poll_s)
        if (current := _read_launch(root)) != state:
            state, beat_at = current, time.monotonic()
    return True


def _read_launch(root: Folder) -> tuple[Launch | None, float]:
    """(current launch, time of its last heartbeat by its own clock)"""
    try:
        raw = json.loads(root.read(LAUNCH_FILE))
        return Launch.from_dict(raw["launch"]), float(raw["beat"])
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return None, 0.0


class Lease:
    """Holds a folder of checkpoints for this launch. Call `take`, then use the lease as a context manager.

    Args:
        notify: called with a line when the lease waits for another launch.
    """

    def __init__(
        self, root: Folder, notify: Callable[[str], object] = lambda text: None, timing: Timing = TIMING
    ) -> None:
        self._root, self._notify, self._timing = root, notify, timing
        self.launch = Launch.here()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, name="rayrec-lease", daemon=True)

    def take(self) -> Lease:
        """Acquire the folder if no launch holds it, or if the launch that holds it has died.

        Raises:
            InUseError: another launch is alive.
            OSError: the folder cannot be read or written.
        """
        launch, beat = _read_launch(self._root)
        if launch is not None and not launch.ended:
            # Clocks of two machines may differ by any time, so an old heartbeat alone is no proof of death.
            stale = time.time() - beat >= STALE_S
            self._await_end(launch, beat, self._timing.silent_s if stale else self._timing.dead_s)
        self._write()
        _tokens_here.add(self.launch.token)
        return self

    def _await_end(self, launch: Launch, beat: float, wait_s: float) -> None:
        """Wait until a launch has ended, or has sent no heartbeat for `wait_s` seconds."""
        if launch.token not in _tokens_here:
            self._notify(
                f"Another driver ({launch}) holds {self._root.path}. Waiting up to {wait_s:g} s to see whether it is "
                f"alive …"
            )
            end = time.monotonic() + wait_s
            while (current := _read_launch(self._root)) == (launch, beat):
                if time.monotonic() >= end or launch.ended:
                    return
                time.sleep(self._timing.poll_s)
            if current[0] is None:
                return
            launch = current[0]
        raise InUseError(
            f"{self._root.path} is in use by a run that is still going ({launch}); wait for it, stop it, or choose "
            f"another name"
        )

    @property
    def held(self) -> bool:
        """Whether the folder still belongs to this launch.

        Raises:
            OSError: the folder cannot be read.
        """
        launch = current_launch(self._root)
        return launch is not None and launch.token == self.launch.token

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(timeout=self._timing.release_s)
        _tokens_here.discard(self.launch.token)

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(self._timing.heartbeat_s):
            with suppress(OSError):  # if the storage is unavailable, another launch may acquire the folder
                if not self.held:
                    return
                self._write()
        with suppress(OSError):  # on failure, the next launch detects that this one is dead
            if self.held:
                self._root.remove(LAUNCH_FILE)
                self._root.remove(STOP_FILE)
            if not self._root.names():
                self._root.remove_all()  # a launch that was refused leaves nothing behind

    def _write(self) -> None:
        self._root.write(LAUNCH_FILE, json.dumps({"launch": asdict(self.launch), "beat": time.time()}).encode())


@dataclass(frozen=True, slots=True)
class Attempt:
    """An owner of a folder of checkpoints: one worker group.

    Args:
        launch: launch of the worker group; None if no driver holds the folder.
    """

    number: int
    token: str
    launch: Launch | None = None

    @classmethod
    def claim(cls, root: Folder, launch: Launch | None = None, within_s: float | None = None) -> Attempt:
        """Become the owner of the folder. One process of a worker group calls this at its start.

        Args:
            within_s: how long to wait for the driver's `launch.json`; default: a minute.

        Raises:
            NotSharedError: this process does not see the folder that the driver wrote to.
            TakenOverError: another launch holds the folder.
            OSError: the folder cannot be read or written.
        """
        if launch is not None:
            _check_launch(root, launch, SHOWN_WITHIN_S if within_s is None else within_s)
        earlier = [order[0] for name in root.names() if (order := order_of(name))]
        attempt = cls(max([_read_attempt(root).number, *earlier]) + 1, uuid.uuid4().hex, launch)
        raw: dict[str, Any] = {"attempt": attempt.number, "token": attempt.token}
        if launch is not None:
            raw["launch"] = asdict(launch)
        root.write(_ATTEMPT_FILE, json.dumps(raw).encode())
        return attempt

    def is_shown_in(self, root: Folder) -> bool:
        """Whether this process reads the claim, or a later one of the same launch, within a minute.

        Raises:
            OSError: the folder cannot be read.
        """

        def is_shown() -> bool:
            owner = _read_attempt(root)
            if self.launch is None or owner.launch is None:
                return owner.token == self.token
            return owner.launch.token == self.launch.token and owner.number >= self.number

        return _becomes_true(is_shown, SHOWN_WITHIN_S)

    def check(self, root: Folder) -> None:
        """Check that this attempt still owns the folder.

        Raises:
            FencedError: another attempt owns the folder; TakenOverError if it belongs to another launch.
        """
        owner = _read_attempt(root)
        if owner.token == self.token:
            return
        if self.launch is not None and owner.launch is not None and owner.launch.token != self.launch.token:
            raise TakenOverError(root.path, str(owner.launch))
        raise FencedError(
            f"{root.path} belongs to attempt {owner.number} of the run; attempt {self.number} may no longer write there"
        )


def folder_name(step: int, attempt: int) -> str:
    """Name of a checkpoint's folder."""
    return f"step_{step:08d}-{attempt:04d}"


def order_of(name: str) -> tuple[int, int] | None:
    """(attempt, step) of a checkpoint's folder, which orders checkpoints by age; None for other folders.

    Steps alone do not order checkpoints: after damage, an attempt may resume from an older step.
    """
    match = _FOLDER_NAME.fullmatch(name)
    if match is None:
        return None
    step, attempt = (match[1], match[2]) if match[3] is None else (match[3], match[4])
    return int(attempt or 0), int(step)


def increment_name(base: str, step: int, attempt: int) -> str:
    """Name of an increment's folder.

    Args:
        base: folder of the full checkpoint at the start of its chain.
    """
    return f"{base}.increment-{step:08d}-{attempt:04d}"


def base_of(name: str) -> str:
    """The folder of the full checkpoint at the start of the chain of an increment; `name` itself otherwise."""
    return name.partition(".increment-")[0]


def _check_launch(root: Folder, launch: Launch, within_s: float) -> None:
    if not _becomes_true(lambda: current_launch(root) is not None, within_s):
        raise NotSharedError(
            root.path,
            f"{LAUNCH_FILE}, which the driver on node {launch.host} wrote, was not found on node "
            f"{socket.gethostname()} for {within_s:g} s, or another driver took over this run and ended",
        )
    current = current_launch(root)
    if current is not None and current.token != launch.token:
        raise TakenOverError(root.path, str(current))


def _becomes_true(condition: Callable[[], bool], within_s: float) -> bool:
    """Whether a condition is true, or becomes true within a time."""
    end = time.monotonic() + within_s
    for wait_s in waits_s(0.05, 1.0):
        if condition():
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(wait_s)
    raise AssertionError("waits never end")


def _read_attempt(root: Folder) -> Attempt:
    """The owner of a folder; attempt 0 without an owner."""
    try:
        raw = json.loads(root.read(_ATTEMPT_FILE))
        return Attempt(int(raw["attempt"]), str(raw["token"]), Launch.from_dict(raw.get("launch")))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return Attempt(0, "")


def _pid_namespace() -> str:
    with suppress(OSError):  # Linux only
        return os.readlink("/proc/self/ns/pid")
    return ""
