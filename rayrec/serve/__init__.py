"""Models behind HTTP: what a request may hold, versions that are swapped under load, and the Ray Serve application."""

from rayrec.serve.config import ModelSpec, ServeConfig, load_serve_config
from rayrec.serve.service import Service

__all__ = ["ModelSpec", "ServeConfig", "Service", "load_serve_config"]
