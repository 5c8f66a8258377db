"""How fast the thread of a save goes: a small share of a CPU beside training, all it can when somebody waits for it."""

from __future__ import annotations

import threading
import time

# Of one CPU per rank where training needs them all. A step ends when its slowest rank does, and loses more than the
# writer's own time (caches, memory): shares of 0.05 and 0.025 made steps of two ranks 1.11 and 1.04 times as long.
SHARE = 0.025
FREE_S = 0.05  # of CPU time, before the first rest: a small save is no burden, and the sooner it is there the better


class StoppedError(Exception):
    """The save was given up."""


class Pace:
    """Between two blocks a thread calls `rest`; others may hurry it or stop it.

    A lower priority alone does not keep a thread out of the way: it runs while a rank waits for another one, and what
    it has begun in the system (a block copied to the page cache) is not interrupted when the step goes on.

    Args:
        share: of one CPU that the thread may use; 1: as much as it gets.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        self._stopped, self._hurried = threading.Event(), threading.Event()
        self._used = FREE_S  # seconds of CPU up to the last rest
        self._moved = time.monotonic()

    @property
    def still_s(self) -> float:
        """Seconds since the thread last called `rest` or `wait`."""
        return time.monotonic() - self._moved

    def hurry(self) -> None:
        """Somebody waits: no more rests."""
        self._hurried.set()

    def stop(self) -> None:
        """Give up: `rest` and `wait` raise from now on."""
        self._stopped.set()
        self._hurried.set()

    def rest(self) -> None:
        """Sleep until the thread has used no more than its share since the last call.

        Raises:
            StoppedError: the save was given up.
        """
        if (now := time.thread_time()) > self._used:
            self._hurried.wait((now - self._used) * (1.0 / self._share - 1.0))
            self._used = time.thread_time()
        self.wait(0.0)

    def wait(self, seconds: float) -> None:
        """For what another rank does.

        Raises:
            StoppedError: the save was given up.
        """
        self._moved = time.monotonic()
        if self._stopped.wait(seconds):
            raise StoppedError
