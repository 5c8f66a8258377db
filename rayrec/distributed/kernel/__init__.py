"""Kernels that look up and train the shards of one rank; the only users of fbgemm's embedding operators in training."""

from fbgemm_gpu.split_embedding_configs import EmbOptimType

from rayrec.distributed.kernel.choice import check_trainable
from rayrec.distributed.kernel.factory import (
    MatrixKernel,
    make_matrix_kernel,
    make_pooling_kernel,
    make_vector_kernel,
    pooling_group,
    vector_group,
)
from rayrec.distributed.kernel.fused import CacheGuard, FusedKernel
from rayrec.distributed.kernel.interface import Kernel, updating
from rayrec.distributed.kernel.local_table import LocalTable, Lookups
from rayrec.distributed.kernel.optimizer_rules import RULES, DecayMode, rule_of
from rayrec.distributed.kernel.optimizer_spec import OptimizerSpec
from rayrec.distributed.kernel.row_kernel import RowKernel

__all__ = [
    "RULES",
    "CacheGuard",
    "DecayMode",
    "EmbOptimType",
    "FusedKernel",
    "Kernel",
    "LocalTable",
    "Lookups",
    "MatrixKernel",
    "OptimizerSpec",
    "RowKernel",
    "check_trainable",
    "make_matrix_kernel",
    "make_pooling_kernel",
    "make_vector_kernel",
    "pooling_group",
    "rule_of",
    "updating",
    "vector_group",
]
