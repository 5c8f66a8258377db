"""Debug mode: tracebacks and the messages of other libraries."""

from __future__ import annotations

import os


def debugging() -> bool:
    """Whether to show tracebacks and Ray's own messages: RAYREC_DEBUG=1, or `--debug` of a command."""
    return os.environ.get("RAYREC_DEBUG", "").lower() not in ("", "0", "false", "no")
