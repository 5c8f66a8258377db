"""Number formats of exchanged vectors under TorchRec's names; creates the registry for a sharder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from rayrec.distributed.comm.wire import BF16, FP8, FP8_WIDE, FP16, FP32, Codec, NumberFormat, fp8_rows, int8_rows
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

COMM_OPS = ("POOLED_EMBEDDINGS_ALL_TO_ALL", "POOLED_EMBEDDINGS_REDUCE_SCATTER", "SEQUENCE_EMBEDDINGS_ALL_TO_ALL")


class CommType(Enum):
    """A number format."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    MX4 = "mx4"

    def __str__(self) -> str:
        return self.value


@dataclass
class QCommsConfig:
    """The formats of vectors (forward) and of their gradients (backward).

    Args:
        forward_precision, backward_precision: number formats. INT8 scales every 32 numbers by their minimum and
            maximum. FP8 without `fp8_quantize_dim` clips at ±0.9375 (backward ±0.875), like TorchRec.
        forward_loss_scale, backward_loss_scale: factor applied while numbers are FP16 or BF16; other formats ignore it.
        fp8_quantize_dim, fp8_quantize_dim_bwd: how many FP8 numbers share a scale, which avoids clipping; by default
            backward uses the value of forward.
        fp8_bwd_uses_143: FP8 gradients have 4 exponent bits, like vectors, instead of 5.
        fp8_output_dtype, output_dtype: must be float32, the dtype of received vectors, or None.
        mx4_quantize_dim, mx4_quantize_dim_bwd, mx4_rounding_mode: ignored; MX4 is not supported.
    """

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32
    forward_loss_scale: float | None = None
    backward_loss_scale: float | None = None
    fp8_quantize_dim: int | None = None
    fp8_quantize_dim_bwd: int | None = None
    fp8_bwd_uses_143: bool | None = False
    fp8_output_dtype: object | None = None
    mx4_quantize_dim: int | None = None
    mx4_quantize_dim_bwd: int | None = None
    mx4_rounding_mode: object | None = None
    output_dtype: object | None = None

    def __post_init__(self) -> None:
        if self.backward_precision is CommType.FP8 and self.fp8_quantize_dim_bwd is None:
            self.fp8_quantize_dim_bwd = self.fp8_quantize_dim


def _fp8(row: int | None, wide: bool) -> NumberFormat:
    if row is None:
        return FP8_WIDE if wide else FP8
    return fp8_rows(row, wide)


_FORMATS: dict[CommType, Callable[[int | None, bool], NumberFormat]] = {
    CommType.FP32: lambda row, wide: FP32,
    CommType.FP16: lambda row, wide: FP16,
    CommType.BF16: lambda row, wide: BF16,
    CommType.FP8: _fp8,
    CommType.INT8: lambda row, wide: int8_rows(),
}
_SCALED = (CommType.FP16, CommType.BF16)


def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig, comm_ops: Iterable[Any] | None = None, device: torch.device | None = None
) -> dict[str, Codec] | None:
    """Returns the `qcomm_codecs_registry` of a sharder, with the same formats for every exchange; None for float32.

    Args:
        qcomms_config: the formats.
        comm_ops: names of exchanges; all by default.
        device: ignored.

    Raises:
        ValueError: MX4, or another output dtype than float32.
    """
    config = qcomms_config
    for precision in (config.forward_precision, config.backward_precision):
        if precision not in _FORMATS:
            raise ValueError(
                f"{precision.name} is not supported: it has no CPU operator. Use CommType.INT8, or CommType.FP8 with "
                "fp8_quantize_dim"
            )
    if str(getattr(config.output_dtype or config.fp8_output_dtype, "name", "FP32")) != "FP32":
        raise ValueError("output_dtype must be float32, the dtype of received vectors: leave it out")
    if config.forward_precision is CommType.FP32 and config.backward_precision is CommType.FP32:
        return None
    codec = Codec(
        forward=_FORMATS[config.forward_precision](config.fp8_quantize_dim, False),
        backward=_FORMATS[config.backward_precision](config.fp8_quantize_dim_bwd, not config.fp8_bwd_uses_143),
        forward_scale=(config.forward_loss_scale or 1.0) if config.forward_precision in _SCALED else 1.0,
        backward_scale=(config.backward_loss_scale or 1.0) if config.backward_precision in _SCALED else 1.0,
    )
    return dict.fromkeys((str(getattr(op, "name", op)) for op in comm_ops or COMM_OPS), codec)
