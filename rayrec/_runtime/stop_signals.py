"""The signals that stop a command. Imports little, because commands need it first."""

from __future__ import annotations

import signal

# Closing a terminal sends SIGHUP. If SIGHUP is ignored from the start, as under `nohup`, it stays ignored.
STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    *(() if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)),
)
