"""Connects to Ray: to the cluster of RAY_ADDRESS, or to a Ray that starts on this machine alone."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from typing import Any

from rayrec._runtime.cgroup_limits import cpus
from rayrec._runtime.debug import debugging
from rayrec._runtime.imports import quick_imports
from rayrec._runtime.ray_internals import LOCAL_SYSTEM, without_helpers
from rayrec._runtime.stop_signals import handlers_kept


class RayStartError(ValueError):
    """Ray did not start on this machine, or does not answer at RAY_ADDRESS."""


class _Start:
    """A start of Ray in a thread, which stays: Linux ends Ray's processes with the thread that started them.

    Ray starts in another thread, because the exception that a stop signal raises could get lost inside of it: Python
    ignores exceptions of hooks that run at a fork. There Ray installs no handlers of signals either.
    """

    def __init__(self, num_cpus: int) -> None:
        self._num_cpus = num_cpus
        self._started: Future[None] = Future()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="rayrec-ray", daemon=True).start()

    def _run(self) -> None:
        # Ray's processes inherit this: when the terminal is closed, a run needs them for its final checkpoint.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            with quick_imports(), nullcontext() if debugging() else without_helpers():
                _init(self._num_cpus)
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        self._ended.wait()

    def wait(self) -> None:
        """Wait until Ray is there; raises the error of its start. If a stop signal raises an exception meanwhile, Ray
        ends before the exception is passed on."""
        try:
            self._started.result()
        except Exception:
            raise
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End Ray, also if it still starts."""
        wait([self._started])
        if self._started.exception() is None and not self._ended.is_set():
            import ray

            ray.shutdown()
        self._ended.set()


_begun: _Start | None = None


@contextmanager
def begun(num_cpus: int) -> Iterator[None]:
    """Start Ray on this machine while the body runs. `init_local` in the body waits for it; Ray ends with the body.

    Args:
        num_cpus: CPUs that tasks and actors may reserve.
    """
    global _begun
    _begun = start = _Start(num_cpus)
    try:
        yield
    finally:
        _begun = None
        start.end()


def is_begun() -> bool:
    """Whether the body of `begun` runs: its Ray starts, or has started."""
    return _begun is not None


def is_connected() -> bool:
    """Whether this process is connected to Ray. Does not import Ray."""
    if "ray" not in sys.modules:
        return False
    import ray  # waits for another thread that imports it

    return bool(ray.is_initialized())


def init_local(num_cpus: int) -> Callable[[], None]:
    """Start Ray on this machine and connect to it, or wait for the start that has begun.

    Args:
        num_cpus: CPUs that tasks and actors may reserve.

    Returns:
        A function that ends Ray, unless it ends with the body of `begun`.

    Raises:
        RayStartError: Ray's processes did not start in time.
    """
    start = _begun or _Start(num_cpus)
    start.wait()
    return start.end if _begun is None else lambda: None


def connect() -> Callable[[], None]:
    """Connect to the Ray of RAY_ADDRESS (set in a Ray job), else to one that starts on this machine.

    Without an address, Ray would try the last one started on this machine, which may have died.

    Returns:
        A function that ends the connection, and a Ray that this call started.

    Raises:
        RayStartError: no Ray answers at RAY_ADDRESS, or Ray did not start here.
    """
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        return init_local(max(1, int(cpus())))
    import ray

    try:
        with handlers_kept():
            ray.init(address=address, **quiet_unless_debug())
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RayStartError(
            f"RAY_ADDRESS={address}: no Ray cluster answers ({reason}). Start one with `ray start --head`, "
            f"or unset RAY_ADDRESS to use a local Ray."
        ) from error
    return ray.shutdown


def _init(num_cpus: int) -> None:
    import ray

    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            _system_config=LOCAL_SYSTEM,
            **quiet_unless_debug(),
        )
    except Exception as error:
        # Ray waits 30 s for its raylet, which no setting changes, and then raises a plain Exception.
        if type(error) is not Exception or "timed out during startup" not in str(error):
            raise
        raise RayStartError(
            "Ray did not start on this machine within 30 s: the machine is too busy, or its disk or memory is full. "
            "Run the command again, or start Ray first with `ray start --head` and set RAY_ADDRESS=auto."
        ) from error


def quiet_unless_debug() -> dict[str, Any]:
    """Arguments of `ray.init` that hide Ray's own messages, unless RAYREC_DEBUG is set."""
    return {} if debugging() else {"log_to_driver": False, "logging_level": logging.ERROR}
