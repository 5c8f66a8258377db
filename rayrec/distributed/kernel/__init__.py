"""Kernels that look up and train the shards of one rank, and the one door to fbgemm's embedding operators."""

from fbgemm_gpu.split_embedding_configs import EmbOptimType

from rayrec.distributed.kernel.fused import FusedKernel
from rayrec.distributed.kernel.optimizer import FUSED_ON_CPU, OptimizerSpec
from rayrec.distributed.kernel.rows import RowGroups, RowKernel
from rayrec.distributed.kernel.tables import Kernel, LocalTable, Lookups, PoolingKernel, VectorKernel
from rayrec.distributed.kernel.vectors import FusedVectorKernel

__all__ = [
    "FUSED_ON_CPU",
    "EmbOptimType",
    "FusedKernel",
    "FusedVectorKernel",
    "Kernel",
    "LocalTable",
    "Lookups",
    "OptimizerSpec",
    "PoolingKernel",
    "RowGroups",
    "RowKernel",
    "VectorKernel",
]
