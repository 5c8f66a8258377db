"""Reads pieces through Ray Data: a datasource whose read tasks are the pieces, order kept."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from rayrec.data.errors import DataError
from rayrec.data.options import ReadOptions
from rayrec.data.reading import Piece, Recipe, read_piece

if TYPE_CHECKING:
    from ray.data import DataContext, Dataset

# Ray puts every read task of a dataset into its store before the first one runs, so a long epoch is read as several
# datasets, one after the other.
_TASKS_PER_DATASET = 512

_context_lock = threading.Lock()  # the context that a dataset takes over is a global of the process


class WindowDatasource(Datasource):
    """Read tasks that are pieces of windows."""

    def __init__(self, pieces: Sequence[Piece], recipe: Recipe) -> None:
        super().__init__()
        self._pieces = pieces
        self._recipe = recipe

    def estimate_inmemory_data_size(self) -> int:
        """Bytes of all tables, roughly."""
        return sum(self._bytes(piece) for piece in self._pieces)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        """One task a piece, whatever the parallelism."""
        return [
            ReadTask(
                partial(_read, piece, self._recipe),
                BlockMetadata(piece.rows, self._bytes(piece), None, None),
                per_task_row_limit=per_task_row_limit,
            )
            for piece in self._pieces
        ]

    def _bytes(self, piece: Piece) -> int:
        return piece.rows * (16 + 4 * self._recipe.schema.num_dense + 16 * len(self._recipe.schema.sparse))


def _read(piece: Piece, recipe: Recipe) -> list[pa.Table]:
    return [read_piece(piece, recipe)]


def read_ray(pieces: Sequence[Piece], recipe: Recipe, options: ReadOptions) -> Generator[pa.Table]:
    """Reads in Ray tasks, at most `options.concurrent_reads` of them at a time.

    Closing the iterator ends the Ray pipeline.
    """
    _check_cpus(options)
    for first in range(0, len(pieces), _TASKS_PER_DATASET):
        dataset = _dataset(pieces[first : first + _TASKS_PER_DATASET], recipe, options)
        tables: Any = iter(dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1))
        try:
            yield from tables
        finally:
            tables.close()


def _hush() -> None:
    """Ray tells every rank's every epoch on the console; a run has its own progress bar."""
    for name in ("ray.data._internal.progress", "ray.data._internal.execution.streaming_executor"):
        logging.getLogger(name).setLevel(logging.ERROR)


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


def _dataset(pieces: Sequence[Piece], recipe: Recipe, options: ReadOptions) -> Dataset:
    _hush()
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    with _context_lock, ray.data.DataContext.current(context):
        return ray.data.read_datasource(
            WindowDatasource(pieces, recipe),
            num_cpus=options.cpus_per_read,
            concurrency=options.concurrent_reads,
            override_num_blocks=len(pieces),
            label_selector=options.label_selector,
        )
