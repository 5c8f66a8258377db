"""Number formats of tables for inference: byte layout of a row, quantization and dequantization.

An int8 or int4 row starts with its fp16 scale and bias; a number q means q * scale + bias (Guan et al., "Post-training
4-bit quantization on embedding tables", 2019, arXiv:1911.02079).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)
import torch

# Numbers quantized per call: they fit a core's cache; fbgemm's CUDA kernel overflows at 2**31.
_BLOCK_NUMBERS = {"cpu": 256 << 10, "cuda": 16 << 20}


class TableFormat(Enum):
    """Number format of a table."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits(self) -> int:
        return {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}[self.value]

    @property
    def code(self) -> int:
        """fbgemm's code of the format."""
        return {"fp32": 0, "fp16": 1, "int8": 2, "int4": 3}[self.value]

    @property
    def header_bytes(self) -> int:
        """Bytes of a row's scale and bias; 0 for floats."""
        return 4 if self.bits <= 8 else 0

    def holds(self, dim: int) -> bool:
        """Whether a row may have `dim` numbers: int4 stores two per byte and needs an even number."""
        return self is not TableFormat.INT4 or dim % 2 == 0

    def row_bytes(self, dim: int, alignment: int = 1) -> int:
        """Bytes per row of `dim` numbers."""
        exact = self.header_bytes + dim * self.bits // 8
        return -(-exact // alignment) * alignment

    @classmethod
    def of(cls, kind: TableFormat | torch.dtype | str) -> TableFormat:
        """The format for a name ("int8") or a torch dtype.

        Raises:
            ValueError: An unknown name.
        """
        if isinstance(kind, TableFormat):
            return kind
        table_format = _DTYPES.get(kind) if isinstance(kind, torch.dtype) else _WORDS.get(str(kind).lower())
        if table_format is None:
            raise ValueError(f"unknown table format {str(kind)!r}; choose one of {', '.join(_WORDS)}")
        return table_format


_WORDS = {format.value: format for format in TableFormat}
_DTYPES = {
    torch.float32: TableFormat.FP32,
    torch.float16: TableFormat.FP16,
    torch.int8: TableFormat.INT8,
    torch.uint8: TableFormat.INT8,
    torch.qint8: TableFormat.INT8,
    torch.quint8: TableFormat.INT8,
    torch.quint4x2: TableFormat.INT4,
}


def quantize_rows(
    rows_ND: torch.Tensor, format: TableFormat, table: str, alignment: int = 1, first: int = 0
) -> torch.Tensor:
    """Quantizes rows of a table to uint8 `[N, row_bytes]`.

    Args:
        rows_ND: The rows.
        format: The format.
        table: Name of the table, for errors.
        alignment: Alignment of rows in bytes.
        first: Number of the first row in the table, for errors.

    Raises:
        ValueError: A width that the format does not support, or a number that is not finite or out of range. Names the
            table and the row.
    """
    if not format.holds(rows_ND.shape[1]):
        raise ValueError(
            f"table {table!r}: int4 needs an even embedding_dim, not {rows_ND.shape[1]}; use int8 for this table"
        )
    quantized = torch.zeros(
        len(rows_ND), format.row_bytes(rows_ND.shape[1], alignment), dtype=torch.uint8, device=rows_ND.device
    )
    for start, stop in blocks_of(len(rows_ND), rows_ND.shape[1], _BLOCK_NUMBERS[rows_ND.device.type]):
        block = rows_ND[start:stop].float()
        packed = _packed(block, format)
        _check_finite(block, packed, format, table, first + start)
        quantized[start:stop, : packed.shape[1]] = packed
    return quantized


def dequantize_rows(rows: torch.Tensor, format: TableFormat, dim: int) -> torch.Tensor:
    """float32 `[N, dim]`, as lookups of these rows return them."""
    rows = rows[:, : format.row_bytes(dim)].contiguous()
    if format is TableFormat.FP32:
        return rows.view(torch.float32)
    if format is TableFormat.FP16:
        return rows.view(torch.float16).float()
    fused = torch.cat([rows[:, format.header_bytes :], rows[:, : format.header_bytes]], dim=1)
    return torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(fused, format.bits)


def blocks_of(rows: int, dim: int, numbers: int) -> Iterator[tuple[int, int]]:
    """Ranges `[start, stop)` of rows with about `numbers` numbers each."""
    step = max(1, numbers // dim)
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _packed(rows_ND: torch.Tensor, format: TableFormat) -> torch.Tensor:
    if format is TableFormat.FP32:
        return rows_ND.contiguous().view(torch.uint8)
    if format is TableFormat.FP16:
        return rows_ND.half().contiguous().view(torch.uint8)
    dim = rows_ND.shape[1]
    # fbgemm packs two bytes at a time; repeating a number of the row does not change its scale.
    beyond = -dim % (16 // format.bits)
    padded = torch.cat([rows_ND, rows_ND[:, -1:].expand(-1, beyond)], dim=1) if beyond else rows_ND.contiguous()
    fused = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(padded, format.bits)
    return torch.cat([fused[:, -format.header_bytes :], fused[:, : format.row_bytes(dim) - format.header_bytes]], dim=1)


def _check_finite(rows_ND: torch.Tensor, packed: torch.Tensor, format: TableFormat, table: str, start: int) -> None:
    """Checks scale and bias for overflow, and the rows for NaN, which scale and bias do not show."""
    halves = packed if format is TableFormat.FP16 else packed[:, : format.header_bytes].contiguous()
    if bool(rows_ND.sum().isfinite() & halves.view(torch.float16).sum(dtype=torch.float32).isfinite()):
        return
    finite = rows_ND.isfinite().all(1)
    if format is not TableFormat.FP32:
        finite &= halves.view(torch.float16).isfinite().all(1)
    if not bool(finite.all()):
        row = start + int((~finite).nonzero()[0])
        raise ValueError(
            f"table {table!r}, row {row}: a number is not finite or exceeds the range of {format.value}; "
            "keep the table as fp32, or check why training diverged"
        )
