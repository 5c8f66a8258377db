"""Writes a stream of rows as Parquet files of bounded size, each under its name only when it is whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the Parquet files are cut.

    Args:
        rows_per_file: rows of a file, the last one of each input may have fewer.
        row_group_rows: rows of a row group.
    """

    rows_per_file: int = 4 << 20
    row_group_rows: int = 1 << 17


def write_parts(batches: Iterable[pa.RecordBatch], folder: Path, stem: str, layout: Layout) -> list[Path]:
    """Writes rows in their order as `<stem>-00000.parquet` and so on, holding one row group in memory.

    Returns:
        the files that were written; none for no rows. What `batches` raises leaves no part of a file behind.
    """
    written: list[Path] = []
    writer: pq.ParquetWriter | None = None
    part, rows = folder / f"_{stem}.part", 0
    try:
        for group in _groups(batches, layout):
            writer = writer or _open(part, group.schema)
            writer.write_table(group, row_group_size=layout.row_group_rows)
            rows += group.num_rows
            if rows == layout.rows_per_file:
                written.append(_finish(writer, part, folder, stem, len(written)))
                writer, rows = None, 0
        if writer is not None:
            written.append(_finish(writer, part, folder, stem, len(written)))
            writer = None
    finally:
        if writer is not None:
            writer.close()
            part.unlink()
    return written


def _open(part: Path, schema: pa.Schema) -> pq.ParquetWriter:
    part.parent.mkdir(parents=True, exist_ok=True)
    return pq.ParquetWriter(part, schema)


def _finish(writer: pq.ParquetWriter, part: Path, folder: Path, stem: str, number: int) -> Path:
    writer.close()
    path = folder / f"{stem}-{number:05d}.parquet"
    part.rename(path)
    return path


def _groups(batches: Iterable[pa.RecordBatch], layout: Layout) -> Iterator[pa.Table]:
    """The rows as tables of one row group each, cut where a file ends."""
    waiting: list[pa.RecordBatch] = []
    rows, room = 0, layout.rows_per_file
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        while rows >= (size := min(layout.row_group_rows, room)):
            whole = pa.Table.from_batches(waiting)
            yield whole.slice(0, size)
            waiting, rows = whole.slice(size).to_batches(), rows - size
            room = room - size or layout.rows_per_file
    if rows:
        yield pa.Table.from_batches(waiting)
