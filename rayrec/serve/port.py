"""The port of a service on this machine: free before it starts, and silent after it has ended."""

from __future__ import annotations

import errno
import socket
import sys
import time

from rayrec.serve.config import ServeConfig


def wait_until_free(config: ServeConfig, patience_s: float = 70) -> None:
    """Tries the port as what will listen there does, and waits where only connections of an ended service hold it.

    Linux keeps a closed connection for a minute, and Ray's replicas, which listen with `direct`, do not share its port.

    Raises:
        OSError: the address cannot be listened on.
    """
    deadline, said = time.monotonic() + patience_s, False
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, not config.direct)
            try:
                return probe.bind((config.host, config.port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE or _answers(config) or time.monotonic() > deadline:
                    raise
        if not said:
            text = f"port {config.port} is free within a minute, when closed connections to it are forgotten; waiting"
            print(text, file=sys.stderr, flush=True)
            said = True
        time.sleep(0.2)


def _answers(config: ServeConfig) -> bool:
    """Whether a process listens on the port."""
    with socket.socket() as client:
        return client.connect_ex((config.host, config.port)) == 0


def wait_until_silent(config: ServeConfig) -> None:
    """Waits a while until nothing listens on the port: a replica's process may be on its way out."""
    deadline = time.monotonic() + 15
    while _answers(config) and time.monotonic() < deadline:
        time.sleep(0.1)
