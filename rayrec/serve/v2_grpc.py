"""The open inference protocol, version 2, over gRPC: a server in the event loop of the HTTP application.

It also answers `grpc.health.v1.Health/Check`, for probes of Kubernetes and load balancers.

All replicas of a machine listen on the same port; the kernel distributes new connections among them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from rayrec.serve import v2
from rayrec.serve.batching import Batcher
from rayrec.serve.clients import check_model
from rayrec.serve.config import TlsConfig
from rayrec.serve.errors import RequestError
from rayrec.serve.routing import Answer, Target, request_id
from rayrec.serve.v2_messages import HEALTH, SERVICE, message

_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    v2.BYTES: "bytes_contents",
}
_CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_OPEN = ("ServerLive", "ServerReady", "Check")  # need no token
_SERVING = 1  # of `HealthCheckResponse.ServingStatus`
_logger = logging.getLogger("rayrec.serve")


@asynccontextmanager
async def serving(batcher: Batcher, host: str, port: int, tls: TlsConfig | None = None) -> AsyncIterator[int]:
    """Runs a server; yields its port, which is a free one if `port` is 0.

    Raises:
        RuntimeError: Cannot listen on the address.
    """
    max_bytes = batcher.service.limits.body_bytes + (64 << 10)
    options = [("grpc.so_reuseport", 1), ("grpc.max_receive_message_length", max_bytes)]
    # Messages of accepted calls are decoded before they take a slot of the queue.
    most_calls = 2 * batcher.service.limits.queue
    server = grpc.aio.server(interceptors=[_Admission(batcher)], options=options, maximum_concurrent_rpcs=most_calls)
    for service, handlers in _Methods(batcher).handlers().items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    address = f"{host}:{port}"
    port = server.add_insecure_port(address) if tls is None else _secure(server, address, tls)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(5.0)


def _secure(server: Any, address: str, tls: TlsConfig) -> int:
    pair = (Path(tls.key_file).read_bytes(), Path(tls.cert_file).read_bytes())
    return int(server.add_secure_port(address, grpc.ssl_server_credentials([pair])))


class _Admission(grpc.aio.ServerInterceptor):
    """Refuses calls by their metadata, before their message is read and decoded."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        method, metadata = details.method.rpartition("/")[2], dict(details.invocation_metadata or ())
        infers = method == "ModelInfer"
        try:
            if method not in _OPEN:
                self._batcher.clients.admit(_authorization(metadata), infers)
            if infers:
                self._batcher.check_queue()
        except RequestError as error:
            if infers:
                self._batcher.service.stats.request("other", error.status)
            return _refusal(error)
        return await continuation(details)


def _refusal(error: RequestError) -> Any:
    """A handler that ends a call without reading its message, which only those of streams do."""

    async def abort(requests: Any, context: Any) -> None:
        await context.abort(_code(error), error.text[:1000])

    return grpc.stream_unary_rpc_method_handler(abort)


def _code(error: RequestError) -> Any:
    return _CODES.get(error.status, grpc.StatusCode.INVALID_ARGUMENT)


def _authorization(metadata: Mapping[str, Any]) -> bytes:
    return str(metadata.get("authorization", "")).encode()


