"""Cached indexes of vocabularies and entities, which all processes of a node share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from rayrec.storage.cache import Cache, Held
from rayrec.storage.errors import DataError
from rayrec.storage.locations import cache_folder


def node_folder(kind: str, key: str, needed: int, make: Callable[[Path, int], str], limit: tuple[str, int]) -> Held:
    """The cached folder of a key, as `Cache.folder`.

    Args:
        kind: folder of the cache.
        limit: environment variable with the most bytes of that folder, and its default.

    Raises:
        DataError: the environment variable is not a number.
    """
    variable, default = limit
    most_bytes = os.environ.get(variable, str(default))
    if not most_bytes.isdigit():
        raise DataError(f"{variable}={most_bytes} must be a number of bytes", fix=f"e.g. {variable}={default}")
    return Cache(_writable(kind), int(most_bytes)).folder(key, needed, make)


def _writable(kind: str) -> Path:
    """A writable cache folder on this node."""
    cache = cache_folder(kind)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            return cache
    except OSError:
        pass
    cache = Path(tempfile.gettempdir()) / f"rayrec-{os.getuid()}" / kind
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    return cache
