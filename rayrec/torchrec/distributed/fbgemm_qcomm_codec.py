"""Number formats of exchanged vectors by TorchRec's names: makes the registry for a sharder."""

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
        forward_precision, backward_precision: INT8 scales every 32 numbers by their least and greatest. FP8 without
            `fp8_quantize_dim` cuts what is beyond ±0.9375 (backward ±0.875), as TorchRec's does.
        forward_loss_scale, backward_loss_scale: numbers are multiplied by it while they travel as FP16 or BF16; the
            other formats need none and ignore it.
        fp8_quantize_dim, fp8_quantize_dim_bwd: so many numbers of FP8 share a scale, so that nothing is cut; backward
            the same as forward by default.
        fp8_bwd_uses_143: gradients travel with 4 exponent bits, as vectors do, not with 5.
        fp8_output_dtype, output_dtype: taken where they say float32, which vectors arrive in.
        mx4_quantize_dim, mx4_quantize_dim_bwd, mx4_rounding_mode: of MX4, which is refused.
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
    """What a sharder takes as `qcomm_codecs_registry`: the same formats for every exchange; None for float32.

    Args:
        comm_ops: names of exchanges; all by default.
        device: taken and not needed.

    Raises:
        ValueError: MX4, or an output in another format than float32.
    """
    of = qcomms_config
    for kind in (of.forward_precision, of.backward_precision):
        if kind not in _FORMATS:
            raise ValueError(
                f"vectors do not travel as {kind.name}, which has no operator for CPUs; use CommType.INT8, "
                "or CommType.FP8 with fp8_quantize_dim"
            )
    if str(getattr(of.output_dtype or of.fp8_output_dtype, "name", "FP32")) != "FP32":
        raise ValueError("vectors arrive as float32: leave output_dtype out")
    if of.forward_precision is CommType.FP32 and of.backward_precision is CommType.FP32:
        return None
    codec = Codec(
        forward=_FORMATS[of.forward_precision](of.fp8_quantize_dim, False),
        backward=_FORMATS[of.backward_precision](of.fp8_quantize_dim_bwd, not of.fp8_bwd_uses_143),
        forward_scale=(of.forward_loss_scale or 1.0) if of.forward_precision in _SCALED else 1.0,
        backward_scale=(of.backward_loss_scale or 1.0) if of.backward_precision in _SCALED else 1.0,
    )
    return dict.fromkeys((str(getattr(op, "name", op)) for op in comm_ops or COMM_OPS), codec)
