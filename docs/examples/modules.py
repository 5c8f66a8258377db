"""Tables and layers of a model in one process; sharding replaces the collections later."""

import torch

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
from rayrec.sparse import KeyedJaggedTensor
from rayrec.torchrec.modules.crossnet import LowRankMixtureCrossNet, VectorCrossNet
from rayrec.torchrec.modules.feature_processor import PositionWeightedProcessor
from rayrec.torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from rayrec.torchrec.modules.regroup import KTRegroupAsDict

user = EmbeddingBagConfig(name="user", num_embeddings=100, embedding_dim=8, feature_names=["user"])
tags = EmbeddingBagConfig(
    name="tags", num_embeddings=20, embedding_dim=4, feature_names=["tags"], pooling=PoolingType.MEAN
)
batch = KeyedJaggedTensor(["user", "tags"], torch.tensor([7, 42, 1, 2, 3]), lengths=torch.tensor([1, 1, 2, 1]))

bags: EmbeddingBagCollectionInterface = EmbeddingBagCollection([user, tags])
pooled = bags(batch)
assert pooled["user"].shape == (2, 8) and pooled["tags"].shape == (2, 4)
groups = KTRegroupAsDict([["user", "tags"], ["tags"]], ["deep", "wide"])([pooled])
assert groups["deep"].shape == (2, 12)

history = EmbeddingConfig(
    name="history", num_embeddings=20, embedding_dim=4, feature_names=["tags"], data_type=DataType.FP16
)
sequences: EmbeddingCollectionInterface = EmbeddingCollection([history])
assert sequences(batch)["tags"].to_padded_dense(2).shape == (2, 2, 4)  # a vector for each id

# Weights by position, which the model learns.
weighted = EmbeddingBagCollection([EmbeddingBagConfig(20, 4, "seen", feature_names=["tags"])], is_weighted=True)
by_position = FeatureProcessedEmbeddingBagCollection(weighted, PositionWeightedProcessor({"tags": 5}))
assert by_position(batch)["tags"].shape == (2, 4)

x = torch.rand(2, 12)
for layer in (
    CrossNet(12, num_layers=2),
    LowRankCrossNet(12, num_layers=2, low_rank=4),
    LowRankMixtureCrossNet(12, num_layers=2, num_experts=2, low_rank=4),
    VectorCrossNet(12, num_layers=2),
    SwishLayerNorm(12),
):
    assert layer(x).shape == (2, 12)
assert MLP(12, [16, 4])(x).shape == (2, 4) and Perceptron(12, 3)(x).shape == (2, 3)
