"""Sharded training: plans, exchanges, kernels, executors, sharded modules.

Names are imported on first use, so that a plan can be read without the kernels.
"""

from typing import TYPE_CHECKING

from rayrec._runtime.imports import lazy_names

if TYPE_CHECKING:
    from rayrec.distributed.collections.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
    from rayrec.distributed.collections.embedding_bag import (
        EmbeddingBagCollectionSharder,
        ShardedEmbeddingBagCollection,
    )
    from rayrec.distributed.comm.awaitable import Awaitable
    from rayrec.distributed.comm.env import ShardingEnv
    from rayrec.distributed.comm.wire import BF16, FP8, FP8_WIDE, FP16, FP32, Codec, NumberFormat, fp8_rows, int8_rows
    from rayrec.distributed.kernel import EmbOptimType
    from rayrec.distributed.model_parallel import DistributedModelParallel
    from rayrec.distributed.pipeline import TrainPipeline
    from rayrec.distributed.plan.module_sharder import ModuleSharder
    from rayrec.distributed.plan.sharding_plan import ModuleSharding, ShardingPlan
    from rayrec.distributed.plan.shards import (
        CacheParams,
        EmbeddingComputeKernel,
        ParameterSharding,
        Shard,
        ShardingType,
        Span,
    )

__getattr__ = lazy_names(__name__)

__all__ = [
    "BF16",
    "FP8",
    "FP8_WIDE",
    "FP16",
    "FP32",
    "Awaitable",
    "CacheParams",
    "Codec",
    "DistributedModelParallel",
    "EmbOptimType",
    "EmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder",
    "EmbeddingComputeKernel",
    "ModuleSharder",
    "ModuleSharding",
    "NumberFormat",
    "ParameterSharding",
    "Shard",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingType",
    "Span",
    "TrainPipeline",
    "fp8_rows",
    "int8_rows",
]
