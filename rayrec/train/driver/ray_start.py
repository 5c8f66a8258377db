"""Starts a Ray for a run: how it is set up, and a start beside a command's imports, as both take seconds.

Little is imported here, so that it can begin at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rayrec._runtime.cgroup_limits import cpus
from rayrec._runtime.imports import quick_imports
from rayrec._runtime.local_ray import init_local
from rayrec._runtime.stop_signals import STOP_SIGNALS
from rayrec.train.driver.local_group import forget_early, import_workers, start_early

# Ray Train notices lost workers by polling, every 2 s by default; and would move workers to a folder of its own, where
# relative imports of a user's model end.
TRAIN_ENV = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
}
# Until Ray has noticed that a node is lost, it waits, so long, for room on it, and then looks again.
ELASTIC_ENV = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "4"}
# On one machine there are no nodes to be taken away and no metrics to be scraped: fewer processes to start.
LOCAL_ENV = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class _Start:
    """A start of a local Ray in a thread, which stays: Linux ends Ray's processes with the thread that started them."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._imported, self._ready, self._closed = (threading.Event() for _ in range(3))
        threading.Thread(target=self._import, name="rayrec-ray-import", daemon=True).start()
        self._thread = threading.Thread(target=self._run, name="rayrec-ray-start", daemon=True)
        self._thread.start()

    def _import(self) -> None:
        with suppress(Exception):  # reported where it is used
            import_workers()
        self._imported.set()

    def _run(self) -> None:
        with suppress(Exception):
            with _signal_actions_kept():
                start_local()
            self._imported.wait()
            start_early(min(self._workers, max(1, int(cpus()))))
        self._ready.set()
        self._closed.wait()

    def imported(self) -> None:
        """Waits until workers can be started as soon as Ray is there.

        Not imported by who waits: a stop signal would break off an import for which the start then waits for ever.
        """
        self._imported.wait()

    def awaited(self) -> bool:
        """Whether it went well; waits for its end."""
        self._ready.wait()
        import ray

        return ray.is_initialized()

    def close(self) -> None:
        if self.awaited():
            import ray

            ray.shutdown()
        forget_early()
        self._closed.set()
        self._thread.join()


@contextmanager
def _signal_actions_kept() -> Iterator[None]:
    """Ray sets native handlers of stop signals, which abort; only the main thread may set Python's again."""
    libc = ctypes.CDLL(None)
    kept = {number: ctypes.create_string_buffer(1024) for number in STOP_SIGNALS}  # more than a struct sigaction
    for number, action in kept.items():
        libc.sigaction(int(number), None, action)
    try:
        yield
    finally:
        for number, action in kept.items():
            libc.sigaction(int(number), action, None)


_start: _Start | None = None


def start_local() -> None:
    """A Ray on this machine alone, with the CPUs that this process may use."""
    with _hangups_blocked():
        init_local(max(1, int(cpus())))


@contextmanager
def _hangups_blocked() -> Iterator[None]:
    """Processes that are started meanwhile do not hear that the terminal is closed, as they do not hear Ctrl-C: the
    run needs them for its last checkpoint."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def defaults(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that the user has not set, for the time of the body."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def begun_for(config: Path, overrides: Sequence[str]) -> Iterator[None]:
    """Where the config wants a local Ray, start it in a thread while the body imports and reads; it ends with the body.

    `awaited` waits for it. A start that fails is left to the run, which tries it again and reports why.
    """
    global _start
    workers = _local_workers(config, overrides)
    if not workers:
        yield
        return
    with defaults({**TRAIN_ENV, **LOCAL_ENV}):
        _start = _Start(workers)
        try:
            with quick_imports():
                _start.imported()
            yield
        finally:
            _start.close()
            _start = None


def awaited() -> bool:
    """Whether a local Ray that was begun beside the imports is there; waits for it."""
    return _start is not None and _start.awaited()


def _local_workers(config: Path, overrides: Sequence[str]) -> int:
    """How many workers a run wants on a local Ray, by a look at the file alone, before the modules that understand it;
    0 where that is not certain."""
    import yaml

    if os.environ.get("RAY_ADDRESS"):
        return 0
    try:
        workers = yaml.safe_load(config.read_text(encoding="utf-8")).get("trainer", {}).get("num_workers", 2)
        for override in overrides:
            name, _, value = override.partition("=")
            if name == "trainer":
                return 0
            workers = yaml.safe_load(value) if name == "trainer.num_workers" else workers
    except Exception:  # whatever is wrong with the file is reported where it is read
        return 0
    return max(0, workers) if type(workers) is int else 0
