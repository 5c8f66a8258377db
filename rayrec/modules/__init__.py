"""Building blocks on one process: table configs, embedding collections, dense layers."""

from rayrec.modules.activation import SwishLayerNorm
from rayrec.modules.configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from rayrec.modules.crossnet import CrossNet, LowRankCrossNet
from rayrec.modules.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)
from rayrec.modules.feature_processor import FeatureProcessorsCollection, PositionWeightedProcessor
from rayrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from rayrec.modules.mlp import MLP, Perceptron

__all__ = [
    "MLP",
    "BaseEmbeddingConfig",
    "CrossNet",
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionInterface",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingCollectionInterface",
    "EmbeddingConfig",
    "FeatureProcessedEmbeddingBagCollection",
    "FeatureProcessorsCollection",
    "LowRankCrossNet",
    "Perceptron",
    "PoolingType",
    "PositionWeightedProcessor",
    "SwishLayerNorm",
]
