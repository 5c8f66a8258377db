"""A checkpoint's tables, read once in blocks of rows and written in their number formats. Of the rows as they were
trained, those are kept that scores are compared on."""

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

_READ_NUMBERS = 16 << 20  # of a table at once
ReadRows = Callable[[str, int, int], torch.Tensor]  # table, first row, row after the last → [rows, dim]


class SomeRows(nn.Parameter):
    """A float32 table `[rows, dim]` in which only some rows are there; torch's lookups take it as their weight.

    Until it is filled, lookups give zeros, and their ids are noted: those are the rows that `fill` keeps.

    Attributes:
        noted: ids of the lookups so far.
        ids, kept: the rows that are there, ascending, int64 `[n]`, and their numbers, `[n, dim]`; None: not filled.
    """

    noted: list[torch.Tensor]
    ids: torch.Tensor | None
    kept: torch.Tensor | None

    @staticmethod
    def of(rows: int, dim: int, ids: torch.Tensor | None = None, kept: torch.Tensor | None = None) -> SomeRows:
        """One with nothing noted yet, or filled with these rows."""
        made = torch.zeros(1, dim).expand(rows, dim).as_subclass(SomeRows)
        made.noted, made.ids, made.kept = [], ids, kept
        return made

    def fill(self, start: int, rows: torch.Tensor) -> None:
        """Keeps what was noted of the rows from `start` on. All rows come once, in their order."""
        low, high = self._between(start, start + len(rows))
        assert self.ids is not None and self.kept is not None
        self.kept[low:high] = rows[self.ids[low:high] - start]

    def wants(self, start: int, stop: int) -> bool:
        """Whether a row of `[start, stop)` was noted; nothing is noted any more."""
        low, high = self._between(start, stop)
        return low < high

    def quantized(self, format: TableFormat, table: str) -> SomeRows:
        """The same rows with the numbers that lookups see in a format; raises ValueError as `quantize_rows`."""
        if format is TableFormat.FP32 or self.kept is None:
            return self
        rows, dim = self.shape
        return SomeRows.of(rows, dim, self.ids, dequantize_rows(quantize_rows(self.kept, format, table), format, dim))

    def _between(self, start: int, stop: int) -> list[int]:
        if self.ids is None:
            self.ids = torch.cat([torch.empty(0, dtype=torch.int64), *self.noted]).unique()
            self.kept = torch.zeros(len(self.ids), self.shape[1])
        return torch.searchsorted(self.ids, torch.tensor([start, stop])).tolist()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (F.embedding, F.embedding_bag):
            return super().__torch_function__(func, types, args, kwargs or {})
        ids, table = args[:2]
        if table.kept is None or table.ids is None:
            table.noted.append(ids.unique())
            return func(torch.zeros_like(ids), torch.zeros(1, table.shape[1]), *args[2:], **kwargs)
        places = torch.searchsorted(table.ids, ids)
        if len(ids) and not torch.equal(table.ids[places.clamp(max=len(table.ids) - 1)], ids):
            raise ValueError("the model looks up other ids than before: compare it on all rows, with --parity all")
        return func(places, table.kept, *args[2:], **kwargs)


def fill_some(some: Mapping[str, SomeRows], tables: Sequence[TableConfig], read: ReadRows) -> None:
    """Fills tables in which only some rows are there, from the blocks that have some of them."""
    for table, start, rows in _blocks(tables, read, lambda table, start, stop: some[table].wants(start, stop)):
        some[table].fill(start, rows)


def write_tables(
    path: Path,
    tables: Sequence[TableConfig],
    formats: Mapping[str, TableFormat],
    read: ReadRows,
    some: Mapping[str, SomeRows] | None = None,
) -> tuple[list[TablePlace], int]:
    """Writes every table in its format, one after the other, to the disk; reads each once.

    Args:
        some: filled on the way.

    Returns:
        The tables' places in the file, and its CRC-32.

    Raises:
        ValueError: a number that a format cannot hold; names table and row.
    """
    places, size = place_tables(tables, formats)
    by_table, crc = {place.table: place for place in places}, 0
    with open(path, "wb", buffering=0) as file:
        for table, start, rows in _blocks(tables, read):
            place = by_table[table]
            if some is not None:
                some[table].fill(start, rows)
            gap = bytes(place.begin + start * place.row_bytes - file.tell())
            for part in (gap, quantize_rows(rows, place.format, table, first=start).view(-1).numpy().data):
                crc = _written(file, part, crc)
        crc = _written(file, bytes(max(size, TABLE_ALIGNMENT) - file.tell()), crc)
        os.fsync(file.fileno())
    return places, crc


def _written(file: Any, data: bytes | memoryview, crc: int) -> int:
    """The checksum with these bytes, all of which are written."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
    return zlib.crc32(data, crc)


def _blocks(
    tables: Iterable[TableConfig], read: ReadRows, wanted: Callable[[str, int, int], bool] | None = None
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Table, first row and float32 rows of each block; a thread reads one while the one before is used."""
    spans = (
        (table.name, start, stop)
        for table in tables
        for start, stop in blocks_of(table.num_embeddings, table.embedding_dim, _READ_NUMBERS)
        if wanted is None or wanted(table.name, start, stop)
    )
    with ThreadPoolExecutor(1, "rayrec-tables") as reader:
        before = None
        for table, start, stop in spans:
            coming = (table, start, reader.submit(read, table, start, stop))
            if before is not None:
                yield before[0], before[1], before[2].result().float()
            before = coming
        if before is not None:
            yield before[0], before[1], before[2].result().float()
