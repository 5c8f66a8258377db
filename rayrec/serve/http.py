"""The HTTP side: an ASGI application around a `Service`, for Ray Serve or any ASGI server.

| | |
|---|---|
| `POST /score`, `POST /score/MODEL` | rows in, probabilities out: JSON, or an Arrow IPC stream for either |
| `GET /schema`, `GET /schema/MODEL` | what a request must hold |
| `GET /healthz` | versions that answer, versions that were refused; needs no token |
| `GET /metrics` | Prometheus |

What takes long is a thread's work (`batching.py`): the event loop answers all but `/score` at any load.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import pyarrow as pa

from rayrec.serve.batching import Batcher
from rayrec.serve.clients import Clients, check_model
from rayrec.serve.errors import BadRequest
from rayrec.serve.requests import ARROW, JSON
from rayrec.serve.service import Answer, Service

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

DEADLINE = "X-Deadline-Ms"


class App:
    """ASGI.

    Args:
        clients: who may ask; default: everyone.
        together: requests that wait are scored together; False: each alone.
    """

    def __init__(self, service: Service, clients: Clients | None = None, together: bool = True) -> None:
        self._service, self._clients = service, clients or Clients()
        self._batcher = Batcher(service, together)
        self._queued = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
        more: list[tuple[bytes, bytes]] = []
        try:
            status, kind, body = await self._answer(scope, path, receive)
        except BadRequest as error:
            status, kind, body = error.status, JSON, json.dumps(error.to_dict()).encode()
            more = [(b"retry-after", b"1")] if status in (429, 503) else []
        except Exception as error:
            text = f"{type(error).__name__}: the request could not be answered; the server's log says why"
            status, kind, body = 500, JSON, json.dumps({"error": text}).encode()
            _log(error)
        if path.startswith("/score"):
            name = _model_in(path, "/score") or self._service.default
            self._service.measures.request(name if name in self._service.names else "other", status)
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode()), *more]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, path: str, receive: Receive) -> tuple[int, str, bytes]:
        method, headers = scope["method"], {key.lower(): value for key, value in scope["headers"]}
        if path == "/healthz":
            return 200, JSON, json.dumps(self._service.health()).encode()
        client = self._clients.admit(headers.get(b"authorization", b""), path.startswith("/score"))
        if path == "/metrics":
            return 200, "text/plain; version=0.0.4", self._service.metrics()
        if (name := _model_in(path, "/schema")) is not None and method == "GET":
            return 200, JSON, json.dumps(self._service.schema(name or None)).encode()
        if (name := _model_in(path, "/score")) is None:
            raise BadRequest(404, "there are POST /score, GET /schema, GET /healthz and GET /metrics")
        check_model(client, name or self._service.default)
        if method != "POST":
            raise BadRequest(405, f"{method} {path}: send the rows with POST")
        kind = headers.get(b"content-type", JSON.encode()).decode("latin-1")
        if not kind.startswith((JSON, ARROW)):
            raise BadRequest(415, f"content type {kind!r}: send {JSON} or {ARROW}")
        if (coding := headers.get(b"content-encoding", b"identity")) != b"identity":
            raise BadRequest(415, f"content encoding {coding.decode('latin-1')!r}: send the body as it is")
        wanted = headers.get(b"accept", b"*/*").decode("latin-1")
        arrow = wanted.startswith(ARROW) or (wanted == "*/*" and kind.startswith(ARROW))
        try:
            async with asyncio.timeout(_deadline_s(headers)) as limit:
                answer = await self._score(headers, receive, kind, name or None)
                if asyncio.get_running_loop().time() > (limit.when() or float("inf")):
                    raise TimeoutError  # the loop was kept from noticing
        except TimeoutError:
            raise BadRequest(504, f"not scored within the {DEADLINE} of the request; it was given up") from None
        return (200, ARROW, _as_arrow(answer)) if arrow else (200, JSON, _as_json(answer))

    async def _score(self, headers: dict[bytes, bytes], receive: Receive, kind: str, model: str | None) -> Answer:
        self._check_queue()  # before the body is read
        limits = self._service.limits
        try:
            async with asyncio.timeout(limits.body_s):
                body = await self._body(headers, receive)
        except TimeoutError:
            raise BadRequest(408, f"the body was not there after {limits.body_s:g} s") from None
        self._check_queue()
        self._queued += 1
        try:
            return await self._batcher.score(await self._batcher.read(body, kind, model))
        finally:
            self._queued -= 1

    def _check_queue(self) -> None:
        if self._queued >= self._service.limits.queue:
            raise BadRequest(503, f"{self._queued} requests wait already: ask again after a second, or another replica")

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """Refused as soon as it is known to be too long; no more of it is kept."""
        most = self._service.limits.body_bytes
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > most:
            raise BadRequest(413, f"the body has {int(declared):,} bytes, a request at most {most:,}; send fewer rows")
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise BadRequest(400, "the connection ended before the body did")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise BadRequest(413, f"the body has more than {most:,} bytes; send fewer rows")
            if not message.get("more_body", False):
                return b"".join(parts)


def _deadline_s(headers: dict[bytes, bytes]) -> float | None:
    """Seconds that a request gives the service; None: no limit.

    Raises:
        BadRequest: they are no number above 0.
    """
    text = headers.get(DEADLINE.lower().encode(), b"").decode("latin-1")
    if not text:
        return None
    try:
        ms = float(text)
    except ValueError:
        ms = 0.0
    if not 0 < ms < float("inf"):
        raise BadRequest(400, f"{DEADLINE}: {text[:40]}: give milliseconds, from the request's arrival to its answer")
    return ms / 1e3


def _model_in(path: str, root: str) -> str | None:
    """The model that `root/MODEL` names, "" for `root` itself, None for another path."""
    if path == root:
        return ""
    return path.removeprefix(f"{root}/") if path.startswith(f"{root}/") else None


def _as_json(answer: Answer) -> bytes:
    # nine digits name a float32, however small: a probability of 4e-8 keeps its rank
    scores = {label: [float(f"{one:.9g}") for one in values.tolist()] for label, values in answer.scores.items()}
    return json.dumps({"model": answer.model, "version": answer.version, "scores": scores}).encode()


def _as_arrow(answer: Answer) -> bytes:
    table = pa.table({label: pa.array(values) for label, values in answer.scores.items()})
    table = table.replace_schema_metadata({"model": answer.model, "version": answer.version})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _log(error: Exception) -> None:
    import logging

    logging.getLogger("rayrec.serve").error("a request failed", exc_info=error)
