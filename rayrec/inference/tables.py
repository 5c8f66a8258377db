"""A checkpoint's tables into files of bytes, in blocks of rows: memory does not grow with the tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch

from rayrec.inference.artifact import map_tables
from rayrec.quant import TableFormat, TablePlace, place_tables
from rayrec.quant.formats import blocks_of, quantize_rows
from rayrec.quant.layout import TABLE_ALIGNMENT, TableConfig

ReadRows = Callable[[str, int, int], torch.Tensor]  # table, first row, row after the last → [rows, dim]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Every table in several formats, in one file, to choose from.

    Args:
        data: the file's bytes, mapped.
        places: by format and table.
    """

    data: torch.Tensor
    places: dict[TableFormat, dict[str, TablePlace]]

    def chosen(self, formats: Mapping[str, TableFormat]) -> dict[str, TablePlace]:
        """The place of each table in its format."""
        return {table: self.places[format][table] for table, format in formats.items()}

    def floats(self, table: str) -> torch.Tensor:
        """float32 `[rows, dim]`, mapped: as trained."""
        place = self.places[TableFormat.FP32][table]
        return self.data[place.begin : place.end].view(torch.float32).view(place.rows, place.dim)


def write_candidates(
    path: Path, tables: Sequence[TableConfig], read: ReadRows, formats: Sequence[TableFormat]
) -> Candidates:
    """Reads every table once, as float32, and quantizes it to the other formats.

    Raises:
        ValueError: a number that a format cannot hold; names table and row.
    """
    places: dict[TableFormat, dict[str, TablePlace]] = {}
    at = 0
    for format in dict.fromkeys([TableFormat.FP32, *formats]):
        made, size = place_tables(tables, {table.name: format for table in tables})
        places[format] = {place.table: replace(place, begin=place.begin + at) for place in made}
        at += size
    with open(path, "wb") as file:
        file.truncate(at)
        for table in tables:
            for start, stop in blocks_of(table.num_embeddings, table.embedding_dim):
                rows = read(table.name, start, stop).float()
                for format, by_table in places.items():
                    place = by_table[table.name]
                    packed = quantize_rows(rows, format, table.name)
                    _write(file, place.begin + start * place.row_bytes, packed)
    return Candidates(map_tables(path), places)


def write_chosen(
    path: Path, candidates: Candidates, tables: Sequence[TableConfig], formats: Mapping[str, TableFormat]
) -> list[TablePlace]:
    """The tables in the chosen formats, one after the other; returns their places in the file."""
    places, size = place_tables(tables, formats)
    with open(path, "wb") as file:
        file.truncate(max(size, TABLE_ALIGNMENT))
        for place in places:
            source = candidates.places[place.format][place.table]
            for start, stop in blocks_of(place.end - place.begin, 1, numbers=64 << 20):
                _write(file, place.begin + start, candidates.data[source.begin + start : source.begin + stop])
    return places


def _write(file: BinaryIO, at: int, data: torch.Tensor) -> None:
    file.seek(at)
    file.write(data.contiguous().view(-1).numpy().data)
