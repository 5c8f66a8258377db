"""Reads a checkpoint's tables once, in blocks of rows, and writes them in their number formats.

`PartialTable` keeps the fp32 rows that the parity sample reads, so that the trained model can score it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.quant import TableFormat, TablePlace, place_tables
from rayrec.quant.formats import blocks_of, dequantize_rows, quantize_rows
from rayrec.quant.layout import TABLE_ALIGNMENT, TableConfig

_BLOCK_NUMBERS = 16 << 20
ReadRows = Callable[[str, int, int], torch.Tensor]  # table, first row, row after the last → [rows, dim]


class PartialTable(nn.Parameter):
    """A float32 table `[rows, dim]` that stores some of its rows; the weight of torch's lookups.

    Until it is filled, lookups return zeros and record their ids; `fill` then stores the recorded rows.

    Attributes:
        recorded: Ids of the lookups so far.
        ids: Stored rows, ascending, int64 `[n]`; None before `fill`.
        vectors: Their values, `[n, dim]`; None before `fill`.
    """

    recorded: list[torch.Tensor]
    ids: torch.Tensor | None
    vectors: torch.Tensor | None

    @staticmethod
    def of(rows: int, dim: int, ids: torch.Tensor | None = None, vectors: torch.Tensor | None = None) -> PartialTable:
        """An empty table, or one filled with these rows."""
        table = torch.zeros(1, dim).expand(rows, dim).as_subclass(PartialTable)
        table.recorded, table.ids, table.vectors = [], ids, vectors
        return table

    def fill(self, start: int, rows: torch.Tensor) -> None:
        """Stores the recorded rows of the block from row `start` on. Call it with all blocks, in order."""
        low, high = self._between(start, start + len(rows))
        assert self.ids is not None and self.vectors is not None
        self.vectors[low:high] = rows[self.ids[low:high] - start]

    def recorded_span(self, start: int, stop: int) -> tuple[int, int] | None:
        """The first recorded row of `[start, stop)` and the one after the last; None without any. Ends recording."""
        low, high = self._between(start, stop)
        assert self.ids is not None
        return (int(self.ids[low]), int(self.ids[high - 1]) + 1) if low < high else None

    def quantized(self, format: TableFormat, table: str) -> PartialTable:
        """The same rows, quantized and dequantized.

        Raises:
            ValueError: As `quantize_rows`.
        """
        if format is TableFormat.FP32 or self.vectors is None:
            return self
        rows, dim = self.shape
        return PartialTable.of(
            rows, dim, self.ids, dequantize_rows(quantize_rows(self.vectors, format, table), format, dim)
        )

    def _between(self, start: int, stop: int) -> list[int]:
        if self.ids is None:
            self.ids = torch.cat([torch.empty(0, dtype=torch.int64), *self.recorded]).unique()
            self.vectors = torch.zeros(len(self.ids), self.shape[1])
        return torch.searchsorted(self.ids, torch.tensor([start, stop])).tolist()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (F.embedding, F.embedding_bag):
            return super().__torch_function__(func, types, args, kwargs or {})
        ids, table = args[:2]
        if table.vectors is None or table.ids is None:
            table.recorded.append(ids.unique())
            return func(torch.zeros_like(ids), torch.zeros(1, table.shape[1]), *args[2:], **kwargs)
        indices = torch.searchsorted(table.ids, ids)
        if len(ids) and not torch.equal(table.ids[indices.clamp(max=len(table.ids) - 1)], ids):
            raise ValueError(
                "the model looks up different ids for the same rows: compare it on all rows, with --parity all"
            )
        return func(indices, table.vectors, *args[2:], **kwargs)


def fill_partial(partial_tables: Mapping[str, PartialTable], tables: Sequence[TableConfig], read: ReadRows) -> None:
    """Fills partial tables; reads only the recorded rows and those between them."""
    for table, start, rows in _blocks(
        tables, read, lambda table, start, stop: partial_tables[table].recorded_span(start, stop)
    ):
        partial_tables[table].fill(start, rows)


def write_tables(
    path: Path,
    tables: Sequence[TableConfig],
    formats: Mapping[str, TableFormat],
    read: ReadRows,
    partial_tables: Mapping[str, PartialTable] | None = None,
) -> tuple[list[TablePlace], int]:
    """Writes all tables to a file, each in its format; reads each once.

    Args:
        partial_tables: Filled on the way.

    Returns:
        The offsets of the tables, and the CRC-32 of the file.

    Raises:
        ValueError: A format cannot represent a number; names table and row.
    """
    places, size = place_tables(tables, formats)
    by_table, crc = {place.table: place for place in places}, 0
    with open(path, "wb", buffering=0) as file:
        for table, start, rows in _blocks(tables, read):
            place = by_table[table]
            if partial_tables is not None:
                partial_tables[table].fill(start, rows)
            padding = bytes(place.begin + start * place.row_bytes - file.tell())
            crc = _write(file, padding, crc)
            quantized = quantize_rows(rows, place.format, table, first=start)
            crc = _write(file, quantized.view(-1).numpy().data, crc)
        crc = _write(file, bytes(max(size, TABLE_ALIGNMENT) - file.tell()), crc)
        os.fsync(file.fileno())
    return places, crc


def _write(file: Any, data: bytes | memoryview, crc: int) -> int:
    """Writes all bytes to an unbuffered file; returns the updated checksum."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[file.write(remaining) :]
    return zlib.crc32(data, crc)


def _blocks(
    tables: Iterable[TableConfig], read: ReadRows, part: Callable[[str, int, int], tuple[int, int] | None] | None = None
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Table, first row and float32 rows of each block; a thread reads the next block meanwhile.

    Args:
        part: The rows to read of a block, None for none; default: all.
    """
    spans = (
        (table.name, *rows)
        for table in tables
        for start, stop in blocks_of(table.num_embeddings, table.embedding_dim, _BLOCK_NUMBERS)
        if (rows := (start, stop) if part is None else part(table.name, start, stop)) is not None
    )
    with ThreadPoolExecutor(1, "rayrec-tables") as reader:
        previous = None
        for table, start, stop in spans:
            submitted = (table, start, reader.submit(read, table, start, stop))
            if previous is not None:
                yield previous[0], previous[1], previous[2].result().float()
            previous = submitted
        if previous is not None:
            yield previous[0], previous[1], previous[2].result().float()
