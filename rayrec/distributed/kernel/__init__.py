"""Kernels that look up and train the shards of one rank, and the one door to fbgemm's embedding operators."""

from fbgemm_gpu.split_embedding_configs import EmbOptimType

from rayrec.distributed.kernel.choice import (
    make_matrix_kernel,
    make_pooling_kernel,
    make_vector_kernel,
    pooling_group,
    updating,
    vector_group,
)
from rayrec.distributed.kernel.fused import FusedKernel
from rayrec.distributed.kernel.matrix import RowGroups, make_anchor
from rayrec.distributed.kernel.optimizer import OptimizerSpec
from rayrec.distributed.kernel.tables import (
    Kernel,
    LocalTable,
    Lookups,
    MatrixKernel,
    PoolingKernel,
    UpdatingKernel,
    VectorKernel,
)

__all__ = [
    "EmbOptimType",
    "FusedKernel",
    "Kernel",
    "LocalTable",
    "Lookups",
    "MatrixKernel",
    "OptimizerSpec",
    "PoolingKernel",
    "RowGroups",
    "UpdatingKernel",
    "VectorKernel",
    "make_anchor",
    "make_matrix_kernel",
    "make_pooling_kernel",
    "make_vector_kernel",
    "pooling_group",
    "updating",
    "vector_group",
]
