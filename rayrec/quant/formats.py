"""The number formats of tables for inference: what a row looks like in bytes, and the way there and back.

An int8 or int4 row begins with its scale and its bias (fp16), by which q stands for q * scale + bias (Guan et al.,
"Post-training 4-bit quantization on embedding tables", 2019, arXiv:1911.02079).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)
import torch

# Quantized at once: what fits a core's cache; fbgemm's CUDA kernel overflows at 2**31.
_BLOCK_NUMBERS = {"cpu": 256 << 10, "cuda": 16 << 20}


class TableFormat(Enum):
    """The number format of a table."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits(self) -> int:
        return {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}[self.value]

    @property
    def code(self) -> int:
        """fbgemm's number of this format."""
        return {"fp32": 0, "fp16": 1, "int8": 2, "int4": 3}[self.value]

    @property
    def header_bytes(self) -> int:
        """Of a row: its scale and bias, where it has them."""
        return 4 if self.bits <= 8 else 0

    def holds(self, dim: int) -> bool:
        """Whether there are rows of `dim` numbers: int4 keeps two in a byte, and fbgemm reads no half of one."""
        return self is not TableFormat.INT4 or dim % 2 == 0

    def row_bytes(self, dim: int, alignment: int = 1) -> int:
        """Bytes of a row of `dim` numbers."""
        exact = self.header_bytes + dim * self.bits // 8
        return -(-exact // alignment) * alignment

    @classmethod
    def of(cls, kind: TableFormat | torch.dtype | str) -> TableFormat:
        """The format named by a word ("int8") or by a torch dtype.

        Raises:
            ValueError: there is none of this name.
        """
        if isinstance(kind, TableFormat):
            return kind
        found = _DTYPES.get(kind) if isinstance(kind, torch.dtype) else _WORDS.get(str(kind).lower())
        if found is None:
            raise ValueError(f"there is no table format {str(kind)!r}; choose one of {', '.join(_WORDS)}")
        return found


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
    """uint8 `[N, row_bytes]` of the rows of a table from `first` on.

    Raises:
        ValueError: the format has no rows of this width, or a number that is not finite or that it cannot hold; names
            the table and the row.
    """
    if not format.holds(rows_ND.shape[1]):
        raise ValueError(
            f"table {table!r}: int4 keeps two numbers in a byte, and embedding_dim={rows_ND.shape[1]} is odd; "
            "take int8 for this table"
        )
    out = torch.zeros(
        len(rows_ND), format.row_bytes(rows_ND.shape[1], alignment), dtype=torch.uint8, device=rows_ND.device
    )
    for start, stop in blocks_of(len(rows_ND), rows_ND.shape[1], _BLOCK_NUMBERS[rows_ND.device.type]):
        block = rows_ND[start:stop].float()
        packed = _packed(block, format)
        _check_finite(block, packed, format, table, first + start)
        out[start:stop, : packed.shape[1]] = packed
    return out


def dequantize_rows(rows: torch.Tensor, format: TableFormat, dim: int) -> torch.Tensor:
    """float32 `[N, dim]`: the numbers that lookups of these rows see."""
    rows = rows[:, : format.row_bytes(dim)].contiguous()
    if format is TableFormat.FP32:
        return rows.view(torch.float32)
    if format is TableFormat.FP16:
        return rows.view(torch.float16).float()
    fused = torch.cat([rows[:, format.header_bytes :], rows[:, : format.header_bytes]], dim=1)
    return torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(fused, format.bits)


def blocks_of(rows: int, dim: int, numbers: int) -> Iterator[tuple[int, int]]:
    """Runs `[start, stop)` of rows that hold about so many numbers."""
    step = max(1, numbers // dim)
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _packed(rows_ND: torch.Tensor, format: TableFormat) -> torch.Tensor:
    if format is TableFormat.FP32:
        return rows_ND.contiguous().view(torch.uint8)
    if format is TableFormat.FP16:
        return rows_ND.half().contiguous().view(torch.uint8)
    dim = rows_ND.shape[1]
    beyond = -dim % (16 // format.bits)  # fbgemm packs two bytes at a time; a number that is there changes no scale
    padded = torch.cat([rows_ND, rows_ND[:, -1:].expand(-1, beyond)], dim=1) if beyond else rows_ND.contiguous()
    fused = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(padded, format.bits)
    return torch.cat([fused[:, -format.header_bytes :], fused[:, : format.row_bytes(dim) - format.header_bytes]], dim=1)


def _check_finite(rows_ND: torch.Tensor, packed: torch.Tensor, format: TableFormat, table: str, start: int) -> None:
    """Checks scale and bias for overflow, and the rows themselves for NaN, which scale and bias do not show."""
    halves = packed if format is TableFormat.FP16 else packed[:, : format.header_bytes].contiguous()
    if bool(rows_ND.sum().isfinite() & halves.view(torch.float16).sum(dtype=torch.float32).isfinite()):
        return  # else rows are looked at one by one
    finite = rows_ND.isfinite().all(1)
    if format is not TableFormat.FP32:
        finite &= halves.view(torch.float16).isfinite().all(1)
    if not bool(finite.all()):
        row = start + int((~finite).nonzero()[0])
        raise ValueError(
            f"table {table!r}, row {row}: it holds a number that is not finite or beyond what {format.value} can hold; "
            "keep the table as fp32, or look for what made training diverge"
        )
