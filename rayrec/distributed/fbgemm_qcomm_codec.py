"""Number formats on the wire, under TorchRec's names: a registry made here is given to a sharder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch

from rayrec.distributed.sharding.vector_transport import Codec

COMM_OPS = ("pooled_embeddings_all_to_all", "pooled_embeddings_reduce_scatter", "sequence_embeddings_all_to_all")


class CommType(Enum):
    """A number format. Vectors travel as the first three."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    MX4 = "mx4"

    def __str__(self) -> str:
        return self.value


_DTYPES = {CommType.FP32: torch.float32, CommType.FP16: torch.float16, CommType.BF16: torch.bfloat16}


@dataclass
class QCommsConfig:
    """The formats of vectors (forward) and of their gradients (backward).

    Args:
        forward_precision, backward_precision: FP32, FP16 or BF16.
        forward_loss_scale, backward_loss_scale, fp8_quantize_dim, fp8_quantize_dim_bwd, fp8_bwd_uses_143,
            mx4_quantize_dim, mx4_quantize_dim_bwd, mx4_rounding_mode, safe_check_on_nan_and_inf: of the other formats;
            kept, and refused where a registry is made of them.
    """

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32
    forward_loss_scale: float | None = None
    backward_loss_scale: float | None = None
    fp8_quantize_dim: int | None = None
    fp8_quantize_dim_bwd: int | None = None
    fp8_bwd_uses_143: bool | None = False
    mx4_quantize_dim: int | None = None
    mx4_quantize_dim_bwd: int | None = None
    mx4_rounding_mode: object | None = None
    safe_check_on_nan_and_inf: bool = False


def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig, comm_ops: Iterable[str] | None = None, device: torch.device | None = None
) -> dict[str, Codec]:
    """What a sharder takes as `qcomm_codecs_registry`: the same formats for every exchange.

    Args:
        comm_ops: names of exchanges; all by default.
        device: taken and not needed.

    Raises:
        ValueError: a format that vectors do not travel in, or a loss scale.
    """
    formats = (qcomms_config.forward_precision, qcomms_config.backward_precision)
    for kind in formats:
        if kind not in _DTYPES:
            raise ValueError(f"vectors do not travel as {kind.name}; use CommType.FP16 or CommType.BF16")
    if qcomms_config.forward_loss_scale or qcomms_config.backward_loss_scale:
        raise ValueError("there is no loss scale on the wire; use CommType.BF16, whose range is that of FP32")
    codec = Codec(forward=_DTYPES[formats[0]], backward=_DTYPES[formats[1]])
    return dict.fromkeys((str(getattr(op, "value", op)) for op in comm_ops or COMM_OPS), codec)
