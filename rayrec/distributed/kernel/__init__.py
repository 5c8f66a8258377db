"""Kernels that look up and train the shards of one rank; the only users of fbgemm's embedding operators in training."""

from fbgemm_gpu.split_embedding_configs import EmbOptimType

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

__all__ = [
    "RULES",
    "CacheGuard",
    "EmbOptimType",
    "FusedKernel",
    "Kernel",
    "LocalTable",
    "Lookups",
    "OptimizerSpec",
    "PoolingKernel",
    "RecordingKernel",
    "UpdatingKernel",
    "VectorKernel",
    "rule_of",
]
