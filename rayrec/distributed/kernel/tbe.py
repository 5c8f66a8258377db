"""Creates fbgemm's table-batched embedding (TBE), and pads tables to the widths that it supports."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)

from rayrec.distributed.comm.host_memory import use_large_pages
from rayrec.distributed.kernel.local_table import LocalTable
from rayrec.distributed.kernel.optimizer_rules import DecayMode
from rayrec.distributed.plan.shards import DEFAULT_LOAD_FACTOR, EmbeddingComputeKernel

logging.getLogger("fbgemm_gpu").setLevel(logging.WARNING)

TBE: TypeAlias = SplitTableBatchedEmbeddingBagsCodegen
_LOCATIONS = {
    EmbeddingComputeKernel.FUSED: EmbeddingLocation.DEVICE,
    EmbeddingComputeKernel.FUSED_UVM: EmbeddingLocation.MANAGED,
    EmbeddingComputeKernel.FUSED_UVM_CACHING: EmbeddingLocation.MANAGED_CACHING,
}
_PRECISION = {torch.float32: SparseType.FP32, torch.float16: SparseType.FP16, torch.bfloat16: SparseType.BF16}
_DECAY = {
    None: WeightDecayMode.NONE,  # no weight decay, or part of the formula
    DecayMode.L2: WeightDecayMode.L2,
    DecayMode.DECOUPLE: WeightDecayMode.DECOUPLE,
}


def make_tbe(tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device, scale: float) -> TBE:
    """Creates the TBE of some tables, padded to fbgemm's widths.

    Args:
        tables: The tables.
        table_of_lookup: Index in `tables` of each lookup's table.
        device: "cpu" or a CUDA device.
        scale: Factor by which the gradients are too large; see `Padding`.
    """
    on_gpu, first, spec = device.type == "cuda", tables[0], tables[0].update
    specs = [
        (
            table.rows.size,
            padded(table.cols.size),
            _LOCATIONS.get(table.kernel, EmbeddingLocation.DEVICE) if on_gpu else EmbeddingLocation.HOST,
            ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU,
        )
        for table in tables
    ]
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=specs,
        feature_table_map=list(table_of_lookup),
        weights_precision=_PRECISION[first.config.data_type.dtype],
        output_dtype=SparseType.FP32,
        optimizer=spec.optimizer,
        learning_rate=spec.learning_rate / scale,
        eps=spec.eps,
        beta1=spec.beta1,
        beta2=spec.beta2,
        momentum=spec.momentum,
        eta=spec.eta,
        weight_decay=spec.weight_decay * scale,
        weight_decay_mode=_DECAY[spec.decay_mode if spec.weight_decay else None],
        stochastic_rounding=spec.stochastic_rounding,
        pooling_mode=PoolingMode.SUM,
        cache_load_factor=first.load_factor or DEFAULT_LOAD_FACTOR,
        bounds_check_mode=BoundsCheckMode.NONE,  # ids are checked before they are sent to this rank
        device=device,
    )
    for name in ("weights_host", "momentum1_host", "momentum2_host"):
        if hasattr(tbe, name):
            use_large_pages(getattr(tbe, name))
    return tbe


def set_count(tbe: TBE, updates: int) -> None:
    """Sets the number of updates before the one of the next lookup. fbgemm itself counts lookups."""
    tbe.iter_cpu.fill_(updates)
    if not updates:
        # fbgemm treats 0 on the host as "not loaded" and reads the device count.
        tbe.iter.zero_()


def padded(dim: int) -> int:
    """The width rounded up to a multiple of 4, as fbgemm requires."""
    return -(-dim // 4) * 4


class Padding:
    """Up to three additional zero columns of a table. Removes them from bags, and adds them to gradients.

    Args:
        dims: True width of each lookup.
        device: Device of the bags.
        per_row: Whether the optimizer keeps one number per row, the mean of g² over the padded width. Then gradients
            are multiplied by `scale` to make it the mean over the true width, and all lookups have one width.
    """

    def __init__(self, dims: Sequence[int], device: torch.device, per_row: bool) -> None:
        starts = accumulate(map(padded, dims), initial=0)
        self.width = sum(map(padded, dims))
        self.needed = sum(dims) < self.width
        self.scale = math.sqrt(padded(dims[0]) / dims[0]) if self.needed and per_row else 1.0
        columns = [start + col for start, dim in zip(starts, dims, strict=False) for col in range(dim)]
        self.columns = torch.tensor(columns if self.needed else [], dtype=torch.int64, device=device)

    def cut(self, bags: torch.Tensor) -> torch.Tensor:
        """`[B, padded widths]` to `[B, true widths]`."""
        true_bags: torch.Tensor = _Cut.apply(bags, self)
        return true_bags


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bags: torch.Tensor, padding: Padding) -> torch.Tensor:
        ctx.padding = padding
        return bags.index_select(1, padding.columns)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        padding: Padding = ctx.padding
        padded_grad = grads[0].new_zeros(grads[0].shape[0], padding.width)
        return padded_grad.index_copy_(1, padding.columns, grads[0] * padding.scale), None
