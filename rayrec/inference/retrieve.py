"""Retrieval for files: the k best items for each row of Parquet files."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from rayrec.data.formats.find_parquet import find_parquet
from rayrec.inference.artifact import ExportError
from rayrec.inference.index import ItemIndex
from rayrec.storage.files import Found
from rayrec.storage.locations import plain_path
from rayrec.storage.parquet import open_parquet
from rayrec.storage.struct_fields import columns_named, leaf_columns, leaf_table

BATCH_ROWS = 4096
RECORD = b"rayrec.retrieve"


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

    def __post_init__(self) -> None:
        if self.history is not None and self.vector is not None:
            raise ValueError("set the history column (--history) or the vector column (--vector), not both")
        if self.k < 1:
            raise ValueError(f"k={self.k} must be at least 1")


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Rows and files that were written; `empty` rows have no items, because the model knows nothing of them."""

    rows: int
    files: int
    seconds: float
    empty: int = 0


def retrieve(index: ItemIndex, data: str | Path, out: str | Path, options: RetrieveOptions) -> Retrieved:
    """Writes a file for each input file: its columns, `items` (ids, best first), `scores`, and with `vectors` the query
    `vector`. Files that the same call wrote before are kept, so that it resumes an interrupted one.

    The schema of each file records what it was made from: index, options, and size and time of the input file.

    Args:
        data: Parquet file, folder or glob.

    Raises:
        DataError: `data` matches no file.
        ExportError: A column does not exist, or exists already; two files have the same name; or `out` has results of
            another index, other options or other data.
    """
    begin, num_rows, num_files, empty, folder = time.perf_counter(), 0, 0, 0, Path(out)
    files = {file.uri: file for file in find_parquet(str(data))}
    targets = {uri: folder / Path(plain_path(uri)).name for uri in files}
    if len(set(targets.values())) < len(targets):
        raise ExportError(f"{data}: files in different folders have the same name; retrieve for one folder at a time")
    records = {uri: _record(index, file, options) for uri, file in files.items()}
    done = {uri for uri, target in targets.items() if target.exists()}
    for uri in done:
        _check_record(targets[uri], records[uri])
    folder.mkdir(parents=True, exist_ok=True)
    for path, target in targets.items():
        if path in done:
            continue
        scratch = target.with_name(f".{target.name}.partial")
        source = open_parquet(path)
        _check_columns(path, leaf_columns(source.schema_arrow), options)
        writer: pq.ParquetWriter | None = None
        for batch in source.iter_batches(BATCH_ROWS):
            table = _with_items(index, pa.Table.from_batches([batch]), options)
            table = table.replace_schema_metadata({**(table.schema.metadata or {}), RECORD: json.dumps(records[path])})
            writer = writer or pq.ParquetWriter(scratch, table.schema)
            writer.write_table(table)
            num_rows += len(table)
            empty += pc.sum(pc.equal(pc.list_value_length(table.column("items")), 0)).as_py() or 0
        if writer is not None:
            writer.close()
            scratch.rename(target)
            num_files += 1
    return Retrieved(num_rows, num_files, time.perf_counter() - begin, empty)


def _record(index: ItemIndex, file: Found, options: RetrieveOptions) -> dict[str, Any]:
    return {"index": index.report.version, "options": asdict(options), "data": [file.size_bytes, file.changed_ns]}


def _check_record(target: Path, record: dict[str, Any]) -> None:
    """
    Raises:
        ExportError: The file was made from something else.
    """
    try:
        found = json.loads((pq.read_schema(target).metadata or {})[RECORD])
    except (OSError, KeyError, ValueError):
        found = {}
    for part in record:
        if found.get(part) != record[part]:
            made = f"of {part} {found[part]}, not {record[part]}" if part in found else "of an unknown index"
            raise ExportError(f"{target} has results {made}: give another folder, or remove this one")


def _check_columns(path: str, schema: pa.Schema, options: RetrieveOptions) -> None:
    for added in ("items", "scores", *(["vector"] if options.vectors else [])):
        if added in schema.names:
            raise ExportError(f"{path} has a column {added!r}, which the results have as well: rename it")
    for column in (options.history, options.vector, options.exclude):
        if column is None:
            continue
        if column not in schema.names:
            raise ExportError(f"{path} has no column {column!r}; it has {schema.names}")
        if not pa.types.is_list(schema.field(column).type) and not pa.types.is_large_list(schema.field(column).type):
            raise ExportError(f"{path}: column {column!r} must be a list, not {schema.field(column).type}")


def _with_items(index: ItemIndex, table: pa.Table, options: RetrieveOptions) -> pa.Table:
    exclude = _lists(table, options.exclude)
    if options.history is not None:
        histories = _lists(table, options.history)
        queries = index.queries(histories)
    elif options.vector is not None:
        histories, queries = [], torch.tensor(_lists(table, options.vector), dtype=torch.float32)
    else:
        queries, histories = index.queries_of(table), _lists(table, index.seen_column)
    if histories and not options.keep_seen:
        exclude = [[*history, *excluded] for history, excluded in zip(histories, exclude, strict=True)]
    scores, rows = index.search(queries, options.k, exclude)
    item_scores = [row_scores[row_scores > float("-inf")].tolist() for row_scores in scores]
    table = table.append_column("items", pa.array(index.ids_of(rows), pa.list_(index.items.column(0).type)))
    table = table.append_column("scores", pa.array(item_scores, pa.list_(pa.float32())))
    if not options.vectors:
        return table
    return table.append_column("vector", pa.array(list(queries.numpy()), pa.list_(pa.float32())))


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
