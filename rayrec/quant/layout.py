"""Where tables lie in one array of bytes, which a file can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayrec.modules import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig
from rayrec.quant.formats import TableFormat

TableConfig = EmbeddingBagConfig | EmbeddingConfig

TABLE_ALIGNMENT = 64  # bytes; a line of a CPU's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlace:
    """A table among the bytes of others.

    Args:
        begin: its first byte.
        row_bytes: of one row; rows follow one another.
    """

    table: str
    format: TableFormat
    rows: int
    dim: int
    begin: int
    row_bytes: int

    @property
    def end(self) -> int:
        return self.begin + self.rows * self.row_bytes


def place_tables(
    tables: Sequence[BaseEmbeddingConfig], formats: Mapping[str, TableFormat], row_alignment: int = 1
) -> tuple[list[TablePlace], int]:
    """A place for each table, one after the other, and the bytes of all of them.

    Args:
        formats: of each table, by name.
        row_alignment: rows begin at multiples of it; 1 on a CPU, 16 on a GPU.

    Raises:
        ValueError: a table without a format, or a format for no table.
    """
    names = [table.name for table in tables]
    for name in formats:
        if name not in names:
            raise ValueError(f"a table format is given for {name!r}, which is no table; there are {names}")
    places, at = [], 0
    for table in tables:
        if table.name not in formats:
            raise ValueError(f"table {table.name!r}: no format is given for it")
        row_bytes = formats[table.name].row_bytes(table.embedding_dim, row_alignment)
        place = TablePlace(
            table=table.name,
            format=formats[table.name],
            rows=table.num_embeddings,
            dim=table.embedding_dim,
            begin=at,
            row_bytes=row_bytes,
        )
        places.append(place)
        at = -(-place.end // TABLE_ALIGNMENT) * TABLE_ALIGNMENT
    return places, at
