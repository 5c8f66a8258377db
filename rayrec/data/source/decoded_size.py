"""The decoded size of a row group, before it is decoded: a few kilobytes can hold many gigabytes."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.types import is_dictionary

from rayrec.data.mapping.arrow_types import is_list
from rayrec.data.mapping.lists import unnest
from rayrec.storage.errors import DataError
from rayrec.storage.parquet import open_parquet

MOST_BYTES = 1 << 30  # that one read may decode
_CHUNK_BYTES = 128 << 20


def check_size(
    parquet: pq.ParquetFile, uri: str, row_group: int, columns: Sequence[str], chunk_rows: int | None = None
) -> int:
    """How many rows of a row group to decode at a time.

    Args:
        columns: that are read.
        chunk_rows: decode at most so many; None: all of them at once.

    Raises:
        DataError: that would take more than `MOST_BYTES`, by what the footer says or by the longest of its texts.
    """
    group = parquet.metadata.row_group(row_group)
    chunks = [group.column(index) for index in range(group.num_columns)]
    read = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]
    sizes = [max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in read]
    a_row = sum(sizes) / max(1, group.num_rows)
    rows = max(1, group.num_rows if chunk_rows is None else min(chunk_rows, group.num_rows))
    if chunk_rows is not None and rows * a_row > _CHUNK_BYTES:
        rows = max(1, int(_CHUNK_BYTES / a_row))
    if rows * a_row > MOST_BYTES:
        raise _too_large(uri, row_group, int(rows * a_row), rows)
    # Texts that a dictionary page holds once come as often as rows name them: each is as long as the page, at most.
    texts = [c for c in read if c.physical_type == "BYTE_ARRAY" and c.has_dictionary_page]
    times = {c.path_in_schema: rows * c.num_values / max(1, group.num_rows) for c in texts}
    doubtful = [c.path_in_schema for c in texts if times[c.path_in_schema] * c.total_uncompressed_size > MOST_BYTES]
    for path, longest in _longest(uri, row_group, doubtful).items() if doubtful else ():
        if times[path] * longest > MOST_BYTES:
            raise _too_large(uri, row_group, int(times[path] * longest), rows, path.partition(".")[0])
    return rows


def _longest(uri: str, row_group: int, paths: list[str]) -> dict[str, int]:
    """Bytes of the longest text in the dictionary of each column; it is read, its rows are not."""
    with open_parquet(uri, read_dictionary=paths) as parquet:
        batch = next(parquet.iter_batches(1, row_groups=[row_group], columns=paths, use_threads=False))
    found = {}
    for path in paths:
        leaf = batch.column(path.partition(".")[0])
        leaf = unnest(leaf).leaf if is_list(leaf.type) else leaf
        found[path] = (pc.max(pc.binary_length(leaf.dictionary)).as_py() or 0) if is_dictionary(leaf.type) else 0
    return found


def _too_large(uri: str, row_group: int, needed: int, rows: int, column: str | None = None) -> DataError:
    return DataError(
        f"{rows:,} rows would take {needed / 1e9:,.1f} GB of memory when they are decoded",
        file=uri,
        row_group=row_group,
        column=column,
        fix="write the file with smaller row groups and shorter values, if it can be trusted; else remove it",
    )
