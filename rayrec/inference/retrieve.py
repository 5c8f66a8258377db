"""Retrieval for files: the k best items for each row of Parquet files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from rayrec.data import DataError, Manifest, Schema
from rayrec.data.formats.find_parquet import find_parquet
from rayrec.data.source.slices import Columns, slices_of
from rayrec.inference.artifact import ExportError
from rayrec.inference.export_store import ExportStore
from rayrec.inference.file_jobs import ROWS_PER_FILE, FileJob, Part, Say, kept_columns, read_part
from rayrec.inference.index import ItemIndex
from rayrec.inference.part_files import PartFiles
from rayrec.inference.scorer import features_only
from rayrec.storage.cache import Held
from rayrec.storage.parallel import start_ray
from rayrec.storage.parquet import open_parquet
from rayrec.storage.struct_fields import columns_named, leaf_table

BATCH_ROWS = 4096
RECORD = "_retrieve.json"
# Columns are checked when they are read.
NO_FEATURES = features_only(Schema.model_construct())


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrieveOptions:
    """Options of a retrieval. Without `history` and `vector`, a row has the columns that training read."""

    k: int = 100
    """Items per row."""
    history: str | None = None
    """List column of ids, oldest first, for the query tower."""
    vector: str | None = None
    """List column of numbers: the query vector."""
    keep_seen: bool = False
    """Results may include items of the history."""
    exclude: str | None = None
    """List column of ids to exclude."""
    vectors: bool = False
    """Also writes the query vector of each row."""
    time: str | None = None
    """Column of times at which each row asks, for models with times; None: that of its newest item."""

    def __post_init__(self) -> None:
        if self.history is not None and self.vector is not None:
            raise ValueError("set the history column (--history) or the vector column (--vector), not both")
        if self.k < 1:
            raise ValueError(f"k={self.k} must be at least 1")
        if self.time is not None and (self.history is not None or self.vector is not None):
            raise ValueError("the time column (--time) needs rows with the columns that training read")

    def columns(self, index: ItemIndex) -> list[str]:
        """The columns that a row must have."""
        named = [name for name in (self.history, self.vector, self.exclude, self.time) if name is not None]
        if self.history is not None or self.vector is not None or index.mapping is None:
            return named
        return [*named, *index.mapping.schema.feature_columns]


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Rows and files that were written; `empty` rows have no items, because the model knows nothing of them."""

    rows: int
    files: int
    seconds: float
    empty: int = 0


