"""Writes a stream of rows as Parquet files of bounded size. A file gets its name when it is complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the Parquet files.

    Args:
        rows_per_file: rows of a file; the last file of each input may have fewer.
        row_group_rows: rows of a row group.
    """

    rows_per_file: int = 4 << 20
    row_group_rows: int = 1 << 17


def write_parts(batches: Iterable[pa.RecordBatch], folder: Path, stem: str, layout: Layout) -> list[Path]:
    """Writes rows in order to `<stem>-00000.parquet` and so on, with one row group in memory.

    If `batches` raises, the incomplete file is removed.

    Returns:
        the files written; empty if `batches` has no rows.
    """
    written: list[Path] = []
    writer: pq.ParquetWriter | None = None
    partial, rows = folder / f"_{stem}.part", 0
    try:
        for group in _groups(batches, layout):
            writer = writer or _open(partial, group.schema)
            writer.write_table(group, row_group_size=layout.row_group_rows)
            rows += group.num_rows
            if rows == layout.rows_per_file:
                written.append(_finish(writer, partial, folder, stem, len(written)))
                writer, rows = None, 0
        if writer is not None:
            written.append(_finish(writer, partial, folder, stem, len(written)))
            writer = None
    finally:
        if writer is not None:
            writer.close()
            partial.unlink()
    return written


def _open(partial: Path, schema: pa.Schema) -> pq.ParquetWriter:
    partial.parent.mkdir(parents=True, exist_ok=True)
    return pq.ParquetWriter(partial, schema)


def _finish(writer: pq.ParquetWriter, partial: Path, folder: Path, stem: str, number: int) -> Path:
    writer.close()
    path = folder / f"{stem}-{number:05d}.parquet"
    partial.rename(path)
    return path


def _groups(batches: Iterable[pa.RecordBatch], layout: Layout) -> Iterator[pa.Table]:
    """Regroups the rows into tables of one row group, cut at the ends of files."""
    pending: list[pa.RecordBatch] = []
    rows, rows_until_end = 0, layout.rows_per_file
    for batch in batches:
        pending.append(batch)
        rows += batch.num_rows
        while rows >= (size := min(layout.row_group_rows, rows_until_end)):
            table = pa.Table.from_batches(pending)
            yield table.slice(0, size)
            pending, rows = table.slice(size).to_batches(), rows - size
            rows_until_end = rows_until_end - size or layout.rows_per_file
    if rows:
        yield pa.Table.from_batches(pending)
