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
    "LowRankCrossNet",
    "Perceptron",
    "PoolingType",
    "SwishLayerNorm",
]
