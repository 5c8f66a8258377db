"""Encodes flat float32 numbers to messages in the formats of `rayrec.distributed.comm.wire`, and decodes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)
import torch
import torch.nn.functional as F

from rayrec.distributed.comm.wire import NumberFormat

_ops = torch.ops.fbgemm
_HALF_MAX = torch.finfo(torch.float16).max
_FP8 = {"fp8": (4, 15, 0.9375), "fp8_wide": (5, 31, 0.875)}  # exponent bits, exponent bias, largest number
_SCALED = {"fp8_rows": torch.float8_e4m3fn, "fp8_wide_rows": torch.float8_e5m2}


def encode(kind: NumberFormat, numbers: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Returns the flat message; the segment of a rank with n numbers has `kind.size(n)` elements.

    Args:
        kind: The format.
        numbers: float32, flat.
        sizes: Number of numbers of each rank's segment.
    """
    numbers = numbers.contiguous()
    if not kind.row:
        return _CAST[kind.name](numbers)
    if not len(numbers):
        return numbers.to(torch.uint8)
    rows = _padded(numbers, kind.row, sizes).view(-1, kind.row)
    return _rows(kind, rows).reshape(-1)


def decode(kind: NumberFormat, message: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Returns the flat float32 numbers of a message; `sizes` as for `encode`."""
    if not kind.row:
        if kind.name in _FP8:
            exponent, bias, _ = _FP8[kind.name]
            return _ops.HFP8QuantizedToFloat(message[None], exponent, bias)[0]
        return message.float()
    if not len(message):
        return message.float()
    rows = _from_rows(kind, message.view(-1, kind.row * kind.bytes + kind.row_bytes)).reshape(-1)
    filled = [-(-size // kind.row) * kind.row for size in sizes]
    if filled == list(sizes):
        return rows
    return torch.cat([segment[:size] for segment, size in zip(rows.split(filled), sizes, strict=True)])


def message_dtype(kind: NumberFormat) -> torch.dtype:
    """Data type of a message's elements."""
    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}.get(kind.name, torch.uint8)


def _padded(numbers: torch.Tensor, row: int, sizes: Sequence[int]) -> torch.Tensor:
    """Pads each segment with zeros to whole rows."""
    if all(size % row == 0 for size in sizes):
        return numbers
    return torch.cat([F.pad(segment, (0, -len(segment) % row)) for segment in numbers.split(list(sizes))])


def _rows(kind: NumberFormat, rows: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, bytes]."""
    if kind.name == "int8":
        return _ops.FloatToFused8BitRowwiseQuantized(rows)
    dtype = _SCALED[kind.name]
    largest = rows.abs().amax(1, keepdim=True) / torch.finfo(dtype).max
    scale = torch.where(largest > 0, largest, 1.0)
    return torch.cat(((rows / scale).to(dtype).view(torch.uint8), scale.view(torch.uint8)), 1)


def _from_rows(kind: NumberFormat, rows: torch.Tensor) -> torch.Tensor:
    if kind.name == "int8":
        return _ops.Fused8BitRowwiseQuantizedToFloat(rows)
    numbers, scale = rows.split([kind.row, kind.row_bytes], 1)
    return numbers.view(_SCALED[kind.name]).float() * scale.contiguous().view(torch.float32)


def _fp8(numbers: torch.Tensor, name: str) -> torch.Tensor:
    return _ops.FloatToHFP8Quantized(numbers[None], *_FP8[name])[0]


_CAST: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp32": lambda numbers: numbers,
    # The cast makes large numbers infinite, and the clamp finite again. Clamping first would copy the float32 numbers.
    "fp16": lambda numbers: numbers.half().clamp_(-_HALF_MAX, _HALF_MAX),
    "bf16": lambda numbers: numbers.bfloat16(),
    "fp8": lambda numbers: _fp8(numbers, "fp8"),
    "fp8_wide": lambda numbers: _fp8(numbers, "fp8_wide"),
}
