"""An application behind a real HTTP server, in a thread of this process."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn

from rayrec.serve import JSON, ClientConfig, Clients, Service, TlsConfig
from rayrec.serve.batching import Batcher
from rayrec.serve.v2_grpc import serving

GOOD = {"user": 1, "item": 2, "tags": [1, 2], "age": 0.5, "city": "city 1"}


def clients_of(folder: Path, check_files_s: float = 1.0, **tokens: str) -> Clients:
    """Clients with tokens in files."""
    for name, token in tokens.items():
        (folder / name).write_text(token)
    return Clients([ClientConfig(name=name, token_file=str(folder / name)) for name in tokens], check_files_s)


class Server:
    """Runs until it is closed."""

    def __init__(self, app: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        config = uvicorn.Config(app, port=self.port, log_level="error", lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        return self.ask_all(method, path, body, **headers)[:2]

    def ask_all(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Status, body and headers of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, sent, {"content-type": JSON, **named})
        response = connection.getresponse()
        data = response.read()
        connection.close()
        is_json = (response.getheader("content-type") or "").startswith(JSON)
        return response.status, json.loads(data) if is_json else data, dict(response.getheaders())

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)


class GrpcServer:
    """The gRPC side of a service, in a thread of this process."""

    def __init__(self, service: Service, clients: Clients | None = None, tls: TlsConfig | None = None) -> None:
        front = Batcher(service) if clients is None else Batcher(service, clients)
        self.port, self._loop = 0, asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run(front, tls)))
        self._thread.start()
        assert self._started.wait(30)

    async def _run(self, front: Batcher, tls: TlsConfig | None) -> None:
        self._stop = asyncio.Event()
        async with serving(front, "127.0.0.1", 0, tls) as self.port:
            self._started.set()
            await self._stop.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._loop.close()
