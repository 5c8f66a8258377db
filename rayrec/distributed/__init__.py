"""Sharded training: plans, exchanges, kernels, executors, sharded modules."""

from rayrec.distributed.collections.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from rayrec.distributed.collections.embedding_bag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from rayrec.distributed.comm.awaitable import Awaitable, NoWait
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.distributed.pipeline import TrainPipeline
from rayrec.distributed.plan.module_sharder import ModuleSharder, ShardingPlanner
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ParameterSharding, ShardingType

__all__ = [
    "Awaitable",
    "DistributedModelParallel",
    "EmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder",
    "EmbeddingComputeKernel",
    "ModuleSharder",
    "NoWait",
    "ParameterSharding",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingType",
    "TrainPipeline",
]
