"""Retrieval for files: the k best items of each row of Parquet files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from rayrec.data.formats.find_parquet import find_parquet
from rayrec.inference.artifact import ExportError
from rayrec.inference.index import Index
from rayrec.storage.locations import plain_path
from rayrec.storage.parquet import open_parquet

ROWS = 4096  # of a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to retrieve for each row.

    Args:
        k: items a row.
        history: list column of ids, oldest first, for the query tower; or
        vector: list column of numbers, the query itself. With neither, a row has the columns that training read.
        keep_seen: items of the history may come again.
        exclude: list column of ids that a row must not get.
        vectors: also write each row's query vector.
    """

    k: int = 100
    history: str | None = None
    vector: str | None = None
    keep_seen: bool = False
    exclude: str | None = None
    vectors: bool = False

    def __post_init__(self) -> None:
        if self.history is not None and self.vector is not None:
            raise ValueError("give the history column (--history) or the vector column (--vector), not both")
        if self.k < 1:
            raise ValueError(f"k={self.k} must be at least 1")


@dataclass(frozen=True, slots=True)
class Retrieved:
    """How many rows and files were written, and in what time."""

    rows: int
    files: int
    seconds: float


def retrieve(index: Index, data: str | Path, out: str | Path, wanted: Wanted) -> Retrieved:
    """Writes a file for each file of `data`: its columns, `items` (ids, best first), `scores`, and with `vectors` the
    query's `vector`. Files that are there already stay, so that the same call again goes on where it stopped.

    Args:
        data: Parquet file, folder or glob.

    Raises:
        DataError: no such files.
        ExportError: no such columns, or files of one name.
    """
    begin, rows, written, folder = time.perf_counter(), 0, 0, Path(out)
    targets = {file.uri: folder / Path(plain_path(file.uri)).name for file in find_parquet(str(data))}
    if len(set(targets.values())) < len(targets):
        raise ExportError(f"{data}: files of several folders have one name; retrieve for one folder at a time")
    folder.mkdir(parents=True, exist_ok=True)
    for path, target in targets.items():
        if target.exists():
            continue
        scratch = target.with_name(f".{target.name}.partial")
        source = open_parquet(path)
        _check_columns(path, source.schema_arrow, wanted)
        writer: pq.ParquetWriter | None = None
        for batch in source.iter_batches(ROWS):
            table = _answered(index, pa.Table.from_batches([batch]), wanted)
            writer = writer or pq.ParquetWriter(scratch, table.schema)
            writer.write_table(table)
            rows += len(table)
        if writer is not None:
            writer.close()
            scratch.rename(target)
            written += 1
    return Retrieved(rows, written, time.perf_counter() - begin)


def _check_columns(path: str, schema: pa.Schema, wanted: Wanted) -> None:
    for column in (wanted.history, wanted.vector, wanted.exclude):
        if column is None:
            continue
        if column not in schema.names:
            raise ExportError(f"{path} has no column {column!r}; it has {schema.names}")
        if not pa.types.is_list(schema.field(column).type) and not pa.types.is_large_list(schema.field(column).type):
            raise ExportError(f"{path}: column {column!r} is {schema.field(column).type}; a list is needed")


def _answered(index: Index, table: pa.Table, wanted: Wanted) -> pa.Table:
    exclude = _lists(table, wanted.exclude)
    if wanted.history is not None:
        histories = _lists(table, wanted.history)
        queries = index.queries(histories)
    elif wanted.vector is not None:
        histories, queries = [], torch.tensor(_lists(table, wanted.vector), dtype=torch.float32)
    else:
        queries, histories = index.queries_of(table), _lists(table, index.seen_column)
    if histories and not wanted.keep_seen:
        exclude = [[*seen, *more] for seen, more in zip(histories, exclude, strict=True)]
    scores, rows = index.search(queries, wanted.k, exclude)
    kept = [one[one > float("-inf")].tolist() for one in scores]
    table = table.append_column("items", pa.array(index.ids_of(rows), pa.list_(index.items.column(0).type)))
    table = table.append_column("scores", pa.array(kept, pa.list_(pa.float32())))
    if not wanted.vectors:
        return table
    return table.append_column("vector", pa.array(list(queries.numpy()), pa.list_(pa.float32())))


def _lists(table: pa.Table, column: str | None) -> Sequence[list[object]]:
    if column is None:
        return [[]] * len(table)
    return [one or [] for one in table.column(column).to_pylist()]


def read_vectors(data: str, vector: str, id_column: str | None) -> tuple[torch.Tensor, pa.Table]:
    """(vectors `[N, D]`, the other columns, `id_column` first).

    Raises:
        ExportError: no such column, or lists of unlike lengths; names the file.
    """
    parts, tables = [], []
    for path in (file.uri for file in find_parquet(data)):
        table = open_parquet(path).read()
        for column in (vector, id_column):
            if column is not None and column not in table.column_names:
                raise ExportError(f"{path} has no column {column!r}; it has {table.column_names}")
        lists = table.column(vector).combine_chunks()
        lengths = pc.list_value_length(lists)
        if lists.null_count or pc.count_distinct(lengths).as_py() != 1 or lists.flatten().null_count:
            raise ExportError(f"{path}: column {vector!r} must hold vectors of one length, without nulls")
        numbers = np.asarray(lists.flatten().to_numpy(zero_copy_only=False), dtype=np.float32)
        parts.append(torch.from_numpy(numbers.reshape(len(table), -1).copy()))
        tables.append(table.drop_columns([vector]))
    widths = {part.shape[1] for part in parts}
    if len(widths) > 1:
        raise ExportError(f"{data}: column {vector!r} has vectors of {sorted(widths)} numbers; they must be alike")
    table = pa.concat_tables(tables)
    if id_column is not None:
        table = table.select([id_column, *(name for name in table.column_names if name != id_column)])
    return torch.cat(parts), table
