"""Which launch of a run holds its folder of checkpoints, and whether that launch is still going.

A driver writes `launch.json` when it starts, writes it again every few seconds, and removes it when it ends. Clocks of
two machines are not compared: a launch is going on as long as its file changes.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from rayrec.checkpoint.errors import InUseError
from rayrec.storage.folder import Folder

FILE = "launch.json"
BEAT_S = 15.0
DEAD_S = 60.0  # without a beat
RELEASE_S = 10.0  # that the end of a launch waits for storage which does not answer
LONG_AGO_S = 1800.0  # more than clocks of machines differ by

_held: set[str] = set()  # tokens of this process


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of a run's driver.

    Args:
        space: of process ids; containers of one host may have several.
        began: seconds since 1970.
    """

    token: str
    host: str
    space: str
    pid: int
    began: float

    @classmethod
    def here(cls) -> Launch:
        """A new one, of this process."""
        return cls(uuid.uuid4().hex, socket.gethostname(), _space(), os.getpid(), time.time())

    @classmethod
    def of(cls, raw: Any) -> Launch | None:
        """What `asdict` gave; None for anything else."""
        try:
            return cls(str(raw["token"]), str(raw["host"]), str(raw["space"]), int(raw["pid"]), float(raw["began"]))
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def ended(self) -> bool:
        """Whether its process is known to have ended: only on its own host."""
        if (self.host, self.space) != (socket.gethostname(), _space()):
            return False
        if self.pid == os.getpid():
            return self.token not in _held  # of an earlier process with this number
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # another user's
            return False
        return False

    def __str__(self) -> str:
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.began))
        return f"process {self.pid} on {self.host}, started {began}"


def holder(root: Folder) -> Launch | None:
    """The launch that holds a folder; None where there is no `launch.json`.

    Raises:
        OSError: it cannot be read.
    """
    return _read(root)[0]


def _read(root: Folder) -> tuple[Launch | None, float]:
    """The holder, and its last beat by its own clock."""
    try:
        raw = json.loads(root.read(FILE))
        return Launch.of(raw["launch"]), float(raw["beat"])
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return None, 0.0


class Lease:
    """Holds a folder of checkpoints for this launch: `take` it, then it is a context manager.

    Args:
        tell: called with a line where another launch is waited for.
    """

    def __init__(self, root: Folder, tell: Callable[[str], object] = lambda text: None) -> None:
        self._root, self._tell = root, tell
        self.launch = Launch.here()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="rayrec-lease", daemon=True)

    def take(self) -> Lease:
        """Hold the folder, where no other launch does, or where that has ended without a word.

        Raises:
            InUseError: another launch is still going.
            OSError: the folder cannot be read or written.
        """
        seen, beat = _read(self._root)
        if seen is not None and not seen.ended and time.time() - beat < LONG_AGO_S:
            self._await_end(seen, beat)
        self._write()
        _held.add(self.launch.token)
        return self

    def _await_end(self, launch: Launch, beat: float) -> None:
        if launch.token not in _held:
            self._tell(f"{self._root.path} is held by {launch}; waiting up to {DEAD_S:g} s for a sign of it …")
            until = time.monotonic() + DEAD_S
            while (now := _read(self._root)) == (launch, beat):
                if time.monotonic() >= until or launch.ended:
                    return
                time.sleep(min(1.0, DEAD_S / 20))
            if now[0] is None:
                return
            launch = now[0]
        raise InUseError(
            f"{self._root.path} is in use by a run that is still going ({launch}); wait for it, stop it, or choose "
            f"another name"
        )

    @property
    def held(self) -> bool:
        """Whether the folder is still this launch's.

        Raises:
            OSError: it cannot be read.
        """
        found = holder(self._root)
        return found is not None and found.token == self.launch.token

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(timeout=RELEASE_S)
        _held.discard(self.launch.token)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            with suppress(OSError):  # storage that is away; another launch may then take the folder over
                if not self.held:
                    return
                self._write()
        with suppress(OSError):  # else it is found dead later
            if self.held:
                self._root.remove(FILE)
            if not self._root.names():
                self._root.remove_all()  # a launch that was refused leaves nothing

    def _write(self) -> None:
        self._root.write(FILE, json.dumps({"launch": asdict(self.launch), "beat": time.time()}).encode())


def _space() -> str:
    with suppress(OSError):  # Linux only
        return os.readlink("/proc/self/ns/pid")
    return ""
