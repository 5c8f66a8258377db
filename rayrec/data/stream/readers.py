"""Who reads: this process, Ray Data, or first the one and then the other; the tables are the same."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Generator, Iterable
from itertools import chain

import pyarrow as pa

from rayrec.data.config import ReadOptions
from rayrec.data.source.slices import RowGroupStreams
from rayrec.data.stream.prefetch import Prefetcher
from rayrec.data.stream.reading import Piece, Recipe, read_piece
from rayrec.storage.errors import DataError

# Read here while Ray Data starts, which takes it a second or more: about one window.
HEAD_ROWS = 65_536

# Through Ray a row costs nearly twice the processor time, as it passes Ray's store: with one core for a rank and one
# for reading, this process reads faster and leaves the rank more.
CORES_FOR_RAY = 3


Reader = Callable[[Iterable[Piece], Recipe, ReadOptions], Generator[pa.Table]]
"""Gives the table of every piece, in order, in one or more parts."""


def read_local(pieces: Iterable[Piece], recipe: Recipe, options: ReadOptions) -> Generator[pa.Table]:
    """Reads in a thread of its own, one piece ahead: batches are cut beside it."""
    coming = Prefetcher(lambda: _read_here(pieces, recipe), depth=1)
    try:
        yield from coming.each(options.longest_wait_s)
    finally:
        coming.close()


def _read_here(pieces: Iterable[Piece], recipe: Recipe) -> Generator[pa.Table]:
    """Reads in the calling thread."""
    streams = RowGroupStreams(recipe.interleave)
    try:
        for piece in pieces:
            yield read_piece(piece, recipe, streams)
    finally:
        streams.close()


def read_auto(pieces: Iterable[Piece], recipe: Recipe, options: ReadOptions) -> Generator[pa.Table]:
    """Reads the first `HEAD_ROWS` rows, and windows that come mixed with those, in the calling thread and the rest
    through Ray, which starts meanwhile; all rows as `read_local` where Ray would not be faster.

    Nobody waits for the first rows of an epoch until Ray has made its processes, and few rows need none at all.
    """
    coming_pieces = iter(pieces)
    head: list[Piece] = []
    first = next(coming_pieces, None)
    if first is not None and _is_on_disk(first) and cores_a_rank() < CORES_FOR_RAY:
        yield from read_local(chain([first], coming_pieces), recipe, options)
        return
    from rayrec.data.stream.ray_reader import read_ray  # Ray Data takes a second to import: only where it is used

    while first is not None and (sum(piece.rows for piece in head) < HEAD_ROWS or first.before == head[-1].before):
        head.append(first)
        first = next(coming_pieces, None)
    coming = None
    if first is not None:
        rest = chain([first], coming_pieces)
        coming = Prefetcher(lambda: read_ray(rest, recipe, options), depth=1)
    try:
        yield from _read_here(head, recipe)
        if coming is not None:
            yield from coming.each(options.longest_wait_s)
    finally:
        if coming is not None:
            coming.close()


def choose(options: ReadOptions) -> Reader:
    """The reader that the options ask for.

    Raises:
        DataError: the reader is Ray, which is not running.
    """
    if options.reader == "local" or (options.reader == "auto" and not _ray_is_up()):
        return read_local
    if not _ray_is_up():
        raise DataError("reader: ray needs a running Ray", fix="call ray.init() first, or set reader: local")
    if options.reader == "auto" and options.label_selector is None:
        return read_auto
    from rayrec.data.stream.ray_reader import read_ray

    return read_ray


def cores_a_rank() -> float:
    """Cores that Ray has on this node for each rank on it (their number is that of `torch.distributed`)."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    cores = sum(node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["NodeID"] == here)
    return cores / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _is_on_disk(piece: Piece) -> bool:
    """Whether its files are, so that reading works and does not wait."""
    return all("://" not in part.uri or part.uri.startswith("file://") for part in piece.slices)


def _ray_is_up() -> bool:
    if importlib.util.find_spec("ray") is None:
        return False
    import ray

    return bool(ray.is_initialized())
