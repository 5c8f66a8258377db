"""`torchrec.modules`: table configs, collections and layers on one process."""

from rayrec.modules import (
    MLP,
    CrossNet,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
    EmbeddingConfig,
    LowRankCrossNet,
    Perceptron,
    PoolingType,
    SwishLayerNorm,
)
from rayrec.torchrec.modules.crossnet import LowRankMixtureCrossNet, VectorCrossNet
from rayrec.torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from rayrec.torchrec.modules.regroup import KTRegroupAsDict
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = [
    "MLP",
    "CrossNet",
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionInterface",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingCollectionInterface",
    "EmbeddingConfig",
    "FeatureProcessedEmbeddingBagCollection",
    "KTRegroupAsDict",
    "LowRankCrossNet",
    "LowRankMixtureCrossNet",
    "Perceptron",
    "PoolingType",
    "SwishLayerNorm",
    "VectorCrossNet",
]
