"""Sets the last rows of Parquet files aside for evaluation, whatever the number of files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.data.errors import DataError
from rayrec.data.tools.parquet_parts import Layout, write_parts

_CHUNK_ROWS = 65_536


def hold_out(files: Sequence[Path], share: float, train: Path, held: Path, layout: Layout) -> tuple[int, int]:
    """Moves files to `train`, and those of the last rows to `held`; the one file that has both is cut in two.

    Args:
        files: in the order of their rows.
        share: of all rows, that is held out; at least one row goes to each side.

    Returns:
        rows to train on, rows held out.

    Raises:
        DataError: fewer than two rows.
    """
    rows = [pq.read_metadata(file).num_rows for file in files]
    total = sum(rows)
    if total < 2:
        raise DataError(f"{total} rows cannot be split", file=str(files[0]), fix="give more rows")
    first_held = total - min(max(1, round(total * share)), total - 1)
    train.mkdir(parents=True, exist_ok=True)
    held.mkdir(parents=True, exist_ok=True)
    at = 0
    for file, size in zip(files, rows, strict=True):
        if first_held <= at:
            file.rename(held / file.name)
        elif at + size <= first_held:
            file.rename(train / file.name)
        else:
            _cut(file, first_held - at, train, held, layout)
        at += size
    return first_held, total - first_held


def _cut(file: Path, rows: int, train: Path, held: Path, layout: Layout) -> None:
    for folder, first, stop in ((train, 0, rows), (held, rows, None)):
        with pq.ParquetFile(file) as parquet:
            write_parts(_between(parquet, first, stop), folder, file.stem, layout)
    file.unlink()


def _between(parquet: pq.ParquetFile, first: int, stop: int | None) -> Iterator[pa.RecordBatch]:
    at = 0
    for batch in parquet.iter_batches(_CHUNK_ROWS):
        start, end = max(first - at, 0), batch.num_rows if stop is None else min(stop - at, batch.num_rows)
        if start < end:
            yield batch.slice(start, end - start)
        at += batch.num_rows
        if stop is not None and at >= stop:
            return
