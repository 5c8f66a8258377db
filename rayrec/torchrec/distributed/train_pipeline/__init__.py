"""`torchrec.distributed.train_pipeline`: training pipelines, over `rayrec.distributed.TrainPipeline`."""

from rayrec.distributed.pipeline import sparse_features
from rayrec.torchrec.distributed.train_pipeline.gradient_accumulation import (
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
)
from rayrec.torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from rayrec.torchrec.distributed.train_pipeline.pipeline_stage import (
    PipelineStage,
    SparseDataDistUtil,
    StagedTrainPipeline,
)
from rayrec.torchrec.distributed.train_pipeline.train_pipelines import (
    EvalPipelineFusedSparseDist,
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TorchCompileConfig,
    TrainPipeline,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelinePT2,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistCompAutograd,
    TrainPipelineSparseDistLite,
)
from rayrec.torchrec.distributed.train_pipeline.utils import DataLoadingThread
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = [
    "DataLoadingThread",
    "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist",
    "GradientAccumulationConfig",
    "GradientAccumulationWrapper",
    "PipelineStage",
    "PrefetchTrainPipelineSparseDist",
    "SparseDataDistUtil",
    "StagedTrainPipeline",
    "TorchCompileConfig",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineContext",
    "TrainPipelineFusedSparseDist",
    "TrainPipelinePT2",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistCompAutograd",
    "TrainPipelineSparseDistLite",
    "sparse_features",
]
