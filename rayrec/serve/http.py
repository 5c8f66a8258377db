"""HTTP: an ASGI application around a `Service`, for Ray Serve or any ASGI server.

| | |
|---|---|
| `POST /score`, `POST /score/MODEL` | rows to probabilities; JSON or Arrow IPC streams |
| `POST /retrieve` | histories or vectors to the best items, if there is an index (`retrieval.py`) |
| `GET /schema`, `GET /schema/MODEL` | the columns of a request |
| `GET /healthz` | active versions, without a token; with one also folders, warnings and refused versions |
| `GET /metrics` | Prometheus metrics |
| `GET /v2…`, `POST /v2/models/MODEL/infer` | the open inference protocol (`v2.py`); its health checks need no token |

A thread does the long work (`batching.py`), so the event loop answers everything except `/score` at any load.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import pyarrow as pa
from starlette.datastructures import Headers
from starlette.responses import Response

from rayrec.serve import v2
from rayrec.serve.batching import Batcher
from rayrec.serve.clients import Clients, check_index_access, check_model
from rayrec.serve.errors import RequestError
from rayrec.serve.requests import ARROW, JSON
from rayrec.serve.retrieval import Retrieval
from rayrec.serve.routing import Answer, Target, request_id
from rayrec.serve.service import INDEX_NAME, Service
from rayrec.serve.v2_http import JSON_BYTES, ModelPath, encode, numbers_text, read_request, with_field

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

DEADLINE, REQUEST_ID, ROUTING_KEY = "X-Deadline-Ms", "X-Request-Id", "X-Routing-Key"
_logger = logging.getLogger("rayrec.serve")


class App:
    """ASGI application.

    Args:
        clients: Clients that may send requests; default: anyone.
        batching: Scores requests that wait in one batch; False: each request separately.
        grpc_server: Context manager of a server that runs in the same event loop, from startup to shutdown.
        retrieval: Answers `/retrieve`; default: the service's.
    """

    def __init__(
        self,
        service: Service,
        clients: Clients | None = None,
        batching: bool = True,
        grpc_server: Callable[[Batcher], AbstractAsyncContextManager[object]] | None = None,
        retrieval: Retrieval | None = None,
    ) -> None:
        self.batcher, self._service = Batcher(service, clients, batching), service
        self._grpc_server, self._retrieval = grpc_server, retrieval or service.retrieval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
        headers = Headers(scope=scope)
        id = request_id(headers.get(REQUEST_ID, ""))
        try:
            reply = await self._answer(scope["method"], path, headers, receive, id)
        except RequestError as error:
            retry = {"retry-after": "1"} if error.status in (429, 503) else None
            reply = _json(error.to_dict(), error.status, retry)
        except Exception as error:
            text = f"{type(error).__name__}: internal error; see the server's log"
            reply = _json({"error": text}, 500)
            _logger.error("request %s failed", id, exc_info=error)
        if (name := _scored_model(path)) is not None:
            name = name or self._service.default
            self._service.stats.request(name if name in self._service.names else "other", reply.status_code)
        elif path == "/retrieve" and self._retrieval is not None:
            self._service.stats.request(INDEX_NAME, reply.status_code)
        _logger.debug("request %s: %s", id, reply.status_code)
        reply.headers.setdefault(REQUEST_ID, id)
        await reply(scope, receive, send)

    async def _answer(self, method: str, path: str, headers: Headers, receive: Receive, id: str) -> Response:
        token = headers.get("authorization", "").encode("latin-1")
        if path == "/healthz":
            return _json(self._service.health(details=self._is_client(token)))
        if path in ("/v2/health/live", "/v2/health/ready"):
            return _json({path.rpartition("/")[2]: True})
        scored = _scored_model(path)
        client = self.batcher.clients.admit(token, scored is not None or path == "/retrieve")
        if path == "/metrics":
            return Response(self._service.metrics(), headers={"content-type": "text/plain; version=0.0.4"})
        if (name := _model_in(path, "/schema")) is not None and method == "GET":
            check_model(client, name or self._service.default)
            return _json(self._service.schema(name or None))
        if path == "/v2":
            return _json(v2.server_metadata())
        if scored is None and (model_path := ModelPath.of(path)) is not None:
            check_model(client, model_path.model)
            name, loaded = self._service.find(Target(model=model_path.model, version=model_path.version))
            return _json({"name": name, "ready": True} if model_path.verb else v2.metadata(name, loaded))
        if path == "/retrieve" and self._retrieval is not None:
            check_index_access(client)
            if method != "POST":
                raise RequestError(405, f"{method} /retrieve: send the queries with POST")
            return await _in_time(self._retrieve(self._retrieval, headers, receive, id), headers)
        if scored is None:
            raise RequestError(404, "unknown path; use POST /score, GET /schema, /healthz, /metrics and /v2")
        check_model(client, scored or self._service.default)
        if method != "POST":
            raise RequestError(405, f"{method} {path}: send the rows with POST")
        if (coding := headers.get("content-encoding", "identity")) != "identity":
            raise RequestError(415, f"content encoding {coding!r} is not supported: send the body uncompressed")
        answer = self._infer if path.startswith("/v2/") else self._score
        return await _in_time(answer(headers, receive, path, id), headers)

    def _is_client(self, authorization: bytes) -> bool:
        """Whether anyone is a client, or the token is one of a client."""
        try:
            self.batcher.clients.admit(authorization)
        except RequestError:
            return False
        return True

    async def _score(self, headers: Headers, receive: Receive, path: str, id: str) -> Response:
        kind = headers.get("content-type", JSON)
        if not kind.startswith((JSON, ARROW)):
            raise RequestError(415, f"content type {kind!r} is not supported: send {JSON} or {ARROW}")
        accept = headers.get("accept", "*/*")
        arrow = accept.startswith(ARROW) or (accept == "*/*" and kind.startswith(ARROW))
        body = await self._read_body(headers, receive)
        target = Target(model=_scored_model(path) or None, key=headers.get(ROUTING_KEY) or None, id=id)
        answer = await self.batcher.score(lambda loaded: loaded.reader.read(body, kind), len(body), target)
        if arrow:
            return Response(_as_arrow(answer), media_type=ARROW)
        return Response(_as_json(answer), media_type=JSON)

    async def _infer(self, headers: Headers, receive: Receive, path: str, id: str) -> Response:
        """A request of the open inference protocol."""
        model_path = ModelPath.of(path)
        assert model_path is not None
        body = await self._read_body(headers, receive)
        request = read_request(body, headers.get(JSON_BYTES))
        # A proxy may add the header, so the client's own id is that of the body, if it has one.
        logged_id = id if request.id is None else request_id(request.id)
        reply_headers = {REQUEST_ID: id if headers.get(REQUEST_ID) else logged_id}
        key = headers.get(ROUTING_KEY) or None
        target = Target(model=model_path.model, version=model_path.version, key=key, id=logged_id)
        limits = self._service.limits
        answer = await self.batcher.score(
            lambda loaded: v2.query_of(request.tensors, loaded.reader.schema, limits), len(body), target
        )
        content, json_bytes = encode(answer, request, request.id or logged_id)
        if json_bytes is None:
            return Response(content, headers=reply_headers, media_type=JSON)
        reply_headers[JSON_BYTES] = str(json_bytes)
        return Response(content, headers=reply_headers, media_type="application/octet-stream")

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
        self.batcher.check_queue()  # refuse before reading the body
        limits = self._service.limits
        try:
            async with asyncio.timeout(limits.body_s):
                return await self._receive_body(headers, receive)
        except TimeoutError:
            raise RequestError(408, f"the body did not arrive within {limits.body_s:g} s") from None

    async def _retrieve(self, retrieval: Retrieval, headers: Headers, receive: Receive, id: str) -> Response:
        begin = time.perf_counter()
        body = await self._read_body(headers, receive)
        answer = await self.batcher.in_thread(self._service.retrieve, retrieval, body, id)
        self._service.stats.retrieved(INDEX_NAME, retrieval.index.version, time.perf_counter() - begin)
        return Response(answer, media_type=JSON)

    async def _receive_body(self, headers: Headers, receive: Receive) -> bytes:
        """Refuses a body that is too long as early as possible, to bound the memory."""
        limit = self._service.limits.body_bytes
        declared = headers.get("content-length", "0")
        if declared.isascii() and declared.isdigit() and int(declared) > limit:
            raise RequestError(413, f"the body has {int(declared):,} bytes; the limit is {limit:,}: send fewer rows")
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestError(400, "the client disconnected before the end of the body")
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > limit:
                raise RequestError(413, f"the body exceeds the limit of {limit:,} bytes; send fewer rows")
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            while True:
                message = await receive()
                if message["type"] == "lifespan.startup" and self._grpc_server is not None:
                    await stack.enter_async_context(self._grpc_server(self.batcher))
                if message["type"] == "lifespan.shutdown":
                    await stack.aclose()
                    self._service.close()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(value), status, headers, JSON)


def _scored_model(path: str) -> str | None:
    """The model of a scoring path, "" for the default model; None for other paths."""
    model_path = ModelPath.of(path)
    if model_path is not None:
        return model_path.model if model_path.verb == "infer" else None
    return _model_in(path, "/score")


def _deadline_s(headers: Headers) -> float | None:
    """The deadline of a request in seconds; None: no deadline.

    Raises:
        RequestError: The header is not a number above 0.
    """
    text = headers.get(DEADLINE, "")
    if not text:
        return None
    try:
        ms = float(text)
    except ValueError:
        ms = 0.0
    if not 0 < ms < float("inf"):
        raise RequestError(400, f"{DEADLINE} must be milliseconds above 0, not {text[:40]!r}")
    return ms / 1e3


async def _in_time(reply: Coroutine[Any, Any, Response], headers: Headers) -> Response:
    """The reply, if it comes before the deadline of the request.

    Raises:
        RequestError: 504, it does not; 400, the deadline is not a number.
    """
    try:
        seconds = _deadline_s(headers)
    except RequestError:
        reply.close()
        raise
    try:
        async with asyncio.timeout(seconds) as limit:
            response = await reply
            if asyncio.get_running_loop().time() > (limit.when() or float("inf")):
                raise TimeoutError  # the event loop was too busy to notice
    except TimeoutError:
        raise RequestError(504, f"deadline exceeded ({DEADLINE})") from None
    return response


def _model_in(path: str, root: str) -> str | None:
    """The model of the path `root/MODEL`, "" for `root` itself, None for other paths."""
    if path == root:
        return ""
    return path.removeprefix(f"{root}/") if path.startswith(f"{root}/") else None


def _as_json(answer: Answer) -> bytes:
    scores = ", ".join(f"{json.dumps(label)}: {numbers_text(values)}" for label, values in answer.scores.items())
    return with_field({"model": answer.model, "version": answer.version}, "scores", f"{{{scores}}}").encode()


def _as_arrow(answer: Answer) -> bytes:
    table = pa.table({label: pa.array(values) for label, values in answer.scores.items()})
    table = table.replace_schema_metadata({"model": answer.model, "version": answer.version})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
