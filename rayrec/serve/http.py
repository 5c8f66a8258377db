"""The HTTP side: an ASGI application around a `Service`, for Ray Serve or any ASGI server.

| | |
|---|---|
| `POST /score`, `POST /score/MODEL` | rows in, probabilities out: JSON, or an Arrow IPC stream for either |
| `POST /retrieve` | histories or vectors in, the best items out, where there is an index; `retrieval.py` |
| `GET /schema`, `GET /schema/MODEL` | what a request must hold |
| `GET /healthz` | versions that answer, versions that were refused; needs no token |
| `GET /metrics` | Prometheus |
| `GET /v2…`, `POST /v2/models/MODEL/infer` | the open inference protocol (`v2.py`); its health needs no token |

What takes long is a thread's work (`batching.py`): the event loop answers all but `/score` at any load.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import pyarrow as pa
from starlette.datastructures import Headers
from starlette.responses import Response

from rayrec.serve import v2
from rayrec.serve.batching import Batcher
from rayrec.serve.clients import Clients, check_model
from rayrec.serve.errors import RequestError
from rayrec.serve.requests import ARROW, JSON
from rayrec.serve.retrieval import Retrieval
from rayrec.serve.routing import Answer, Target, request_id
from rayrec.serve.service import Service
from rayrec.serve.v2_http import JSON_BYTES, ModelPath, numbers, read_request, written

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

DEADLINE, REQUEST_ID, ROUTING_KEY = "X-Deadline-Ms", "X-Request-Id", "X-Routing-Key"
_logger = logging.getLogger("rayrec.serve")


class App:
    """ASGI.

    Args:
        clients: who may ask; default: everyone.
        together: requests that wait are scored together; False: each alone.
        beside: what runs in the same event loop from the start of the application to its end, as a gRPC server.
        retrieval: answers `/retrieve`.
    """

    def __init__(
        self,
        service: Service,
        clients: Clients | None = None,
        together: bool = True,
        beside: Callable[[Batcher], AbstractAsyncContextManager[object]] | None = None,
        retrieval: Retrieval | None = None,
    ) -> None:
        self.front, self._service = Batcher(service, clients, together), service
        self._beside, self._retrieval = beside, retrieval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
        headers = Headers(scope=scope)
        number = request_id(headers.get(REQUEST_ID, ""))
        try:
            reply = await self._answer(scope["method"], path, headers, receive, number)
        except RequestError as error:
            more = {"retry-after": "1"} if error.status in (429, 503) else None
            reply = _json(error.to_dict(), error.status, more)
        except Exception as error:
            text = f"{type(error).__name__}: the request could not be answered; the server's log says why"
            reply = _json({"error": text}, 500)
            _logger.error("request %s failed", number, exc_info=error)
        if (name := _scored_model(path)) is not None:
            name = name or self._service.default
            self._service.stats.request(name if name in self._service.names else "other", reply.status_code)
        _logger.debug("request %s: %s", number, reply.status_code)
        reply.headers.setdefault(REQUEST_ID, number)
        await reply(scope, receive, send)

    async def _answer(self, method: str, path: str, headers: Headers, receive: Receive, number: str) -> Response:
        if path == "/healthz":
            return _json(self._service.health())
        if path in ("/v2/health/live", "/v2/health/ready"):
            return Response(b"", media_type=JSON)
        scored = _scored_model(path)
        token = headers.get("authorization", "").encode("latin-1")
        client = self.front.clients.admit(token, scored is not None or path == "/retrieve")
        if path == "/metrics":
            return Response(self._service.metrics(), headers={"content-type": "text/plain; version=0.0.4"})
        if (name := _model_in(path, "/schema")) is not None and method == "GET":
            return _json(self._service.schema(name or None))
        if path == "/v2":
            return _json(v2.server_metadata())
        if scored is None and (place := ModelPath.of(path)) is not None:
            name, loaded = self._service.find(Target(model=place.model, version=place.version))
            return _json({"name": name, "ready": True} if place.verb else v2.metadata(name, loaded))
        if path == "/retrieve" and self._retrieval is not None:
            return Response(await self._retrieve(self._retrieval, method, headers, receive), media_type=JSON)
        if scored is None:
            raise RequestError(404, "there are POST /score, GET /schema, /healthz, /metrics and /v2")
        check_model(client, scored or self._service.default)
        if method != "POST":
            raise RequestError(405, f"{method} {path}: send the rows with POST")
        if (coding := headers.get("content-encoding", "identity")) != "identity":
            raise RequestError(415, f"content encoding {coding!r}: send the body as it is")
        answer = self._infer if path.startswith("/v2/") else self._score
        try:
            async with asyncio.timeout(_deadline_s(headers)) as limit:
                reply = await answer(headers, receive, path, number)
                if asyncio.get_running_loop().time() > (limit.when() or float("inf")):
                    raise TimeoutError  # the loop was kept from noticing
        except TimeoutError:
            raise RequestError(504, f"not scored within the {DEADLINE} of the request; it was given up") from None
        return reply

    async def _score(self, headers: Headers, receive: Receive, path: str, number: str) -> Response:
        kind = headers.get("content-type", JSON)
        if not kind.startswith((JSON, ARROW)):
            raise RequestError(415, f"content type {kind!r}: send {JSON} or {ARROW}")
        wanted = headers.get("accept", "*/*")
        arrow = wanted.startswith(ARROW) or (wanted == "*/*" and kind.startswith(ARROW))
        body = await self._whole_body(headers, receive)
        target = Target(model=_scored_model(path) or None, key=headers.get(ROUTING_KEY) or None, id=number)
        answer = await self.front.score(lambda loaded: loaded.reader.read(body, kind), len(body), target)
        if arrow:
            return Response(_as_arrow(answer), media_type=ARROW)
        return Response(_as_json(answer), media_type=JSON)

    async def _infer(self, headers: Headers, receive: Receive, path: str, number: str) -> Response:
        """In the open inference protocol."""
        place = ModelPath.of(path)
        assert place is not None
        body = await self._whole_body(headers, receive)
        request = read_request(body, headers.get(JSON_BYTES))
        if request.id is not None and not headers.get(REQUEST_ID):
            number = request_id(request.id)
        key = headers.get(ROUTING_KEY) or None
        target = Target(model=place.model, version=place.version, key=key, id=number)
        limits = self._service.limits
        answer = await self.front.score(
            lambda loaded: v2.query_of(request.tensors, loaded.reader.schema, limits), len(body), target
        )
        content, json_bytes = written(answer, request, number)
        more = {REQUEST_ID: number}
        if json_bytes is None:
            return Response(content, headers=more, media_type=JSON)
        more[JSON_BYTES] = str(json_bytes)
        return Response(content, headers=more, media_type="application/octet-stream")

    async def _whole_body(self, headers: Headers, receive: Receive) -> bytes:
        self.front.check_queue()  # before the body is read
        limits = self._service.limits
        try:
            async with asyncio.timeout(limits.body_s):
                return await self._body(headers, receive)
        except TimeoutError:
            raise RequestError(408, f"the body was not there after {limits.body_s:g} s") from None

    async def _retrieve(self, retrieval: Retrieval, method: str, headers: Headers, receive: Receive) -> bytes:
        if method != "POST":
            raise RequestError(405, f"{method} /retrieve: send the queries with POST")
        body = await self._whole_body(headers, receive)
        with self.front.place():
            return await asyncio.to_thread(retrieval.answer, body)

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """Refused as soon as it is known to be too long; no more of it is kept."""
        most = self._service.limits.body_bytes
        declared = headers.get("content-length", "0")
        if declared.isascii() and declared.isdigit() and int(declared) > most:
            raise RequestError(413, f"the body has {int(declared):,} bytes; the limit is {most:,}: send fewer rows")
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestError(400, "the connection ended before the body did")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise RequestError(413, f"the body exceeds the limit of {most:,} bytes; send fewer rows")
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            while True:
                message = await receive()
                if message["type"] == "lifespan.startup" and self._beside is not None:
                    await stack.enter_async_context(self._beside(self.front))
                if message["type"] == "lifespan.shutdown":
                    await stack.aclose()
                    self._service.close()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(value), status, headers, JSON)


def _scored_model(path: str) -> str | None:
    """The model that a path scores with, "" for the default one; None: it scores nothing."""
    place = ModelPath.of(path)
    if place is not None:
        return place.model if place.verb == "infer" else None
    return _model_in(path, "/score")


def _deadline_s(headers: Headers) -> float | None:
    """Seconds that a request gives the service; None: no limit.

    Raises:
        RequestError: they are no number above 0.
    """
    text = headers.get(DEADLINE, "")
    if not text:
        return None
    try:
        ms = float(text)
    except ValueError:
        ms = 0.0
    if not 0 < ms < float("inf"):
        raise RequestError(400, f"{DEADLINE}: {text[:40]}: give milliseconds, from the request's arrival to its answer")
    return ms / 1e3


def _model_in(path: str, root: str) -> str | None:
    """The model that `root/MODEL` names, "" for `root` itself, None for another path."""
    if path == root:
        return ""
    return path.removeprefix(f"{root}/") if path.startswith(f"{root}/") else None


def _as_json(answer: Answer) -> bytes:
    scores = {label: numbers(values.tolist()) for label, values in answer.scores.items()}
    return json.dumps({"model": answer.model, "version": answer.version, "scores": scores}).encode()


def _as_arrow(answer: Answer) -> bytes:
    table = pa.table({label: pa.array(values) for label, values in answer.scores.items()})
    table = table.replace_schema_metadata({"model": answer.model, "version": answer.version})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
