"""The one place where fbgemm's table-batched embedding (TBE) is made."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeAlias

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)

from rayrec.distributed.kernel.host_memory import HostMemory, settle, small_specs
from rayrec.distributed.kernel.optimizer_rules import DecayMode
from rayrec.distributed.kernel.padding import padded
from rayrec.distributed.kernel.tables import LocalTable
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
    None: WeightDecayMode.NONE,  # part of the formula, or none
    DecayMode.L2: WeightDecayMode.L2,
    DecayMode.DECOUPLE: WeightDecayMode.DECOUPLE,
}


def cuda_tbe(
    tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device, scale: float = 1.0
) -> TBE:
    """The TBE of some tables on a GPU, each as wide as fbgemm needs it.

    Args:
        scale: by which gradients are larger than they should be, see `Padding`.
    """
    specs = [
        (table.rows.size, padded(table.cols.size), _LOCATIONS[table.kernel], ComputeDevice.CUDA) for table in tables
    ]
    return _make(specs, tables[0], table_of_lookup, device, scale)


def host_tbe(tables: Sequence[LocalTable], table_of_lookup: Sequence[int], memory: HostMemory, first: int = 0) -> TBE:
    """The TBE of some tables on a CPU, whose memory begins with table `first` of `memory`."""
    tbe = _make(small_specs(tables), tables[0], table_of_lookup, torch.device("cpu"))
    settle(tbe, tables, table_of_lookup, memory, first)
    return tbe


def set_count(tbe: TBE, updates: int) -> None:
    """Tells fbgemm how many updates came before the one of the next lookup, which it counts by itself."""
    tbe.iter_cpu.fill_(updates)
    if not updates:
        tbe.iter.zero_()  # fbgemm takes a count of 0 on the host for one that was not loaded, and reads this one


def _make(
    specs: list[tuple[int, int, EmbeddingLocation, ComputeDevice]],
    first: LocalTable,
    table_of_lookup: Sequence[int],
    device: torch.device,
    scale: float = 1.0,
) -> TBE:
    spec = first.update
    return SplitTableBatchedEmbeddingBagsCodegen(
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
        bounds_check_mode=BoundsCheckMode.NONE,  # ids were checked where they came in, with their names
        device=device,
    )
