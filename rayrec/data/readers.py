"""Who runs the read tasks: this process, or Ray Data. Both give the same tables in the same order."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Protocol

import pyarrow as pa

from rayrec.data.errors import DataError
from rayrec.data.options import ReadOptions
from rayrec.data.reading import Piece, Recipe, read_piece


class Reader(Protocol):
    """Gives the table of every piece, in order, in one or more parts."""

    def __call__(self, pieces: Sequence[Piece], recipe: Recipe, options: ReadOptions) -> Iterator[pa.Table]: ...


def read_local(pieces: Sequence[Piece], recipe: Recipe, options: ReadOptions) -> Iterator[pa.Table]:
    """Reads in the calling thread."""
    for piece in pieces:
        yield read_piece(piece, recipe)


def choose(options: ReadOptions) -> Reader:
    """The reader that the options ask for.

    Raises:
        DataError: Ray is asked for but not running.
    """
    if options.reader == "local" or (options.reader == "auto" and not _ray_is_up()):
        return read_local
    if not _ray_is_up():
        raise DataError("reader: ray needs a running Ray", fix="call ray.init() first, or set reader: local")
    from rayrec.data.ray_reader import read_ray  # Ray Data takes a second to import: only where it is used

    return read_ray


def _ray_is_up() -> bool:
    if importlib.util.find_spec("ray") is None:
        return False
    import ray

    return bool(ray.is_initialized())
