"""Serves exported models over HTTP and gRPC on Ray Serve. README.md describes the path of a request."""

from typing import TYPE_CHECKING

from rayrec._runtime.imports import lazy_names
from rayrec.serve.config import (
    ClientConfig,
    LogConfig,
    ModelSpec,
    ServeConfig,
    TlsConfig,
    load_serve_config,
    parse_config,
)
from rayrec.serve.errors import RequestError
from rayrec.serve.limits import Limits

if TYPE_CHECKING:
    from rayrec.serve.clients import Clients
    from rayrec.serve.http import App
    from rayrec.serve.on_ray import serving
    from rayrec.serve.requests import ARROW, JSON
    from rayrec.serve.retrieval import Retrieval
    from rayrec.serve.routing import Answer
    from rayrec.serve.service import Service

__getattr__ = lazy_names(__name__)

__all__ = [
    "ARROW",
    "JSON",
    "Answer",
    "App",
    "ClientConfig",
    "Clients",
    "Limits",
    "LogConfig",
    "ModelSpec",
    "RequestError",
    "Retrieval",
    "ServeConfig",
    "Service",
    "TlsConfig",
    "load_serve_config",
    "parse_config",
    "serving",
]
