"""The signals that ask a command to stop. Little is imported here: a command needs it before all else."""

from __future__ import annotations

import signal

# A terminal that is closed sends SIGHUP; where it is ignored from the start, as under `nohup`, it stays so.
STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    *(() if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)),
)
