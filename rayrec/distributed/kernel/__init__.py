"""Kernels that look up and train the shards of one rank; the only users of fbgemm's embedding operators in training."""

from fbgemm_gpu.split_embedding_configs import EmbOptimType

from rayrec.distributed.kernel.choice import (
    MatrixKernel,
    check_trainable,
    make_matrix_kernel,
    make_pooling_kernel,
    make_vector_kernel,
    pooling_group,
    updating,
    vector_group,
)
from rayrec.distributed.kernel.fused import CacheGuard, FusedKernel
from rayrec.distributed.kernel.interface import (
    Kernel,
    LocalTable,
    Lookups,
    PoolingKernel,
    UpdatingKernel,
    VectorKernel,
)
from rayrec.distributed.kernel.optimizer_rules import RULES, rule_of
from rayrec.distributed.kernel.optimizer_spec import OptimizerSpec
from rayrec.distributed.kernel.recording import RecordingKernel
from rayrec.distributed.kernel.row_kernel import RowGroups, make_anchor

__all__ = [
    "RULES",
    "CacheGuard",
    "EmbOptimType",
    "FusedKernel",
    "Kernel",
    "LocalTable",
    "Lookups",
    "MatrixKernel",
    "OptimizerSpec",
    "PoolingKernel",
    "RecordingKernel",
    "RowGroups",
    "UpdatingKernel",
    "VectorKernel",
    "check_trainable",
    "make_anchor",
    "make_matrix_kernel",
    "make_pooling_kernel",
    "make_vector_kernel",
    "pooling_group",
    "rule_of",
    "updating",
    "vector_group",
]
