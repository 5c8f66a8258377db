"""DeepFM cut into parts as in TorchRec, with its arguments and state names: dense and sparse features in, probabilities
out. `rayrec.models.DeepFM` is the complete model that a config names (Guo et al. 2017, arXiv:1703.04247).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.modules import EmbeddingBagCollection
from rayrec.torchrec.modules.deepfm import DeepFM, FactorizationMachine
from rayrec.torchrec.sparse import KeyedJaggedTensor, KeyedTensor


class SparseArch(nn.Module):
    """Pooled vectors of all features, by name."""

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection: nn.Module = embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """The collection's output."""
        pooled: KeyedTensor = self.embedding_bag_collection(features)
        return pooled


class DenseArch(nn.Module):
    """Dense features to one vector of the tables' width, with relu after both layers."""

    def __init__(self, in_features: int, hidden_layer_size: int, embedding_dim: int) -> None:
        super().__init__()
        self.model: nn.Module = nn.Sequential(
            nn.Linear(in_features, hidden_layer_size), nn.ReLU(), nn.Linear(hidden_layer_size, embedding_dim), nn.ReLU()
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """`[B, in_features]` to `[B, embedding_dim]`."""
        out: torch.Tensor = self.model(features)
        return out


class FMInteractionArch(nn.Module):
    """The dense vector, a dense net over all vectors, and a factorization machine over all numbers, side by side.

    Args:
        fm_in_features: numbers of all vectors of an example.
        sparse_feature_names: of the vectors, in order.
        deep_fm_dimension: width of the dense net's output.
    """

    def __init__(self, fm_in_features: int, sparse_feature_names: Sequence[str], deep_fm_dimension: int) -> None:
        super().__init__()
        self.sparse_feature_names = list(sparse_feature_names)
        self.deep_fm = DeepFM(nn.Sequential(nn.Linear(fm_in_features, deep_fm_dimension), nn.ReLU()))
        self.fm = FactorizationMachine()

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedTensor) -> torch.Tensor:
        """`[B, D + deep_fm_dimension + 1]`."""
        if not self.sparse_feature_names:
            return dense_features
        vectors = [dense_features, *(sparse_features[name] for name in self.sparse_feature_names)]
        return torch.cat([dense_features, self.deep_fm(vectors), self.fm(vectors)], dim=1)


class OverArch(nn.Module):
    """One probability from the outputs of all parts."""

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.model: nn.Module = nn.Sequential(nn.Linear(in_features, 1), nn.Sigmoid())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """`[B, in_features]` to `[B, 1]`."""
        out: torch.Tensor = self.model(features)
        return out


class SimpleDeepFMNN(nn.Module):
    """Click probability from dense features and embedding bags.

    Args:
        num_dense_features: number of dense features.
        embedding_bag_collection: tables of one width D.
        hidden_layer_size: of the net over dense features.
        deep_fm_dimension: width of the deep part's output.

    Raises:
        ValueError: no tables, or tables of different widths.
    """

    def __init__(
        self,
        num_dense_features: int,
        embedding_bag_collection: EmbeddingBagCollection,
        hidden_layer_size: int,
        deep_fm_dimension: int,
    ) -> None:
        super().__init__()
        configs = embedding_bag_collection.embedding_bag_configs()
        dims = {config.name: config.embedding_dim for config in configs}
        if len(set(dims.values())) != 1:
            raise ValueError(f"all tables need one embedding_dim; there are {dims}")
        dim = configs[0].embedding_dim
        names = [name for config in configs for name in config.feature_names]
        self.sparse_arch = SparseArch(embedding_bag_collection)
        self.dense_arch = DenseArch(num_dense_features, hidden_layer_size, dim)
        self.inter_arch = FMInteractionArch(dim * (len(names) + 1), names, deep_fm_dimension)
        self.over_arch = OverArch(dim + deep_fm_dimension + 1)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Probabilities `[B, 1]`."""
        vectors = self.inter_arch(self.dense_arch(dense_features), self.sparse_arch(sparse_features))
        probability: torch.Tensor = self.over_arch(vectors)
        return probability


class SimpleDeepFMNNWrapper(SimpleDeepFMNN):
    """The model with its loss, called with one object that has `float_features`, `idlist_features` and `label`."""

    def forward(self, model_input: Any) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """(binary cross-entropy, probabilities `[B, 1]`)."""
        probability = super().forward(model_input.float_features, model_input.idlist_features)
        return F.binary_cross_entropy(probability.squeeze(), model_input.label), probability
