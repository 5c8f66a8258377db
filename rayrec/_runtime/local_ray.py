"""Starts a Ray on this machine alone."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import nullcontext
from typing import Any

from rayrec._runtime.debug import debugging
from rayrec._runtime.imports import quick_imports
from rayrec._runtime.ray_internals import LOCAL_SYSTEM, without_helpers


class LocalRayError(ValueError):
    """Ray did not start on this machine."""


def init_local(num_cpus: int) -> Callable[[], None]:
    """Start Ray on this machine and connect to it.

    If a stop signal raises an exception meanwhile, Ray ends before the exception is passed on. Ray starts in another
    thread, because the exception could get lost inside of it: Python ignores exceptions of hooks that run at a fork.

    Args:
        num_cpus: CPUs that tasks and actors may reserve.

    Returns:
        A function that ends Ray.

    Raises:
        LocalRayError: Ray's processes did not start in time.
    """
    started: Future[None] = Future()
    ended = threading.Event()

    def start() -> None:
        # Ray's processes inherit this: when the terminal is closed, a run needs them for its final checkpoint.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            with quick_imports(), nullcontext() if debugging() else without_helpers():
                _init(num_cpus)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        ended.wait()  # Linux ends Ray's processes with the thread that started them

    def end() -> None:
        import ray

        ray.shutdown()
        ended.set()

    threading.Thread(target=start, name="rayrec-ray", daemon=True).start()  # where Ray installs no handlers of signals
    try:
        started.result()
    except Exception:
        raise
    except BaseException:
        wait([started])
        end()
        raise
    return end


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
        raise LocalRayError(
            "Ray did not start on this machine within 30 s: the machine is too busy, or its disk or memory is full. "
            "Run the command again, or start Ray first with `ray start --head` and set RAY_ADDRESS=auto."
        ) from error


def quiet_unless_debug() -> dict[str, Any]:
    """Arguments of `ray.init` that hide Ray's own messages, unless RAYREC_DEBUG is set."""
    return {} if debugging() else {"log_to_driver": False, "logging_level": logging.ERROR}
