"""A local S3 server for tests, and a door before it that can be shut."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}


@contextmanager
def s3_server() -> Iterator[str]:
    """host:port of a server, with keys for it in the environment."""
    from moto.backends import get_backend
    from moto.server import ThreadedMotoServer

    before = {name: os.environ.get(name) for name in KEYS}
    os.environ.update(KEYS)
    moto = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"{host}:{port}"
    moto.stop()
    for account in get_backend("s3").values():  # all servers of a process share their buckets
        for backend in account.values():
            backend.reset()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def s3_bucket(name: str) -> Iterator[str]:
    """Options of URIs in a new bucket on a server of its own."""
    import pyarrow.fs as pafs

    with s3_server() as server:
        options = f"?endpoint_override={server}&scheme=http&region=us-east-1"
        filesystem, _ = pafs.FileSystem.from_uri(f"s3://{name}{options}&allow_bucket_creation=true")
        filesystem.create_dir(name)
        yield options


class Door:
    """Forwards connections to a server, until it is shut: then those that are open break and new ones are refused."""

    def __init__(self, server: str) -> None:
        host, port = server.split(":")
        self._server, self._threads = (host, int(port)), []
        self._listening = self._listen(0)
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._open: list[socket.socket] = []

    def _listen(self, port: int) -> socket.socket:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(64)
        threading.Thread(target=self._accept, args=(listening,), daemon=True).start()
        return listening

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                near, _ = listening.accept()
            except OSError:
                return
            self._begin(near)

    def _begin(self, near: socket.socket) -> None:
        far = socket.create_connection(self._server)  # the server itself goes on
        self._open += [near, far]
        for a, b in ((near, far), (far, near)):
            threading.Thread(target=_pump, args=(a, b), daemon=True).start()

    def shut(self) -> None:
        port = self._listening.getsockname()[1]
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.address = f"127.0.0.1:{port}"
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open.clear()

    def reopen(self) -> None:
        self._listening = self._listen(int(self.address.split(":")[1]))


class Faulty(Door):
    """A door at which every third connection meets a fault, in turn: answered 503, slow by half a second, or cut off.

    `met` is the faults that were met.
    """

    def __init__(self, server: str) -> None:
        self.met, self._seen, self._faults = set[str](), 0, cycle(("503", "slow", "cut"))
        super().__init__(server)

    def _begin(self, near: socket.socket) -> None:
        self._seen += 1
        if self._seen % 3 != 1:
            super()._begin(near)
            return
        fault = next(self._faults)
        self.met.add(fault)
        if fault == "slow":
            timer = threading.Timer(0.5, super()._begin, args=(near,))
            timer.daemon = True
            timer.start()
            return
        near.recv(1 << 16)
        if fault == "503":
            body = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
            head = f"HTTP/1.1 503 Slow Down\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            near.sendall(head.encode() + body)
        near.shutdown(socket.SHUT_RDWR)
        near.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while some := source.recv(1 << 16):
            sink.sendall(some)
        sink.shutdown(socket.SHUT_WR)
