"""The signals that stop a command. Imports little, because commands need it first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Closing a terminal sends SIGHUP. If SIGHUP is ignored from the start, as under `nohup`, it stays ignored.
STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    *(() if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)),
)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the handlers of stop signals after the body: Ray installs its own when it starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
