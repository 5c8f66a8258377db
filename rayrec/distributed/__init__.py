"""Sharded training: plans, exchanges, kernels, executors, sharded modules."""

from rayrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from rayrec.distributed.embedding_types import EmbeddingComputeKernel
from rayrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.distributed.train_pipeline import TrainPipeline
from rayrec.distributed.types import ParameterSharding, ShardingEnv, ShardingPlan, ShardingType

__all__ = [
    "DistributedModelParallel",
    "EmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder",
    "EmbeddingComputeKernel",
    "ParameterSharding",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingType",
    "TrainPipeline",
]
