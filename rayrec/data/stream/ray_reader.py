"""Reads shares of windows through Ray Data, in order: a datasource with a few shares per read task."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
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
from rayrec.data.stream.bad_rows import with_placeholder, without_placeholder
from rayrec.data.stream.reading import Recipe, WindowShare, read_share
from rayrec.storage.errors import DataError

if TYPE_CHECKING:
    from ray.data import DataContext, Dataset

# Ray puts all read tasks of a dataset into its object store before the first one runs, so a long epoch is read as
# several datasets in turn.
_SHARES_PER_DATASET = 2048

# Ray takes up to 0.1 s to notice that a task is done and to start the next one, as long as reading one window takes.
_SHARES_PER_TASK = 4

# Target size of the blocks that a task returns: larger tables are cut, smaller ones joined.
_BLOCK_BYTES = 16 << 20

# Object store limit for the read tasks of a rank. Ray's default, a share of the whole store, would apply to every rank.
_STORE_BYTES = 512 << 20

# A dataset copies the process-wide DataContext when it is created.
_context_lock = threading.Lock()


class WindowDatasource(Datasource):
    """A datasource with the given read tasks, each of a few shares."""

    def __init__(self, tasks: Sequence[Sequence[WindowShare]], recipe: Recipe) -> None:
        super().__init__()
        self._tasks = tasks
        self._recipe = recipe

    def estimate_inmemory_data_size(self) -> int:
        """Approximate bytes of all tables."""
        return sum(map(self._bytes, self._tasks))

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        """The given tasks, regardless of `parallelism`."""
        return [
            ReadTask(
                partial(_read, shares, self._recipe),
                BlockMetadata(_rows(shares), self._bytes(shares), None, None),
                per_task_row_limit=per_task_row_limit,
            )
            for shares in self._tasks
        ]

    def _bytes(self, shares: Sequence[WindowShare]) -> int:
        return _rows(shares) * (16 + 4 * self._recipe.schema.num_dense + 16 * len(self._recipe.schema.sparse))


def _rows(shares: Sequence[WindowShare]) -> int:
    return sum(share.rows for share in shares)


def _read(shares: Sequence[WindowShare], recipe: Recipe) -> Iterator[pa.Table]:
    with closing(RowGroupStreams(recipe.interleave)) as streams:
        for share in shares:
            yield with_placeholder(read_share(share, recipe, streams))


def tasks_of(shares: Sequence[WindowShare], at_once: int) -> list[Sequence[WindowShare]]:
    """Divides the shares into tasks; `at_once` of them run in parallel. Keeps the shares of a group in one task.

    The first tasks are small for an early start; the last ones are small so that all end at the same time.
    """
    tasks: list[Sequence[WindowShare]] = []
    start = 0
    while start < len(shares):
        size = (len(shares) - start) // (2 * at_once)
        end = start + (1 if len(tasks) < at_once else max(1, min(_SHARES_PER_TASK, size)))
        while end < len(shares) and shares[end].group == shares[end - 1].group > 0:
            end += 1
        tasks.append(shares[start:end])
        start = end
    return tasks


def read_ray(shares: Iterable[WindowShare], recipe: Recipe, options: ReadOptions) -> Generator[pa.Table]:
    """Reads in at most `options.concurrent_reads` concurrent Ray tasks.

    Closing the generator ends the Ray pipeline.
    """
    _check_cpus(options)
    remaining = iter(shares)
    while chunk := list(islice(remaining, _SHARES_PER_DATASET)):
        dataset = _dataset(chunk, recipe, options)
        tables: Any = iter(dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1))
        try:
            yield from map(without_placeholder, tables)
        finally:
            tables.close()


def _check_cpus(options: ReadOptions) -> None:
    """Checks that the cluster has the CPUs of a read task; otherwise Ray would wait forever.

    Raises:
        DataError: it has not.
    """
    total_cpus = ray.cluster_resources().get("CPU", 0.0)
    if options.cpus_per_read > total_cpus:
        raise DataError(
            f"a read task needs {options.cpus_per_read:g} CPUs, but Ray has {total_cpus:g}", fix="lower cpus_per_read"
        )


def _placement(options: ReadOptions) -> dict[str, Any]:
    """Ray options for the placement of read tasks: by `label_selector`, else on this node to save a network transfer.

    If this node has no free CPU, Ray chooses the node.
    """
    if options.label_selector is not None:
        return {"label_selector": options.label_selector}
    node_id = ray.get_runtime_context().get_node_id()
    if free_cpus(node_id) < options.cpus_per_read:
        return {}
    return {"label_selector": {"ray.io/node-id": node_id}, "fallback_strategy": [{"label_selector": {}}]}


def _dataset(shares: Sequence[WindowShare], recipe: Recipe, options: ReadOptions) -> Dataset:
    hide_data_progress()
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ExecutionResources.for_limits(object_store_memory=_STORE_BYTES)
    context.target_max_block_size = _BLOCK_BYTES
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    tasks = tasks_of(shares, options.concurrent_reads)
    with _context_lock, ray.data.DataContext.current(context):
        return ray.data.read_datasource(
            WindowDatasource(tasks, recipe),
            num_cpus=options.cpus_per_read,
            concurrency=options.concurrent_reads,
            override_num_blocks=len(tasks),
            **_placement(options),
        )