class _Methods:
    """The methods of the services."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher, self._service = batcher, batcher.service

    def handlers(self) -> dict[str, dict[str, Any]]:
        """By service and method. Without `Watch`, clients that watch the health take the server for healthy."""
        methods: dict[str, Callable[[Any, Any], Awaitable[Any]]] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
        }
        handlers = {name: self._handler(name, method) for name, method in methods.items()}
        return {SERVICE: handlers, HEALTH: {"Check": self._handler("HealthCheck", self._check)}}

    def _handler(self, messages: str, method: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            self._with_status(method),
            request_deserializer=message(f"{messages}Request").FromString,
            response_serializer=message(f"{messages}Response").SerializeToString,
        )

    def _with_status(self, method: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        """Converts errors to status codes."""

        async def answer(request: Any, context: Any) -> Any:
            try:
                return await method(request, context)
            except RequestError as error:
                code, text = _code(error), error.text
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                _logger.error("gRPC request failed", exc_info=error)
                code, text = grpc.StatusCode.INTERNAL, f"{type(error).__name__}: internal error; see the server's log"
            await context.abort(code, text[:1000])

        return answer

    async def _live(self, request: Any, context: Any) -> Any:
        return message("ServerLiveResponse")(live=True)

    async def _ready(self, request: Any, context: Any) -> Any:
        return message("ServerReadyResponse")(ready=True)

    async def _check(self, request: Any, context: Any) -> Any:
        if request.service not in ("", SERVICE, HEALTH, *self._service.names):
            raise RequestError(404, f"unknown service {request.service[:100]!r}: ask for '', {SERVICE}, or a model")
        return message("HealthCheckResponse")(status=_SERVING)

    async def _server_metadata(self, request: Any, context: Any) -> Any:
        return message("ServerMetadataResponse")(**v2.server_metadata())

    async def _model_ready(self, request: Any, context: Any) -> Any:
        try:
            self._find(request, context)
        except RequestError as error:
            if error.status != 404:
                raise
            return message("ModelReadyResponse")(ready=False)
        return message("ModelReadyResponse")(ready=True)

    async def _model_metadata(self, request: Any, context: Any) -> Any:
        return message("ModelMetadataResponse")(**v2.metadata(*self._find(request, context)))

    def _find(self, request: Any, context: Any) -> tuple[str, Any]:
        """The model that a call names, and its version.

        Raises:
            RequestError: It is unknown, or the client may not use it.
        """
        self._check_client(context, request.name)
        return self._service.find(Target(model=request.name, version=request.version or None))

    def _check_client(self, context: Any, model: str) -> dict[str, Any]:
        """The metadata of a call that `_Admission` has let in.

        Raises:
            RequestError: The client may not use the model.
        """
        metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
        client = self._batcher.clients.admit(_authorization(metadata))
        check_model(client, model or self._service.default)
        return metadata

    async def _infer(self, request: Any, context: Any) -> Any:
        name, status = request.model_name, 500
        try:
            response = await self._scored(request, context)
            status = 200
            return response
        except RequestError as error:
            status = error.status
            raise
        finally:
            self._service.stats.request(name if name in self._service.names else "other", status)

    async def _scored(self, request: Any, context: Any) -> Any:
        metadata = self._check_client(context, request.model_name)
        # A proxy may add the header, so the client's own id is that of the message, if it has one.
        id = request_id(request.id or str(metadata.get("x-request-id", "")))
        key = str(metadata.get("x-routing-key", "")) or None
        target = Target(model=request.model_name, version=request.model_version or None, key=key, id=id)
        tensors, limits = _tensors(request), self._service.limits
        answer = await self._batcher.score(
            lambda loaded: v2.query_of(tensors, loaded.reader.schema, limits), request.ByteSize(), target
        )
        remaining = context.time_remaining()
        if remaining is not None and remaining <= 0:
            raise RequestError(504, "deadline exceeded")
        return _response(answer, [output.name for output in request.outputs], request.id or id)


def _tensors(request: Any) -> list[v2.Tensor]:
    """
    Raises:
        RequestError: The contents do not follow the protocol.
    """
    raw, tensors = list(request.raw_input_contents), []
    if raw and len(raw) != len(request.inputs):
        raise RequestError(422, f"there are {len(request.inputs)} inputs, but {len(raw)} raw_input_contents")
    for number, tensor in enumerate(request.inputs):
        data: Any = raw[number] if raw else None
        if data is None:
            if tensor.datatype not in _CONTENTS:
                raise RequestError(
                    422, f"input {tensor.name!r}: send datatype {tensor.datatype!r} in raw_input_contents"
                )
            data = list(getattr(tensor.contents, _CONTENTS[tensor.datatype]))
        tensors.append(v2.tensor_of(tensor.name, tensor.datatype, list(tensor.shape), data))
    return tensors


def _response(answer: Answer, names: list[str], id: str) -> Any:
    """
    Raises:
        RequestError: An output is unknown.
    """
    response = message("ModelInferResponse")(model_name=answer.model, model_version=answer.version, id=id)
    for name, values in v2.select_outputs(answer.scores, names).items():
        response.outputs.add(name=name, datatype="FP32", shape=values.shape)
        response.raw_output_contents.append(np.ascontiguousarray(values, "<f4").tobytes())
    return response
