"""DeepFM with TorchRec's submodules, arguments and state names (Guo et al. 2017, arXiv:1703.04247).

It returns probabilities. Configs use `rayrec.models.DeepFM`.
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
    """Looks up the pooled vectors of all features."""

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection: nn.Module = embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Returns the output of the collection."""
        pooled: KeyedTensor = self.embedding_bag_collection(features)
        return pooled


class DenseArch(nn.Module):
    """Maps dense features to a vector of the tables' width, with two linear layers and ReLUs."""

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
    """Concatenates the dense vector, a dense network over all vectors, and a factorization machine over all values.

    Args:
        fm_in_features: total width of all vectors of an example.
        sparse_feature_names: names of the vectors, in order.
        deep_fm_dimension: output width of the dense network.
    """

    def __init__(self, fm_in_features: int, sparse_feature_names: Sequence[str], deep_fm_dimension: int) -> None:
        super().__init__()
        self.sparse_feature_names = list(sparse_feature_names)
        self.deep_fm = DeepFM(nn.Sequential(nn.Linear(fm_in_features, deep_fm_dimension), nn.ReLU()))
        self.fm = FactorizationMachine()

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedTensor) -> torch.Tensor:
        """Returns `[B, D + deep_fm_dimension + 1]`."""
        if not self.sparse_feature_names:
            return dense_features
        vectors = [dense_features, *(sparse_features[name] for name in self.sparse_feature_names)]
        return torch.cat([dense_features, self.deep_fm(vectors), self.fm(vectors)], dim=1)


class OverArch(nn.Module):
    """Maps the concatenated outputs to a probability."""

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
        embedding_bag_collection: tables with the same embedding_dim D.
        hidden_layer_size: hidden width of the network over dense features.
        deep_fm_dimension: output width of the deep network.

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
            raise ValueError(f"all tables need the same embedding_dim; they have {dims}")
        dim = configs[0].embedding_dim
        names = [name for config in configs for name in config.feature_names]
        self.sparse_arch = SparseArch(embedding_bag_collection)
        self.dense_arch = DenseArch(num_dense_features, hidden_layer_size, dim)
        self.inter_arch = FMInteractionArch(dim * (len(names) + 1), names, deep_fm_dimension)
        self.over_arch = OverArch(dim + deep_fm_dimension + 1)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns probabilities `[B, 1]`."""
        vectors = self.inter_arch(self.dense_arch(dense_features), self.sparse_arch(sparse_features))
        probability: torch.Tensor = self.over_arch(vectors)
        return probability


class SimpleDeepFMNNWrapper(SimpleDeepFMNN):
    """The model with its loss; takes an object with `float_features`, `idlist_features` and `label`."""

    def forward(self, model_input: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Returns probabilities `[B, 1]`; in training mode the binary cross-entropy, and the probabilities."""
        probability = super().forward(model_input.float_features, model_input.idlist_features)
        if not self.training:
            return probability
        return F.binary_cross_entropy(probability.squeeze(), model_input.label), probability
