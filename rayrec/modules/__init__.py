"""Building blocks on one process: table configs, embedding collections, dense layers."""

from rayrec.modules.activation import SwishLayerNorm
from rayrec.modules.configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from rayrec.modules.crossnet import CrossNet, LowRankCrossNet, LowRankMixtureCrossNet, VectorCrossNet
from rayrec.modules.embedding import EmbeddingBagCollection, EmbeddingCollection
from rayrec.modules.feature_processor import (
    FeatureProcessedEmbeddingBagCollection,
    FeatureProcessor,
    PositionWeightedProcessor,
)
from rayrec.modules.mlp import MLP

__all__ = [
    "MLP",
    "BaseEmbeddingConfig",
    "CrossNet",
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "FeatureProcessedEmbeddingBagCollection",
    "FeatureProcessor",
    "LowRankCrossNet",
    "LowRankMixtureCrossNet",
    "PoolingType",
    "PositionWeightedProcessor",
    "SwishLayerNorm",
    "VectorCrossNet",
]