def retrieve(
    index: str | Path,
    data: str | Sequence[str],
    out: str | Path,
    options: RetrieveOptions,
    *,
    workers: int = 0,
    rows_per_file: int = ROWS_PER_FILE,
    say: Say = print,
) -> Retrieved:
    """Finds the best items for all rows of Parquet files.

    The output has every row once, with its columns, `items` (ids, best first), `scores`, and with `vectors` the query
    `vector`. Rows keep their order within a file. After an interruption, call it again to resume.

    Args:
        index: An export with an index, or a folder of exports, of which the newest answers; a path or URI.
        data: Files, folders or globs.
        out: Folder that all workers can access; a path or URI.
        workers: Concurrent Ray tasks, with a CPU each; 0: this process.
        rows_per_file: Approximate number of rows of an output file.

    Raises:
        ExportError: The export is missing or incomplete, or has no index.
        DataError: `data` matches no file, or a column does not exist, has another type, or exists already.
        ValueError: A row cannot be mapped; or `out` has the output of another index, other options or other data.
    """
    begin, output = time.perf_counter(), PartFiles(out)
    if workers:
        start_ray()
    export = ExportStore(index).newest()
    source = export.path if export.remote else str(Path(export.path).absolute())
    opened, _in_use = _open(source)  # the second keeps a copy in the cache
    manifest = Manifest.read(data, NO_FEATURES, window_rows=rows_per_file)
    kept = kept_columns(manifest, None, ["items", "scores", *(["vector"] if options.vectors else [])])
    names = options.columns(opened)
    _check_columns(manifest.files[0].uri, read_part(slices_of(manifest, 0), kept, names).schema, options)
    task = Task(index=source, out=output.path, columns=kept, options=options)
    job = FileJob(
        output=output,
        manifest=manifest,
        record_file=RECORD,
        made_of={"index": opened.version, "options": asdict(options)},
        here=partial(retrieve_part, task, opened),
        in_worker=partial(retrieve_in_worker, task),
    )
    results = [*job.run(workers, say)]
    rows, empty = (sum(result[name] for result in results) for name in ("rows", "empty"))
    return Retrieved(rows, len(results), time.perf_counter() - begin, empty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The settings of a job that every worker needs.

    Args:
        index: Path or URI of the export.
        out: Path or URI of the output folder.
        columns: Input columns to keep, with their types.
    """

    index: str
    out: str
    columns: Columns
    options: RetrieveOptions


def retrieve_part(task: Task, index: ItemIndex, part: Part) -> dict[str, Any]:
    """Reads a part, finds the items of its rows, and writes it.

    Raises:
        DataError: The part cannot be read.
        ValueError: A row cannot be mapped.
    """
    number, slices = part
    table = read_part(slices, task.columns, task.options.columns(index))
    kept = [name for name, _ in task.columns]
    blocks = [
        _with_items(index, table.slice(start, BATCH_ROWS), kept, task.options)
        for start in range(0, max(len(table), 1), BATCH_ROWS)
    ]
    result = pa.concat_tables(blocks)
    PartFiles(task.out).write_part(number, result)
    empty = pc.sum(pc.equal(pc.list_value_length(result.column("items")), 0)).as_py() or 0
    return {"rows": len(result), "empty": empty}


def retrieve_in_worker(task: Task, part: Part) -> dict[str, Any]:
    """`retrieve_part` in a process that keeps the index loaded for its next part."""
    torch.set_num_threads(1)
    return retrieve_part(task, _open_once(task.index)[0], part)


def _open(index: str) -> tuple[ItemIndex, Held]:
    """Loads the export at a path or URI. `Held` must be kept while it is used: it keeps the copy in the cache."""
    store = ExportStore(index)
    export = store.open(store.newest())
    return ItemIndex(export.folder, checksums=False), export


_open_once = lru_cache(maxsize=1)(_open)


def _check_columns(path: str, schema: pa.Schema, options: RetrieveOptions) -> None:
    """
    Raises:
        DataError: A column of the options does not exist, or has another type.
    """
    for column in (options.history, options.vector, options.exclude):
        if column is None:
            continue
        kind = schema.field(column).type
        if pa.types.is_null(kind):
            raise DataError(f"no column {column!r}; it has {schema.names}", file=path)
        if not pa.types.is_list(kind) and not pa.types.is_large_list(kind):
            raise DataError(f"column {column!r} must be a list, not {kind}", file=path)
    if options.time is not None:
        kind = schema.field(options.time).type
        if not pa.types.is_timestamp(kind) and not pa.types.is_integer(kind):
            raise DataError(
                f"column {options.time!r} must have timestamps, or seconds since 1970, not {kind}", file=path
            )


def _with_items(index: ItemIndex, table: pa.Table, kept: Sequence[str], options: RetrieveOptions) -> pa.Table:
    exclude = _lists(table, options.exclude)
    if options.history is not None:
        histories = _lists(table, options.history)
        queries = index.queries(histories)
    elif options.vector is not None:
        histories, queries = [], torch.tensor(_lists(table, options.vector), dtype=torch.float32)
    else:
        times = () if options.time is None else _seconds(table.column(options.time))
        queries, histories = index.queries_of(table, times), _lists(table, index.seen_column)
    if histories and not options.keep_seen:
        exclude = [[*history, *excluded] for history, excluded in zip(histories, exclude, strict=True)]
    scores, rows = index.search(queries, options.k, exclude)
    item_scores = [row_scores[row_scores > float("-inf")].tolist() for row_scores in scores]
    table = table.select(kept)
    table = table.append_column("items", pa.array(index.ids_of(rows), pa.list_(index.items.column(0).type)))
    table = table.append_column("scores", pa.array(item_scores, pa.list_(pa.float32())))
    if not options.vectors:
        return table
    return table.append_column("vector", pa.array(list(queries.numpy()), pa.list_(pa.float32())))


def _seconds(times: pa.ChunkedArray) -> list[int | None]:
    """Seconds since 1970; None for nulls."""
    if pa.types.is_timestamp(times.type):
        times = times.cast(pa.timestamp("s", times.type.tz), safe=False).cast(pa.int64())
    seconds: list[int | None] = times.to_pylist()
    return seconds


def _lists(table: pa.Table, column: str | None) -> Sequence[list[object]]:
    if column is None:
        return [[]] * len(table)
    return [values or [] for values in columns_named(table, [column]).column(0).to_pylist()]


def read_vectors(data: str, vector: str, id_column: str | None) -> tuple[torch.Tensor, pa.Table]:
    """(vectors `[N, D]`, the other columns, `id_column` first).

    Raises:
        ExportError: A column does not exist, or lists have different lengths; names the file.
    """
    blocks, tables = [], []
    for path in (file.uri for file in find_parquet(data)):
        table = leaf_table(open_parquet(path).read())
        for column in (vector, id_column):
            if column is not None and column not in table.column_names:
                raise ExportError(f"{path} has no column {column!r}; it has {table.column_names}")
        lists = table.column(vector).combine_chunks()
        lengths = pc.list_value_length(lists)
        if lists.null_count or pc.count_distinct(lengths).as_py() != 1 or lists.flatten().null_count:
            raise ExportError(f"{path}: column {vector!r} must have vectors of equal length, without nulls")
        numbers = np.asarray(lists.flatten().to_numpy(zero_copy_only=False), dtype=np.float32)
        blocks.append(torch.from_numpy(numbers.reshape(len(table), -1).copy()))
        tables.append(table.drop_columns([vector]))
    widths = {block.shape[1] for block in blocks}
    if len(widths) > 1:
        raise ExportError(f"{data}: column {vector!r} has vectors of {sorted(widths)} numbers; they must be equal")
    table = pa.concat_tables(tables)
    if id_column is not None:
        table = table.select([id_column, *(name for name in table.column_names if name != id_column)])
    return torch.cat(blocks), table
