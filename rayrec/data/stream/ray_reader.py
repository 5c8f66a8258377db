"""Reads pieces through Ray Data: a datasource whose read tasks are runs of pieces, order kept."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray.data
from ray.data import ExecutionResources
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from rayrec._runtime.ray_internals import free_cpus, hide_data_progress
from rayrec.data.config import ReadOptions
from rayrec.data.source.slices import RowGroupStreams
from rayrec.data.stream.bad_rows import or_nothing, without_nothing
from rayrec.data.stream.reading import Piece, Recipe, read_piece
from rayrec.storage.errors import DataError

if TYPE_CHECKING:
    from ray.data import DataContext, Dataset

# Ray puts every read task of a dataset into its store before the first one runs, so a long epoch is read as several
# datasets, one after the other.
_PIECES_PER_DATASET = 2048

# Ray takes up to 0.1 s to detect that a task is done and to start the next one, as long as one window takes to read.
_PIECES_PER_TASK = 4

# A task gives what it has read whenever it is so much, or once and a half; larger tables are cut, smaller ones joined.
_BLOCK_BYTES = 16 << 20

# What the read tasks of one rank may have in Ray's store: not a share of all of it, of which every rank would take one.
_STORE_BYTES = 512 << 20

_context_lock = threading.Lock()  # the context that a dataset takes over is a global of the process


class WindowDatasource(Datasource):
    """Read tasks that are pieces of windows, one or a few after one another."""

    def __init__(self, tasks: Sequence[Sequence[Piece]], recipe: Recipe) -> None:
        super().__init__()
        self._tasks = tasks
        self._recipe = recipe

    def estimate_inmemory_data_size(self) -> int:
        """Bytes of all tables, roughly."""
        return sum(map(self._bytes, self._tasks))

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        """The given tasks, whatever the parallelism."""
        return [
            ReadTask(
                partial(_read, pieces, self._recipe),
                BlockMetadata(_rows(pieces), self._bytes(pieces), None, None),
                per_task_row_limit=per_task_row_limit,
            )
            for pieces in self._tasks
        ]

    def _bytes(self, pieces: Sequence[Piece]) -> int:
        return _rows(pieces) * (16 + 4 * self._recipe.schema.num_dense + 16 * len(self._recipe.schema.sparse))


def _rows(pieces: Sequence[Piece]) -> int:
    return sum(piece.rows for piece in pieces)


def _read(pieces: Sequence[Piece], recipe: Recipe) -> Iterator[pa.Table]:
    streams = RowGroupStreams(recipe.interleave)
    for piece in pieces:
        yield or_nothing(read_piece(piece, recipe, streams))


def tasks_of(pieces: Sequence[Piece], at_once: int) -> list[Sequence[Piece]]:
    """The pieces as runs that one task each reads, `at_once` tasks side by side; those of one group stay in one task.

    The first tasks are small so that rows come soon, the last ones so that all end together.
    """
    tasks: list[Sequence[Piece]] = []
    at = 0
    while at < len(pieces):
        share = (len(pieces) - at) // (2 * at_once)
        end = at + (1 if len(tasks) < at_once else max(1, min(_PIECES_PER_TASK, share)))
        while end < len(pieces) and pieces[end].group == pieces[end - 1].group > 0:
            end += 1
        tasks.append(pieces[at:end])
        at = end
    return tasks


def read_ray(pieces: Iterable[Piece], recipe: Recipe, options: ReadOptions) -> Generator[pa.Table]:
    """Reads in Ray tasks, at most `options.concurrent_reads` of them at a time.

    Closing the iterator ends the Ray pipeline.
    """
    _check_cpus(options)
    coming = iter(pieces)
    while some := list(islice(coming, _PIECES_PER_DATASET)):
        dataset = _dataset(some, recipe, options)
        tables: Any = iter(dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1))
        try:
            yield from map(without_nothing, tables)
        finally:
            tables.close()


def _check_cpus(options: ReadOptions) -> None:
    """Ray would wait forever for CPUs that no node has.

    Raises:
        DataError: a read task asks for more CPUs than the whole cluster has.
    """
    there = ray.cluster_resources().get("CPU", 0.0)
    if options.cpus_per_read > there:
        raise DataError(
            f"a read task asks for {options.cpus_per_read:g} CPUs and Ray has {there:g}", fix="lower cpus_per_read"
        )


def _where(options: ReadOptions) -> dict[str, Any]:
    """Where read tasks run: where labels say so, else beside the rank that asks, lest rows cross the network once more.

    Ray chooses where this node has no CPU to spare, now or later.
    """
    if options.label_selector is not None:
        return {"label_selector": options.label_selector}
    here = ray.get_runtime_context().get_node_id()
    if free_cpus(here) < options.cpus_per_read:
        return {}
    return {"label_selector": {"ray.io/node-id": here}, "fallback_strategy": [{"label_selector": {}}]}


def _dataset(pieces: Sequence[Piece], recipe: Recipe, options: ReadOptions) -> Dataset:
    hide_data_progress()
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ExecutionResources.for_limits(object_store_memory=_STORE_BYTES)
    context.target_max_block_size = _BLOCK_BYTES
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    tasks = tasks_of(pieces, options.concurrent_reads)
    with _context_lock, ray.data.DataContext.current(context):
        return ray.data.read_datasource(
            WindowDatasource(tasks, recipe),
            num_cpus=options.cpus_per_read,
            concurrency=options.concurrent_reads,
            override_num_blocks=len(tasks),
            **_where(options),
        )
