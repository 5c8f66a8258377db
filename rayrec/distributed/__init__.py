"""Sharded training: plans, exchanges, kernels, executors, sharded modules."""

from rayrec.distributed.comm import get_local_rank, get_local_size
from rayrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from rayrec.distributed.embedding_types import EmbeddingComputeKernel
from rayrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.distributed.sharded_module import ShardedModule
from rayrec.distributed.train_pipeline import (
    DataLoadingThread,
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipeline,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from rayrec.distributed.types import (
    Awaitable,
    ModuleSharder,
    NoWait,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingPlanner,
    ShardingType,
)
from rayrec.distributed.utils import get_unsharded_module_names, sharded_model_copy

__all__ = [
    "Awaitable",
    "DataLoadingThread",
    "DistributedModelParallel",
    "EmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder",
    "EmbeddingComputeKernel",
    "EvalPipelineSparseDist",
    "ModuleSharder",
    "NoWait",
    "ParameterSharding",
    "PrefetchTrainPipelineSparseDist",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardedModule",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingType",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "get_local_rank",
    "get_local_size",
    "get_unsharded_module_names",
    "sharded_model_copy",
]
