"""A checkpoint's tables into files of bytes, in blocks of rows: memory does not grow with the tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rayrec.inference.artifact import MappedTables, map_tables
from rayrec.quant import TableFormat, TablePlace, place_tables
from rayrec.quant.formats import blocks_of, quantize_rows
from rayrec.quant.layout import TABLE_ALIGNMENT, TableConfig

_COPIED_BYTES = 16 << 20
_READ_NUMBERS = 4 << 20  # of a table at once
ReadRows = Callable[[str, int, int], torch.Tensor]  # table, first row, row after the last → [rows, dim]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Every table in several formats, in one file, to choose from.

    Args:
        path: of the file.
        mapped: the file's bytes.
        places: by format and table.
    """

    path: Path
    mapped: MappedTables
    places: dict[TableFormat, dict[str, TablePlace]]

    def chosen(self, formats: Mapping[str, TableFormat]) -> dict[str, TablePlace]:
        """The place of each table in its format."""
        return {table: self.places[format][table] for table, format in formats.items()}

    def floats(self, table: str) -> torch.Tensor:
        """float32 `[rows, dim]`, mapped: as trained."""
        place = self.places[TableFormat.FP32][table]
        return self.mapped.data[place.begin : place.end].view(torch.float32).view(place.rows, place.dim)


def write_candidates(
    path: Path, tables: Sequence[TableConfig], read: ReadRows, formats: Mapping[str, Sequence[TableFormat]]
) -> Candidates:
    """Reads every table once, as float32, and quantizes it to the other formats that are wanted of it.

    Raises:
        ValueError: a number that a format cannot hold; names table and row.
    """
    places: dict[TableFormat, dict[str, TablePlace]] = {}
    at = 0
    for format in TableFormat:
        held = [table for table in tables if format is TableFormat.FP32 or format in formats[table.name]]
        made, size = place_tables(held, {table.name: format for table in held})
        places[format] = {place.table: replace(place, begin=place.begin + at) for place in made}
        at += size
    with open(path, "wb") as file:
        file.truncate(at)
        for table in tables:
            own = [by_table[table.name] for by_table in places.values() if table.name in by_table]
            for start, stop in blocks_of(table.num_embeddings, table.embedding_dim, _READ_NUMBERS):
                rows = read(table.name, start, stop).float()
                for place in own:
                    file.seek(place.begin + start * place.row_bytes)
                    file.write(quantize_rows(rows, place.format, table.name).view(-1).numpy().data)
    return Candidates(path, map_tables(path), places)


def write_chosen(
    path: Path, candidates: Candidates, tables: Sequence[TableConfig], formats: Mapping[str, TableFormat]
) -> list[TablePlace]:
    """The tables in the chosen formats, one after the other; returns their places in the file. Candidates that are just
    these become the file."""
    places, size = place_tables(tables, formats)
    if candidates.path.stat().st_size == max(size, TABLE_ALIGNMENT) and set(formats.values()) == {TableFormat.FP32}:
        os.replace(candidates.path, path)
        return places
    with open(path, "wb") as file, open(candidates.path, "rb") as source:
        file.truncate(max(size, TABLE_ALIGNMENT))
        for place in places:
            begin = candidates.places[place.format][place.table].begin
            source.seek(begin)
            file.seek(place.begin)
            for start, stop in blocks_of(place.end - place.begin, 1, numbers=_COPIED_BYTES):
                file.write(source.read(stop - start))
    return places
