"""`torchrec.distributed`: sharded training."""

from rayrec.distributed import (
    Awaitable,
    EmbeddingComputeKernel,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from rayrec.torchrec.distributed.comm import get_local_rank, get_local_size
from rayrec.torchrec.distributed.model_parallel import DistributedModelParallel
from rayrec.torchrec.distributed.module_sharder import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ModuleSharder,
    ShardingPlanner,
)
from rayrec.torchrec.distributed.sharded_module import ShardedModule
from rayrec.torchrec.distributed.train_pipeline import (
    DataLoadingThread,
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipeline,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from rayrec.torchrec.distributed.types import NoWait, ParameterSharding, ShardedTensor
from rayrec.torchrec.distributed.utils import get_unsharded_module_names, sharded_model_copy
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

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
    "ShardedTensor",
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
