"""Serves exported models over HTTP and gRPC on Ray Serve. README.md describes the path of a request."""

from typing import TYPE_CHECKING

from rayrec._runtime.imports import lazy_names
from rayrec.serve.config import ModelSpec, ServeConfig, load_serve_config

if TYPE_CHECKING:
    from rayrec.serve.service import Service

__getattr__ = lazy_names(__name__)

__all__ = ["ModelSpec", "ServeConfig", "Service", "load_serve_config"]
