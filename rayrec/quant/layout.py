"""Locations of tables in one array of bytes, for example a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayrec.modules import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig
from rayrec.quant.formats import TableFormat

TableConfig = EmbeddingBagConfig | EmbeddingConfig

TABLE_ALIGNMENT = 64  # bytes of a CPU cache line


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlace:
    """Location of a table in an array of bytes.

    Args:
        table: Name of the table.
        format: Number format.
        rows, dim: Shape of the table.
        begin: First byte.
        row_bytes: Bytes per row. Rows are contiguous.
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
    """Locates the tables one after another; returns the locations and the total bytes.

    Args:
        tables: The tables.
        formats: Format of each table, by name.
        row_alignment: Alignment of rows in bytes: 1 on a CPU, 16 on a GPU.

    Raises:
        ValueError: A table without a format, or a format for an unknown table.
    """
    names = [table.name for table in tables]
    for name in formats:
        if name not in names:
            raise ValueError(f"a table format names the unknown table {name!r}; tables are {names}")
    layout, begin = [], 0
    for table in tables:
        if table.name not in formats:
            raise ValueError(f"table {table.name!r}: no format given")
        row_bytes = formats[table.name].row_bytes(table.embedding_dim, row_alignment)
        location = TablePlace(
            table=table.name,
            format=formats[table.name],
            rows=table.num_embeddings,
            dim=table.embedding_dim,
            begin=begin,
            row_bytes=row_bytes,
        )
        layout.append(location)
        begin = -(-location.end // TABLE_ALIGNMENT) * TABLE_ALIGNMENT
    return layout, begin
