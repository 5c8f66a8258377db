"""Models behind HTTP: what a request may hold, versions that are swapped under load, and the Ray Serve application."""

from rayrec.serve.service import ModelSpec, Service

__all__ = ["ModelSpec", "Service"]
