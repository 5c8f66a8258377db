"""Building blocks on one process: table configs, embedding collections, dense layers."""

from rayrec.modules.configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from rayrec.modules.embedding import EmbeddingBagCollection, EmbeddingCollection
from rayrec.modules.mlp import MLP

__all__ = [
    "MLP",
    "BaseEmbeddingConfig",
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "PoolingType",
]
