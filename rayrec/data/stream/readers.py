"""Chooses the reader: this process, Ray Data, or first one and then the other. All return the same tables."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Generator, Iterable
from itertools import chain

import pyarrow as pa

from rayrec.data.config import ReadOptions
from rayrec.data.source.slices import RowGroupStreams
from rayrec.data.stream.prefetch import Prefetcher
from rayrec.data.stream.reading import Recipe, WindowShare, read_share
from rayrec.storage.errors import DataError

# Rows read in this process while Ray Data starts, which takes a second or more: about one window.
HEAD_ROWS = 65_536

# Through Ray's object store a row costs nearly twice the CPU time. With one core for the rank and one for reading, this
# process reads faster and leaves more CPU to the rank.
CORES_FOR_RAY = 3


Reader = Callable[[Iterable[WindowShare], Recipe, ReadOptions], Generator[pa.Table]]
"""Yields the rows of every share, in order, in one or more tables."""


def read_local(shares: Iterable[WindowShare], recipe: Recipe, options: ReadOptions) -> Generator[pa.Table]:
    """Reads in a separate thread, one share ahead, while this thread makes batches."""
    tables = Prefetcher(lambda: _read_here(shares, recipe), depth=1)
    try:
        yield from tables.each(options.longest_wait_s)
    finally:
        tables.close()


def _read_here(shares: Iterable[WindowShare], recipe: Recipe) -> Generator[pa.Table]:
    """Reads in the calling thread."""
    streams = RowGroupStreams(recipe.interleave)
    try:
        for share in shares:
            yield read_share(share, recipe, streams)
    finally:
        streams.close()


def read_auto(shares: Iterable[WindowShare], recipe: Recipe, options: ReadOptions) -> Generator[pa.Table]:
    """Reads the first `HEAD_ROWS` rows, with their interleaved windows, in this thread, and the rest through Ray.

    Ray starts in the meantime, so the first rows do not wait for its processes, and a small data set does not start
    any. If Ray would not be faster, reads everything with `read_local`.
    """
    remaining = iter(shares)
    head: list[WindowShare] = []
    next_share = next(remaining, None)
    if next_share is not None and _is_on_disk(next_share) and cores_per_rank() < CORES_FOR_RAY:
        yield from read_local(chain([next_share], remaining), recipe, options)
        return
    from rayrec.data.stream.ray_reader import read_ray  # imports Ray Data, which takes a second

    while next_share is not None and (
        sum(share.rows for share in head) < HEAD_ROWS or next_share.rows_before == head[-1].rows_before
    ):
        head.append(next_share)
        next_share = next(remaining, None)
    ray_tables = None
    if next_share is not None:
        rest = chain([next_share], remaining)
        ray_tables = Prefetcher(lambda: read_ray(rest, recipe, options), depth=1)
    try:
        yield from _read_here(head, recipe)
        if ray_tables is not None:
            yield from ray_tables.each(options.longest_wait_s)
    finally:
        if ray_tables is not None:
            ray_tables.close()


def choose(options: ReadOptions) -> Reader:
    """The reader for the options.

    Raises:
        DataError: the options require Ray, and it is not running.
    """
    if options.reader == "local" or (options.reader == "auto" and not _ray_is_up()):
        return read_local
    if not _ray_is_up():
        raise DataError("reader: ray needs a running Ray", fix="call ray.init() first, or set reader: local")
    if options.reader == "auto" and options.label_selector is None:
        return read_auto
    from rayrec.data.stream.ray_reader import read_ray

    return read_ray


def cores_per_rank() -> float:
    """Ray's CPUs on this node per rank on it (`LOCAL_WORLD_SIZE`)."""
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    cores = sum(node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["NodeID"] == node_id)
    return cores / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _is_on_disk(share: WindowShare) -> bool:
    """True if all files are local."""
    return all("://" not in item.uri or item.uri.startswith("file://") for item in share.slices)


def _ray_is_up() -> bool:
    if importlib.util.find_spec("ray") is None:
        return False
    import ray

    return bool(ray.is_initialized())
