"""Calls of fbgemm's lookup in tables of mixed formats; one call serves several features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)
import torch

from rayrec.quant.formats import TableFormat
from rayrec.quant.layout import TablePlace

SUM, MEAN = 0, 1
_HOST, _DEVICE = 3, 0  # EmbeddingLocation; the CPU operator fails with DEVICE


@dataclass(frozen=True, slots=True)
class Reader:
    """A feature that reads a table.

    Args:
        place: Location of the table.
        key: Index of the feature among the input's keys.
        column: First output column of its vector.
        pooling: SUM or MEAN.
    """

    place: TablePlace
    key: int
    column: int
    pooling: int


@dataclass(frozen=True, slots=True)
class Call:
    """Features of one operator call: their keys are consecutive and have one pooling.

    The first bag need not start at the first id, so no id is copied.
    """

    first_key: int
    columns: tuple[tuple[int, int], ...]  # (first output column, width) of each feature
    pooling: int
    total_dim: int
    max_dim: dict[TableFormat, int]
    row_alignment: int
    placements: torch.Tensor
    begins: torch.Tensor
    formats: torch.Tensor
    dim_offsets: torch.Tensor

    @classmethod
    def of(cls, readers: Sequence[Reader], device: torch.device, row_alignment: int) -> Call:
        tables = [reader.place for reader in readers]
        dims = [table.dim for table in tables]
        edges = [sum(dims[:i]) for i in range(len(dims) + 1)]
        max_dim = {format: max([p.dim for p in tables if p.format is format], default=0) for format in TableFormat}
        location = _DEVICE if device.type == "cuda" else _HOST
        return cls(
            first_key=readers[0].key,
            columns=tuple((reader.column, reader.place.dim) for reader in readers),
            pooling=readers[0].pooling,
            total_dim=edges[-1],
            max_dim=max_dim,
            row_alignment=row_alignment,
            placements=torch.full((len(tables),), location, dtype=torch.int32, device=device),
            begins=torch.tensor([table.begin for table in tables], dtype=torch.int64, device=device),
            formats=torch.tensor([table.format.code for table in tables], dtype=torch.uint8, device=device),
            dim_offsets=torch.tensor(edges, dtype=torch.int32, device=device),
        )

    def run(
        self, tables: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Looks up float32 `[B, total_dim]`.

        Args:
            tables: Bytes of all tables.
            values: int64 ids of all features.
            offsets: `[features * B + 1]` of this call's bags.
            weights: Weights of the ids, or None.
        """
        return torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            tables,
            torch.empty(0, dtype=torch.uint8, device=tables.device),
            self.placements,
            self.begins,
            self.formats,
            self.dim_offsets,
            self.total_dim,
            0,
            self.max_dim[TableFormat.INT4],
            self.max_dim[TableFormat.INT8],
            self.max_dim[TableFormat.FP16],
            self.max_dim[TableFormat.FP32],
            values,
            offsets,
            self.pooling,
            weights,
            0,
            None,
            None,
            self.row_alignment,
            0,
            -1,
            -1,
        )


def calls_of(readers: Sequence[Reader], device: torch.device, row_alignment: int) -> list[Call]:
    """Groups the features into as few calls as the order of keys and their pooling allow."""
    calls: list[list[Reader]] = []
    for reader in sorted(readers, key=lambda reader: reader.key):
        last = calls[-1][-1] if calls else reader
        if reader.key == last.key + 1 and reader.pooling == last.pooling:
            calls[-1].append(reader)
        else:
            calls.append([reader])
    return [Call.of(call, device, row_alignment) for call in calls]
