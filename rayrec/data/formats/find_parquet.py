"""Resolves paths to Parquet files; converts files of other formats once, into a cache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from rayrec.storage.errors import DataError, first_line
from rayrec.storage.files import Found, find_files, format_of
from rayrec.storage.locations import cache_folder
from rayrec.storage.parallel import several_nodes
from rayrec.storage.secrets import without_secrets

Tell = Callable[[str], None]
_CACHE: ContextVar[tuple[str, Tell] | None] = ContextVar("_CACHE", default=None)


@contextmanager
def converting_into(folder: str, tell: Tell) -> Iterator[None]:
    """Within the block, conversions go to `folder` (path or URI) and are reported to `tell`.

    The default is the user's cache folder and stderr.
    """
    token = _CACHE.set((folder, tell))
    try:
        yield
    finally:
        _CACHE.reset(token)


def find_parquet(paths: str | Sequence[str]) -> list[Found]:
    """As `find_files`, with files of other formats replaced by their conversions to Parquet.

    Raises:
        DataError: as `find_files` and `convert`; a cache that cannot be written, or that other nodes cannot read.
    """
    files = find_files(paths)
    sources = [file for file in files if format_of(file.uri)]
    if not sources:
        return files
    # Imports the readers of all formats, which most runs do not need.
    from rayrec.data.formats.convert import convert_once

    cache = _CACHE.get()
    if cache is None and several_nodes():
        problem = "CSV, JSON, Avro and ORC input is converted into a local cache that other nodes cannot read"
        fix = "convert it first, into a shared folder: rayrec data convert SRC SHARED_DIR"
        raise DataError(problem, file=sources[0].uri, fix=fix)
    folder, tell = cache or (
        str(cache_folder("converted")),
        lambda text: print(f"rayrec: {text}", file=sys.stderr, flush=True),
    )
    conversions: dict[str, list[Found]] = {}
    try:
        for file, (parquet_files, note) in zip(sources, convert_once(sources, folder), strict=True):
            if note is not None:
                tell(without_secrets(note))
            conversions[file.uri] = parquet_files
    except OSError as error:
        problem = f"cannot write converted files: {first_line(error)}"
        raise DataError(problem, file=folder, fix="check permissions and free space of the run folder") from error
    found = [parquet_file for file in files for parquet_file in conversions.get(file.uri, [file])]
    if not found:
        raise DataError("the file has no rows", file=sources[0].uri, fix="remove it")
    return found
