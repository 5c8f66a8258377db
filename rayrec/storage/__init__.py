"""Files on any storage: URIs, file systems, finding and opening files, folders to write to. Independent of schemas.

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayrec._runtime.imports import lazy_names

if TYPE_CHECKING:
    from rayrec.storage.files import Found, find_files
    from rayrec.storage.folder import ArrowFolder, Folder, LocalFolder, open_folder
    from rayrec.storage.locations import local_path, locate
    from rayrec.storage.parquet import open_parquet
    from rayrec.storage.retries import Patience

__getattr__ = lazy_names(__name__)

__all__ = [
    "ArrowFolder",
    "Folder",
    "Found",
    "LocalFolder",
    "Patience",
    "find_files",
    "local_path",
    "locate",
    "open_folder",
    "open_parquet",
]
