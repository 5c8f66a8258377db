"""Models behind HTTP: what a request may hold, versions that are swapped under load, and the Ray Serve application."""

from typing import TYPE_CHECKING

from rayrec._runtime.imports import lazy_names
from rayrec.serve.config import ModelSpec, ServeConfig, load_serve_config

if TYPE_CHECKING:
    from rayrec.serve.service import Service

__getattr__ = lazy_names(__name__)

__all__ = ["ModelSpec", "ServeConfig", "Service", "load_serve_config"]
